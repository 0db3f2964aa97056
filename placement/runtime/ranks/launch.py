"""`launch`: one process for each device on this host, started and watched by the process that calls it.

Interpreters are started afresh: torch's own spawning imports the caller's script once more, which a script without a
main guard does not survive.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from graphs.disk import temporary_folder
from graphs.errors import PlacementError, RankError
from placement.processes.processes import StoppedProcesses, keep_to_loopback, orderly_end, usable_cores
from placement.processes.starting import (
    NoAnswerError,
    NoResultError,
    Parent,
    Report,
    StepProgress,
    Workers,
    tell_nobody,
)

_LAST_WORDS_S = 2.0  # a rank that has lost another one leaves the reason to that one
_END_S = 5.0  # for a process to end by itself once it has answered
# The core is chosen before anything starts threads, which keep to the cores of the one that started them.
_PROGRAM = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C, during the imports below too
task = json.loads(sys.argv[1])
if task["cores"]:
    os.sched_setaffinity(0, task["cores"])
from placement.runtime.ranks import launch
launch.main(task)
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
    """Run a function in one process for each device, each a rank of torch's default process group.

    Args:
        work: ``module:function``; it is called with the description.
        description: what can be pickled, such as a record of a module; so is what the function returns.
        places: torch device of each process, e.g. ``"cpu"`` or ``"cuda:0"``.
        limit_s: how long it may take, anew after each report.
        pinned: each process of a device ``"cpu"`` keeps to a core of its own and computes with one thread.
        stdout: file descriptor for what the processes print; that of this one by default.
        report: told what the first of them gives `tell`.

    Returns:
        The values that each process returned, by rank.

    Raises:
        RankError: a process has died, stalled or failed; the message says which and why, and all have ended.
    """
    with orderly_end(), temporary_folder() as folder:
        workers = Workers()
        try:
            workers = _started(str(folder / "store"), places, _cores(places, pinned), stdout)
            workers.tell((work, description))
            found = workers.collect(limit_s, report, partial(_look, StoppedProcesses(workers.pids)))
            workers.join(_END_S)
        except NoAnswerError:
            raise RankError(
                f"nothing has come of the processes for {limit_s:.0f} s; allow more, or take a smaller model."
            ) from None
        except NoResultError as error:
            raise RankError(str(error)) from None
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
    size = str(len(places))
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environments = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} | ({"OMP_NUM_THREADS": str(len(own))} if own else {})
        for rank, own in enumerate(cores)
    ]
    tasks = [
        {"rank": rank, "size": len(places), "store": store, "cores": own, "places": list(places)}
        for rank, own in enumerate(cores)
    ]
    return Workers.fresh(_PROGRAM, tasks, environments, stdout)


def _look(processes: StoppedProcesses) -> None:
    """Raises: RankError: a process has been stopped for some time."""
    stopped = processes.look()
    if stopped is not None:
        raise RankError(f"rank {stopped} was stopped by a signal and has not gone on; run again.")


# -- in the process --------------------------------------------------------------------------------------------------

_parent: Parent | None = None  # of a process that `launch` has started


def tell(progress: StepProgress) -> None:
    """Tell who waits how far this is: rank 0 of `launch` tells the process that called it, all others nobody."""
    if _parent is not None and os.environ["RANK"] == "0":
        _parent.report(progress)


def main(task: Mapping[str, Any]) -> None:
    """The life of a process that `launch` starts."""
    global _parent
    parent = _parent = Parent.of_fresh(task)
    try:
        _join(task)
        work, description = parent.hear()
        module, _, name = work.partition(":")
        found = getattr(importlib.import_module(module), name)(description)
    except Exception as error:
        if _is_of_others(error):
            time.sleep(_LAST_WORDS_S)
        parent.fail(_sentence(error, task["rank"]))
        sys.exit(1)
    parent.answer(found)
    import torch.distributed as dist

    if dist.is_initialized():  # the work may have ended it
        dist.destroy_process_group()


def _join(task: Mapping[str, Any]) -> None:
    """Become a rank of the default process group."""
    import torch
    import torch.distributed as dist

    keep_to_loopback()  # all are on this host, and none is to be reached from another
    if task["cores"]:
        torch.set_num_threads(len(task["cores"]))
    store, place = met_store(task["store"]), torch.device(task["places"][task["rank"]])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    has_gpus = any(each.startswith("cuda") for each in task["places"])
    backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=task["rank"], world_size=task["size"])


def _is_of_others(error: Exception) -> bool:
    """True if this is how the end of another rank looks from here."""
    import torch.distributed as dist

    if isinstance(error, RankError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL"))


def _sentence(error: Exception, rank: int) -> str:
    if isinstance(error, PlacementError):
        return str(error)
    reason = f"{error}".strip().partition("\n")[0].removesuffix(".")
    return f"rank {rank} failed: {type(error).__name__}{': ' * bool(reason)}{reason}."
