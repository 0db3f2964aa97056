"""Worker processes, one pinned to each of some CPU cores, that do the same work at the same time.

They are forked, so that they have what their parent has, a user's model too, without a file or a copy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphs.disk import temporary_folder
from graphs.errors import ClusterError, PlacementError
from placement.processes.processes import how_ended, keep_freed_memory, keep_to_loopback, orderly_end, usable_cores
from placement.processes.starting import (
    NoAnswerError,
    Parent,
    Report,
    StepProgress,
    WorkerEndedError,
    WorkerFailedError,
    Workers,
    tell_nobody,
)

ResultT = TypeVar("ResultT")
_LAST_WORDS_S = 1.0  # a connection lost may only be what another worker's failure led to: let that one speak first


@dataclass(frozen=True)
class Worker:
    """One of several processes, as its own work sees it.

    Attributes:
        rank: its number.
        size: how many there are.
        core: the CPU core it is pinned to.
        limit_s: how long it waits for the others.
        parent: who started them.
    """

    rank: int
    size: int
    core: int
    limit_s: float
    _barrier: Any
    _board: Any
    _folder: Path
    parent: Parent

    def barrier(self) -> None:
        """Wait until all workers are here.

        Raises:
            ClusterError: one of them never came.
        """
        try:
            self._barrier.wait(self.limit_s)
        except BrokenBarrierError:
            raise ClusterError(
                f"the worker on core {self.core} waited {self.limit_s:g} s for the others; try again on a quieter "
                "machine or with fewer devices."
            ) from None

    def all_gather(self, value: float) -> list[float]:
        """The value of each worker, by rank; all workers call it."""
        self._board[self.rank] = value
        self.barrier()
        found = list(self._board)
        self.barrier()
        return found

    def report(self, progress: StepProgress) -> None:
        """Tell the process that started the workers how far they are; the first one speaks for all."""
        if self.rank == 0:
            self.parent.report(progress)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """In the block all workers are torch's default process group, each with its own rank."""
        keep_to_loopback()
        file_store: Any = dist.FileStore  # type: ignore[attr-defined]
        store, limit = file_store(str(self._folder / "store"), self.size), timedelta(seconds=self.limit_s)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)
        try:
            yield
            self.barrier()
        finally:
            dist.destroy_process_group()


def cores_for(devices: int | None) -> list[int]:
    """Cores to pin that many workers to, all this process may use for None.

    Raises:
        ClusterError: there are not as many, or this system cannot pin processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ClusterError("CPU cores can be taken as devices on Linux only; describe this machine in a TOML file.")
    cores = usable_cores()
    if devices is None:
        return cores
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= len(cores):
        raise ClusterError(f"got devices = {devices!r}; expected 1 to {len(cores)}, the cores this process may use.")
    return cores[:devices]


def begin_on_core(core: int) -> None:
    """Keep a forked process to one core."""
    keep_freed_memory()
    sys.stdout = sys.stderr  # what a model prints is no part of a command's answer
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def run_workers(
    work: Callable[[Worker], ResultT], cores: Sequence[int], limit_s: float = 600.0, report: Report = tell_nobody
) -> list[ResultT]:
    """Run `work` in a process on each core; its results by rank. ``report`` is given what `Worker.report` is.

    Raises:
        ClusterError: a worker failed, ended before its work did, or nothing came of them for longer than ``limit_s``.
    """
    context = multiprocessing.get_context("fork")
    barrier, board = context.Barrier(len(cores)), context.Array("d", len(cores))
    with orderly_end(), temporary_folder() as folder:

        def life(rank: int, core: int) -> Callable[[Parent], None]:
            return lambda parent: _work(work, Worker(rank, len(cores), core, limit_s, barrier, board, folder, parent))

        workers = Workers.forked([life(rank, core) for rank, core in enumerate(cores)])
        try:
            return workers.collect(limit_s, report)
        except NoAnswerError:
            raise ClusterError(
                f"the workers were not done after {limit_s:g} s; try again on a quieter machine."
            ) from None
        except WorkerFailedError as error:
            raise ClusterError(str(error)) from None
        except WorkerEndedError as error:
            raise ClusterError(_ended(cores[error.rank], error.code)) from None
        finally:
            workers.end()


def _ended(core: int, code: int) -> str:
    hint = ", most likely for want of memory" if code == -signal.SIGKILL else ""
    return f"the worker on core {core} {how_ended(code)}{hint}; try fewer devices or a smaller model."


def _work(work: Callable[[Worker], Any], worker: Worker) -> None:
    """The life of a worker."""
    begin_on_core(worker.core)
    try:
        worker.parent.answer(work(worker))
    except PlacementError as error:
        worker.parent.fail(str(error))
    except Exception as error:
        time.sleep(_LAST_WORDS_S)
        worker.parent.fail(f"the worker on core {worker.core} failed with {type(error).__name__}: {error}")
