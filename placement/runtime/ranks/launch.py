"""`launch`: one process for each device on this host, started and watched by the process that calls it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from graphs.disk import temporary_folder
from graphs.errors import PlacementError, RankError
from placement.processes.processes import begin_worker, orderly_end, usable_cores
from placement.processes.repeats import UNDERWAY, Report, Underway

_HOST = "127.0.0.1"
_POLL_S, _LOOK_S = 0.05, 0.5
_STOPPED_LOOKS = 16  # in a row, after which a stopped process ends the run, if no other has missed it before
_LAST_WORDS_S = 1.0  # for a reason to arrive from a worker that has ended
_START_S = 300.0
# The core is chosen before anything starts threads, which keep to the cores of the one that started them.
_BOOT = """
import json, os, sys
task = json.loads(sys.argv[1])
if task["cores"]:
    os.sched_setaffinity(0, task["cores"])
from placement.runtime.ranks.launch import work
work(task)
"""


def launch(
    work: str,
    description: Any,
    places: Sequence[str],
    *,
    port: int = 0,
    limit_s: float | None = None,
    pinned: bool = True,
    stdout: int | None = None,
    report: Report = lambda underway: None,
) -> list[Any]:
    """Run a function in one process for each device, the processes being a `Crew`.

    Args:
        work: ``module:function``; it is called with the description and the `Crew`, and returns what JSON can hold.
        description: anything that JSON can hold.
        places: torch device of each process, e.g. ``"cpu"`` or ``"cuda:0"``.
        port: of the store by which they meet; 0 for any free one.
        limit_s: how long it may take.
        pinned: each process of a device ``"cpu"`` keeps to a core of its own and computes with one thread.
        stdout: file descriptor for what the processes print; that of this one by default.
        report: given what the first of them has last given `Crew.report`.

    Returns:
        What each process returned, by rank.

    Raises:
        RankError: a process has died, stalled or failed; the message says rank, op and reason, and all have ended.
    """
    with orderly_end(), temporary_folder() as folder:
        (folder / "description.json").write_text(json.dumps(description), encoding="utf-8")
        store = new_store(port)
        workers: list[_Worker] = []
        try:
            for rank, cores in enumerate(_cores(places, pinned)):
                workers.append(_started(rank, len(places), work, str(folder), store.port, cores, stdout))
            _watch(workers, store, None if limit_s is None else time.monotonic() + limit_s, report)
            found = [(folder / f"{worker.rank}.json").read_text(encoding="utf-8") for worker in workers]
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.wait()
    return [json.loads(text) for text in found]


@dataclass(frozen=True)
class _Worker:
    """A process that was started."""

    rank: int
    process: subprocess.Popen[bytes]


def new_store(port: int = 0) -> Any:
    """The store by which the processes of a run meet, kept by this one.

    Raises:
        RankError: the port is in use, or this PyTorch has no stores.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RankError("this build of PyTorch has no torch.distributed; install one that has.")
    start: Any = dist.TCPStore  # type: ignore[attr-defined]
    try:
        return start(_HOST, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_S))
    except RuntimeError:
        raise RankError(
            f"cannot listen on port {port} of {_HOST}, another process may be using it; take port 0 for any free one."
        ) from None


def _cores(places: Sequence[str], pinned: bool) -> list[list[int]]:
    """The core of each process; empty where it may run on all of them."""
    if not (pinned and hasattr(os, "sched_setaffinity")):
        return [[] for _ in places]
    allowed = usable_cores()
    found, n_taken = [], 0
    for place in places:
        is_core = place == "cpu"
        found.append([allowed[n_taken % len(allowed)]] if is_core else [])
        n_taken += is_core
    return found


def _started(rank: int, size: int, work: str, folder: str, port: int, cores: list[int], stdout: int | None) -> _Worker:
    task = {"work": work, "folder": folder, "rank": rank, "size": size, "port": port, "cores": cores}
    task["parent"] = os.getpid()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    if cores:
        environment["OMP_NUM_THREADS"] = str(len(cores))
    # -P: a file of the caller's folder must not hide a package.
    command = [sys.executable, "-P", "-c", _BOOT, json.dumps(task)]
    return _Worker(rank, subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout))


def _watch(workers: Sequence[_Worker], store: Any, deadline: float | None, report: Report) -> None:
    """Wait until all have ended well.

    Raises:
        RankError: the reason why one has not.
    """
    heard, looked_s, stopped_looks = b"", time.monotonic(), 0
    while codes := [worker.process.poll() for worker in workers]:
        bad = [worker for worker, code in zip(workers, codes, strict=True) if code not in (None, 0)]
        if bad:
            raise RankError(reason_of(store, bad[0].rank, bad[0].process.returncode))
        if all(code == 0 for code in codes):
            return
        if deadline is not None and time.monotonic() > deadline:
            raise RankError("the processes were not done in the time they had; allow more, or take a smaller model.")
        if time.monotonic() - looked_s > _LOOK_S:  # seldom: the store's thread takes time from what is measured
            stopped = next((worker for worker in workers if _is_stopped(worker.process)), None)
            stopped_looks = 0 if stopped is None else stopped_looks + 1
            if stopped is not None and stopped_looks >= _STOPPED_LOOKS:
                raise RankError(f"rank {stopped.rank} was stopped by a signal and has not gone on; run again.")
            looked_s, before = time.monotonic(), heard
            heard = store.get(UNDERWAY) if store.check([UNDERWAY]) else b""
            if heard != before:
                report(Underway(**json.loads(heard)))
        time.sleep(_POLL_S)


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except (AttributeError, ChildProcessError):  # a system without it; or it has ended meanwhile
        return False
    return found is not None


def reason_of(store: Any, rank: int, code: int) -> str:
    """Why the run has failed, in the words of the first process that knew; one has ended with this exit code."""
    from placement.runtime.ranks.watchdog import Beat, beat_key, failure_of

    end = time.monotonic() + (_LAST_WORDS_S if code > 0 else 0)
    while not (sentence := failure_of(store)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if sentence:
        return sentence
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    doing = ""
    with suppress(Exception):  # it had not begun to tell
        key = beat_key(rank)
        doing = " " + Beat.from_json(store.get(key)).doing() if store.check([key]) else ""
    hint = ", most likely for want of memory" if code == -signal.SIGKILL and not doing else ""
    return f"rank {rank} {how}{doing}{hint}."


# -- in the process --------------------------------------------------------------------------------------------------


def work(task: Mapping[str, Any]) -> None:
    """The life of a worker."""
    begin_worker(task["parent"])
    import torch

    from placement.runtime.ranks.process_group import Crew

    if task["cores"]:
        torch.set_num_threads(len(task["cores"]))
    crew = Crew.start(met_store(task["port"]), task["rank"], task["size"], is_quiet=True)
    try:
        module, _, name = task["work"].partition(":")
        description = json.loads(Path(task["folder"], "description.json").read_text(encoding="utf-8"))
        found = getattr(importlib.import_module(module), name)(description, crew)
        Path(task["folder"], f"{task['rank']}.json").write_text(json.dumps(found), encoding="utf-8")
    except PlacementError as error:
        crew.fail(str(error))
        sys.exit(1)


def met_store(port: int) -> Any:
    """The store that the process which started this one keeps."""
    import torch.distributed as dist

    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    return connect(_HOST, port, is_master=False, timeout=timedelta(seconds=_START_S))
