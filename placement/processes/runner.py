"""`Runner`: does a round of tasks, each by itself, and gives what they found in the order of the tasks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol, TypeVar

from graphs.errors import WorkersError
from placement.processes.processes import begin_worker, usable_cores

SharedT = TypeVar("SharedT")
TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")
Told = Callable[[int, Any], None]  # the number of a task, and what was found for it
MOST_WORKERS = 100_000
MOST_LOSSES = 3  # of workers, by one task; then it is the task that ends them


class Preparing(Protocol):
    """Input of all tasks of a run; it goes to each worker once."""

    def prepare(self) -> None:
        """Have the kernels that tasks call compiled, or loaded."""


class Runner(Protocol):
    """Runner of tasks. Results must depend on shared and task alone, never on the worker that does a task, or when."""

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """Results of `work` for each task, in their order.

        Args:
            work: a function of a module, that workers find there by its name.
            told: of each task as soon as it is done, in any order.

        Raises:
            PlacementError: as `work` raised it.
            WorkersError: workers are lost faster than they can be replaced.
        """


class LocalRunner:
    """Does tasks in this process, one after the other."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """As of any `Runner`."""
        found = []
        for number, task in enumerate(tasks):
            found.append(work(self._shared, task))
            if told is not None:
                told(number, found[-1])
        return found


def opened(shared: Preparing, workers: int, address: str | None = None) -> AbstractContextManager[Runner]:
    """A runner with so many workers: processes of this machine, or with an address actors of a Ray cluster.

    One worker without an address is this process. Kernels are compiled once on each host.

    Args:
        address: of a Ray cluster that runs already, ``"auto"`` or ``"HOST:PORT"``; None: this machine.

    Raises:
        WorkersError: fewer than one worker, no Ray, no cluster there, one of another version, or one too small.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
        raise WorkersError(f"workers is {workers!r}; expected a whole number, 1 or more.")
    if workers == 1 and address is None:
        return nullcontext(LocalRunner(shared))
    if address is None:
        return process_runner(shared, workers)
    from placement.processes.ray_runner import ray_runner

    return ray_runner(shared, workers, address)


def too_many_losses() -> WorkersError:
    """A task has ended `MOST_LOSSES` workers."""
    return WorkersError(
        f"a task has ended {MOST_LOSSES} workers, most likely for want of memory; take fewer workers, or leave them "
        "out to run in this process."
    )


# -- processes of this machine ----------------------------------------------------------------------------------------


@contextmanager
def process_runner(shared: Preparing, workers: int) -> Iterator[ProcessRunner]:
    """A runner whose processes end with it, at most one for each core. Kernels are compiled here, and loaded there."""
    shared.prepare()
    runner = ProcessRunner(shared, min(workers, len(usable_cores())))
    try:
        yield runner
    finally:
        runner.end()


class ProcessRunner:
    """New interpreters, each of which does one task at a time, on one thread.

    Where one ends, all are replaced, and what they were doing is done again.
    """

    def __init__(self, shared: Preparing, workers: int) -> None:
        self._shared, self._count = shared, workers
        self._pool: ProcessPoolExecutor | None = None

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [] if self._pool is None else list(self._pool._processes)

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """As of any `Runner`."""
        waiting, running, found = deque(range(len(tasks))), dict[Future[Any], int](), dict[int, FoundT]()
        losses: Counter[int] = Counter()  # of the workers that did a task, or another one beside it
        try:
            while waiting or running:
                try:
                    while waiting and len(running) < self._count:
                        running[self._submitted(work, tasks[waiting[0]])] = waiting[0]
                        waiting.popleft()
                    done = wait(running, return_when=FIRST_COMPLETED).done
                    answers = {running[future]: future.result() for future in done}
                except BrokenProcessPool:
                    self.end()
                    losses.update(running.values())
                    if losses and max(losses.values()) == MOST_LOSSES:
                        raise too_many_losses() from None
                    waiting.extendleft(running.values())
                    running.clear()
                    continue
                for future in done:
                    del running[future]
                for number, answer in answers.items():
                    if isinstance(answer, Exception):
                        raise answer
                    found[number] = answer
                    if told is not None:
                        told(number, answer)
        except BaseException:
            self.end()  # what is still under way is nobody's business any more
            raise
        return [found[number] for number in range(len(tasks))]

    def _submitted(self, work: Callable[[Any, Any], Any], task: Any) -> Future[Any]:
        if self._pool is None:
            context, begin = multiprocessing.get_context("spawn"), (pickle.dumps(self._shared), os.getpid())
            self._pool = ProcessPoolExecutor(self._count, context, _begin, begin)
        main = sys.modules["__main__"]
        # A worker that starts here would run the caller's script once more, which need not have a main guard.
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return self._pool.submit(_done, work, task)
        finally:
            sys.modules["__main__"] = main

    def end(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(cancel_futures=True)


_shared: Any = None  # of a worker


def _begin(shared: bytes, parent: int) -> None:
    """The first thing that a worker does; what it prints is no part of an answer."""
    global _shared
    begin_worker(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # before what reads them is loaded
    _shared = pickle.loads(shared)
    _shared.prepare()


def _done(work: Callable[[Any, Any], Any], task: Any) -> Any:
    """What a task gives; an error of it is its answer, or one with its sentence where it cannot be sent."""
    try:
        return work(_shared, task)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return WorkersError(str(error))
        return error
