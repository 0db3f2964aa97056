"""Worker processes, one pinned to each of some CPU cores, that do the same work at the same time.

They are forked, so that they have what their parent has, a user's model too, without a file or a copy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, TypeVar

import torch

from graphs.disk import temporary_folder
from graphs.errors import ClusterError, PlacementError
from placement.measuring.links import Gloo, Mail, Peers
from placement.processes.kept_memory import keep_freed_memory
from placement.processes.processes import begin_worker, orderly_end, usable_cores
from placement.processes.repeats import Report, Underway
from placement.runtime.transport.mailbox import Mailbox

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
    """

    rank: int
    size: int
    core: int
    limit_s: float
    _barrier: Any
    _board: Any
    _folder: str
    _answers: Connection

    def meet(self) -> None:
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

    def everyones(self, value: float) -> list[float]:
        """What each worker gives here, by rank."""
        self._board[self.rank] = value
        self.meet()
        found = list(self._board)
        self.meet()
        return found

    def report(self, underway: Underway) -> None:
        """Tell the process that started the workers how far they are; the first one speaks for all."""
        if self.rank == 0:
            self._answers.send((None, underway))

    def connect(self) -> Peers:
        """The way to the other workers, the one that tensors take when a placement runs."""
        if Mailbox.is_possible():
            return Mail(self.rank, self.size, Path(self._folder), self.meet)
        return Gloo(self.rank, self.size, str(Path(self._folder) / "store"), self.limit_s)


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


def begin_on_core(core: int, parent: int) -> None:
    """As `begin_worker`, for a forked process that computes on one core."""
    begin_worker(parent)
    keep_freed_memory()
    sys.stdout = sys.stderr  # what a model prints is no part of a command's answer
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def run_workers(
    work: Callable[[Worker], ResultT],
    cores: Sequence[int],
    limit_s: float = 600.0,
    report: Report = lambda underway: None,
) -> list[ResultT]:
    """What `work` returns in a process on each core, by rank; ``report`` is given what `Worker.report` is.

    Raises:
        ClusterError: a worker failed, ended before its work did, or nothing came of them for longer than ``limit_s``.
    """
    context = multiprocessing.get_context("fork")
    barrier, board = context.Barrier(len(cores)), context.Array("d", len(cores))
    with orderly_end(), temporary_folder() as folder:
        started: list[tuple[Any, Connection]] = []
        try:
            for rank, core in enumerate(cores):
                ours, theirs = context.Pipe(duplex=False)
                worker = Worker(rank, len(cores), core, limit_s, barrier, board, str(folder), theirs)
                process = context.Process(target=_main, args=(work, worker, os.getpid()), daemon=True)
                with warnings.catch_warnings():
                    # Python warns of forking beside other threads, which may hold locks; a worker needs none of theirs.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                started.append((process, ours))
            return _collected(started, cores, limit_s, report)
        finally:
            for process, ours in started:
                process.kill()
                process.join()
                ours.close()


def _collected(
    started: Sequence[tuple[Any, Connection]], cores: Sequence[int], limit_s: float, report: Report
) -> list[Any]:
    results: dict[int, Any] = {}
    rank_of = {ours: rank for rank, (_, ours) in enumerate(started)}
    deadline = time.monotonic() + limit_s
    while len(results) < len(started):
        waiting = [ours for ours, rank in rank_of.items() if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ClusterError(f"the workers were not done after {limit_s:g} s; try again on a quieter machine.")
        for ours in ready:
            assert isinstance(ours, Connection)
            rank = rank_of[ours]
            try:
                is_done, found = ours.recv()
            except EOFError:
                process = started[rank][0]
                process.join()
                raise ClusterError(_ended(cores[rank], process.exitcode)) from None
            if is_done is None:
                report(found)
                deadline = time.monotonic() + limit_s
                continue
            if not is_done:
                raise ClusterError(found)
            results[rank] = found
    return [results[rank] for rank in range(len(started))]


def _ended(core: int, code: int) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    hint = ", most likely for want of memory" if code == -signal.SIGKILL else ""
    return f"the worker on core {core} ended with {how}{hint}; try fewer devices or a smaller model."


def _main(work: Callable[[Worker], Any], worker: Worker, parent: int) -> None:
    """The life of a worker; its parent ends it where it must end early."""
    begin_on_core(worker.core, parent)
    try:
        answer = True, work(worker)
    except PlacementError as error:
        answer = False, str(error)
    except Exception as error:
        answer = False, f"the worker on core {worker.core} failed with {type(error).__name__}: {error}"
        time.sleep(_LAST_WORDS_S)
    with suppress(BrokenPipeError):
        worker._answers.send(answer)
