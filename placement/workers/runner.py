"""`Runner`: does a round of tasks, each by itself, and gives what they found in the order of the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from env.cluster import Cluster
from graphs.errors import WorkersError
from graphs.opgraph import OpGraph

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


@dataclass(frozen=True, eq=False)
class Shared:
    """Graph and cluster of the strategies that tasks score."""

    graph: OpGraph
    cluster: Cluster

    def prepare(self) -> None:
        """As of `Preparing`."""
        from placement.solving.compiling import compile_for_strategies

        compile_for_strategies()


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
        from placement.workers.process_runner import process_runner

        return process_runner(shared, workers)
    from placement.workers.ray_runner import ray_runner

    return ray_runner(shared, workers, address)


def too_many_losses() -> WorkersError:
    """A task has ended `MOST_LOSSES` workers."""
    return WorkersError(
        f"a task has ended {MOST_LOSSES} workers, most likely for want of memory; take fewer workers, or leave them "
        "out to run in this process."
    )
