"""What can be told about other processes of this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from placement.processes.processes import ProcessId, busy_s, queued_s, usable_cores

_SPINS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells how long a process waits")
def test_a_process_is_busy_while_it_waits_for_a_core() -> None:
    core = str(usable_cores()[0])
    spinning = [
        subprocess.Popen([sys.executable, "-c", _SPINS, core], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for each in spinning:
            assert each.stdout
            assert each.stdout.readline() == "\n"
        ids = [ProcessId("", each.pid, 0) for each in spinning]
        before = [busy_s(each) for each in ids]
        while min(busy_s(each) - was for each, was in zip(ids, before, strict=True)) < 0.5:
            os.sched_yield()
        # They cannot both have computed all that time.
        assert max(queued_s(each.number) for each in ids) > 0.1
    finally:
        for each in spinning:
            each.kill()
            each.communicate()


def test_a_process_that_is_gone_is_not_busy() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert busy_s(ProcessId("", gone.pid, 0)) == queued_s(gone.pid) == 0.0
