"""`launch`: one process for each device on this host, started and watched by the process that calls it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from graphs.disk import temporary_folder
from graphs.errors import PlacementError, RankError
from placement.processes.processes import how_ended, orderly_end, usable_cores
from placement.processes.progress import Report, tell_nobody
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.processes.stopped import StoppedProcesses

_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for a reason to arrive from a worker that has ended
# The core is chosen before anything starts threads, which keep to the cores of the one that started them.
_PROGRAM = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C, during the imports below too
task = json.loads(sys.argv[1])
if task["cores"]:
    os.sched_setaffinity(0, task["cores"])
from placement.runtime.ranks.launch import main
main(task)
"""


def launch(
    work: str,
    description: Any,
    places: Sequence[str],
    *,
    limit_s: float | None = None,
    pinned: bool = True,
    stdout: int | None = None,
    report: Report = tell_nobody,
) -> list[Any]:
    """Run a function in one process for each device, each a rank of a `ProcessGroup`.

    Args:
        work: ``module:function``; it is called with the description and the `ProcessGroup`.
        description: what can be pickled, such as a record of a module; so is what the function returns.
        places: torch device of each process, e.g. ``"cpu"`` or ``"cuda:0"``.
        limit_s: how long it may take, anew after each report.
        pinned: each process of a device ``"cpu"`` keeps to a core of its own and computes with one thread.
        stdout: file descriptor for what the processes print; that of this one by default.
        report: told what the first of them gives `ProcessGroup.report`.

    Returns:
        The values that each process returned, by rank.

    Raises:
        RankError: a process has died, stalled or failed; the message says rank, op and reason, and all have ended.
    """
    with orderly_end(), temporary_folder() as folder:
        path = str(folder / "store")
        store, workers = met_store(path), Workers()
        try:
            workers = _started(path, places, _cores(places, pinned), stdout)
            workers.tell((work, description))
            found = workers.collect(limit_s, report, partial(_look, StoppedProcesses(workers.pids)))
            workers.join()
        except NoAnswerError:
            raise RankError(
                "the processes were not done in the time they had; allow more, or take a smaller model."
            ) from None
        except WorkerFailedError as error:
            raise RankError(str(error)) from None
        except WorkerEndedError as error:
            raise RankError(reason_of(store, error.rank, error.code)) from None
        finally:
            workers.end()
    return found


def met_store(path: str) -> Any:
    """The store by which the processes of a run meet: a file in a folder of this user, so that no port is open for it.

    Raises:
        RankError: this PyTorch has no stores.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RankError("this build of PyTorch has no torch.distributed; install one that has.")
    store: Any = dist.FileStore  # type: ignore[attr-defined]
    return store(path)


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


def _started(store: str, places: Sequence[str], cores: Sequence[list[int]], stdout: int | None) -> Workers:
    size = len(places)
    # All of them are on this host.
    shared = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"), "WORLD_SIZE": str(size)}
    environments = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} | ({"OMP_NUM_THREADS": str(len(own))} if own else {})
        for rank, own in enumerate(cores)
    ]
    tasks = [{"rank": rank, "size": size, "store": store, "cores": own} for rank, own in enumerate(cores)]
    return Workers.fresh(_PROGRAM, tasks, environments, stdout)


def _look(processes: StoppedProcesses) -> None:
    """Raises: RankError: a process has been stopped for some time."""
    stopped = processes.look()
    if stopped is not None:
        raise RankError(f"rank {stopped} was stopped by a signal and has not gone on; run again.")


def reason_of(store: Any, rank: int, code: int) -> str:
    """Why the run has failed, in the words of the first process that knew; one has ended with this exit code."""
    from placement.runtime.ranks.watchdog import Beat, beat_key, failure_of

    end = time.monotonic() + (_LAST_WORDS_S if code > 0 else 0)
    while not (sentence := failure_of(store)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if sentence:
        # Only this process knows how one of its own has ended.
        return sentence.replace(f"rank {rank} has died", f"rank {rank} {how_ended(code)}", 1)
    doing = ""
    with suppress(Exception):  # it had not begun to tell
        key = beat_key(rank)
        doing = " " + Beat.from_json(store.get(key)).doing() if store.check([key]) else ""
    hint = ", most likely for want of memory" if code == -signal.SIGKILL and not doing else ""
    return f"rank {rank} {how_ended(code)}{doing}{hint}."


# -- in the process --------------------------------------------------------------------------------------------------


def main(task: Mapping[str, Any]) -> None:
    """The life of a process that `launch` starts."""
    parent = Parent.of_fresh(task)
    import torch

    from placement.runtime.ranks.process_group import ProcessGroup

    if task["cores"]:
        torch.set_num_threads(len(task["cores"]))
    group = ProcessGroup.start(met_store(task["store"]), task["rank"], task["size"], is_quiet=True, parent=parent)
    try:
        work, description = parent.hear()
        module, _, name = work.partition(":")
        parent.answer(getattr(importlib.import_module(module), name)(description, group))
    except PlacementError as error:
        group.fail(str(error))
        sys.exit(1)
