"""Processes that `launch` starts: ranks of one group, ended together and with the reason when one of them ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_failures import is_alive

from graphs.errors import RankError
from placement.processes.starting import StepProgress
from placement.runtime.ranks.launch import launch

PROMISED_S = 10.0  # from the end of a rank to that of the run
START_S = 60.0  # for processes to start on a busy machine


def test_ranks_meet_on_cores_of_their_own_and_tell_how_far_they_are() -> None:
    told: list[StepProgress] = []
    found = launch("launch_work:meet", 10, ["cpu", "cpu"], limit_s=START_S, report=told.append)
    assert found == [(0, 30.0, 1, 1), (1, 30.0, 1, 1)]
    assert [progress.done for progress in told] == [0, 1, 2]  # by rank 0 alone


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"rank 1 failed: ValueError: this op is tired\."),
        ("refuse", r"the batch does not divide\."),
        ("exit", r"rank 1 ended with exit code 3\."),
        ("SIGKILL", r"rank 1 was killed by SIGKILL, most likely for want of memory\."),
        ("SIGSEGV", r"rank 1 was killed by SIGSEGV\."),
    ],
)
def test_a_rank_that_ends_ends_the_run_and_says_why(tmp_path: Path, how: str, reason: str) -> None:
    with pytest.raises(RankError) as caught:
        launch("launch_work:end", (how, tmp_path), ["cpu", "cpu"], limit_s=START_S)
    assert time.time() - (tmp_path / "1.met").stat().st_mtime < PROMISED_S
    assert re.fullmatch(reason, str(caught.value)), caught.value
    assert not _alive(tmp_path)


def test_a_rank_that_hangs_ends_the_run_in_the_time_it_has(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^nothing has come of the processes for 15 s; allow more"):
        launch("launch_work:end", ("sleep", tmp_path), ["cpu", "cpu"], limit_s=15.0)
    assert not _alive(tmp_path)


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 was stopped by a signal and has not gone on; run again\.$"):
        launch("launch_work:end", ("SIGSTOP", tmp_path), ["cpu", "cpu"], limit_s=START_S)
    assert time.time() - (tmp_path / "1.met").stat().st_mtime < PROMISED_S
    assert not _alive(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    call = f"launch('launch_work:end', ('sleep', Path({str(tmp_path)!r})), ['cpu', 'cpu'])"
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom pathlib import Path\n"
    code += f"from placement.runtime.ranks.launch import launch; {call}"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        while not (tmp_path / "1.met").exists() and parent.poll() is None:
            time.sleep(0.05)
        os.kill(parent.pid, number)
        ended_s = time.monotonic()
    while _alive(tmp_path) and time.monotonic() < ended_s + PROMISED_S:
        time.sleep(0.05)
    assert not _alive(tmp_path)


def _alive(folder: Path) -> list[int]:
    return [pid for file in folder.glob("*.pid") if is_alive(pid := int(file.read_text()))]
