"""`ProcessRunner`: tasks in processes of this machine; one that ends is replaced, and its task done again."""

from __future__ import annotations

import pickle
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

from graphs.errors import WorkersError
from placement.processes.processes import usable_cores
from placement.processes.starting import Parent, WorkerEndedError, Workers
from placement.workers.runner import MOST_LOSSES, Preparing, Told, too_many_losses

SharedT = TypeVar("SharedT")
TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")
_PROGRAM = "import json, sys; from placement.workers.process_runner import main; main(json.loads(sys.argv[1]))"


@contextmanager
def process_runner(shared: Preparing, workers: int) -> Iterator[ProcessRunner]:
    """A runner whose processes end with it, at most one for each core. Kernels are compiled here, and loaded there."""
    shared.prepare()
    runner = ProcessRunner(shared, min(workers, len(usable_cores())))
    try:
        runner.start()
        yield runner
    finally:
        runner.end()


class ProcessRunner:
    """So many new interpreters, each of which does one task at a time, on one thread."""

    def __init__(self, shared: Preparing, workers: int) -> None:
        self._shared, self._count = shared, workers
        self._workers: list[Workers] = []  # of one process each

    def start(self) -> None:
        """Have as many processes as there should be, ready for tasks.

        Raises:
            WorkersError: one does not begin.
        """
        fresh = [self._started() for _ in range(self._count - len(self._workers))]
        self._workers += fresh
        try:
            for worker in fresh:
                worker.tell(self._shared)
                worker.collect()
        except WorkerEndedError as error:
            raise WorkersError(
                f"a worker ended with code {error.code} before its first task, most likely for want of memory; take "
                "fewer, or leave out workers to run in this process."
            ) from None

    @property
    def processes(self) -> list[int]:
        """The process of each worker."""
        return [worker.pids[0] for worker in self._workers]

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """As of any `Runner`."""
        self.start()  # after Ctrl-C, or an error, none is left
        waiting, running, found = deque(range(len(tasks))), dict[Workers, int](), dict[int, FoundT]()
        losses = dict.fromkeys(range(len(tasks)), 0)
        try:
            while len(found) < len(tasks):
                for worker in [each for each in self._workers if each not in running][: len(waiting)]:
                    running[worker] = waiting.popleft()
                    worker.post((work, tasks[running[worker]]))
                for worker in _heard(running):
                    task = running.pop(worker)
                    try:
                        (answer,) = worker.collect()
                    except WorkerEndedError:
                        losses[task] += 1
                        if losses[task] == MOST_LOSSES:
                            raise too_many_losses() from None
                        waiting.appendleft(task)
                        self._workers.remove(worker)
                        worker.end()
                        self.start()
                        continue
                    if isinstance(answer, Exception):
                        raise answer
                    found[task] = answer
                    if told is not None:
                        told(task, found[task])
        except BaseException:
            self.end()  # what is still under way is nobody's business any more
            raise
        return [found[task] for task in range(len(tasks))]

    def end(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _started(self) -> Workers:
        environment = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        return Workers.fresh(_PROGRAM, [{}], [environment], stdout=subprocess.DEVNULL)


def _heard(workers: Iterable[Workers]) -> list[Workers]:
    """Workers that have answered or ended, once there are some."""
    pipes: dict[Any, Workers] = {worker.pipes[0]: worker for worker in workers}
    return [pipes[pipe] for pipe in wait(list(pipes))]


def main(task: Mapping[str, Any]) -> None:
    """The life of a worker: tasks until the pipe is closed. An error of a task is its answer."""
    parent = Parent.of_fresh(task)
    shared = parent.hear()
    shared.prepare()
    parent.answer(None)
    while True:
        try:
            work, given = parent.hear()
        except EOFError:
            return
        try:
            found = work(shared, given)
        except Exception as error:
            found = _portable(error)
        parent.answer(found)


def _portable(error: Exception) -> Exception:
    """The error, or where that cannot be sent, one with its sentence."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkersError(str(error))
    return error
