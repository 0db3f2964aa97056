"""Workers that measure side by side and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_failures import is_alive

from graphs.errors import ClusterError
from placement.measuring.machine.workers import Worker, cores_for, run_workers

N_CORES = len(cores_for(None))
PATIENCE_S = 120.0  # for a process to end on a busy machine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


def _about_itself(worker: Worker) -> tuple[int, int, set[int], int, list[float]]:
    gathered = worker.all_gather(worker.rank + 0.5)
    return worker.rank, worker.core, os.sched_getaffinity(0), torch.get_num_threads(), gathered


# -- workers -----------------------------------------------------------------------------------------------------


def test_workers_are_pinned_and_have_one_thread() -> None:
    cores = cores_for(min(2, N_CORES))
    before = os.sched_getaffinity(0), torch.get_num_threads()
    for rank, found in enumerate(run_workers(_about_itself, cores, 60)):
        assert found == (rank, cores[rank], {cores[rank]}, 1, [r + 0.5 for r in range(len(cores))])
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def _fails(worker: Worker) -> None:
    if worker.rank == worker.size - 1:
        raise ZeroDivisionError("no such thing")
    worker.barrier()


def _dies(worker: Worker) -> None:
    if worker.rank == worker.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.barrier()


def _sleeps(worker: Worker) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "limit_s", "sentence"),
    [
        (_fails, 60, r"the worker on core \d+ failed with ZeroDivisionError: no such thing"),
        (_dies, 60, r"the worker on core \d+ was killed by SIGKILL, most likely for want of memory; try fewer"),
        (_sleeps, 0.2, r"the workers were not done after 0.2 s; try again"),
    ],
)
def test_a_failing_worker_ends_all(work: Any, limit_s: float, sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        run_workers(work, cores_for(min(2, N_CORES)), limit_s)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(how: signal.Signals, tmp_path: Path) -> None:
    code = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from pathlib import Path
from placement.measuring.machine.workers import run_workers

def work(worker):
    Path({str(tmp_path)!r}, f"{{os.getpid()}}.pid").touch()
    time.sleep(600)

run_workers(work, {cores_for(min(2, N_CORES))!r})
"""
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    while len(pids := [int(path.stem) for path in tmp_path.glob("*.pid")]) < min(2, N_CORES):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(how)
    _, err = parent.communicate()
    assert how == signal.SIGKILL or err.splitlines()[-1].startswith("placement: ended by SIGTERM, and with it all ")
    assert how == signal.SIGKILL or parent.returncode == 128 + how
    end = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    assert how == signal.SIGKILL or not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("devices", [0, -1, N_CORES + 1, 1.5, True, "2"])
def test_there_are_only_so_many_cores(devices: Any) -> None:
    with pytest.raises(ClusterError, match=f"expected 1 to {N_CORES}, the cores this process may use"):
        cores_for(devices)
