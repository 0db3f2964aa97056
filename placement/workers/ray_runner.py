"""`RayRunner`: tasks on actors of Ray; one that dies is replaced, and its task done again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numba

from graphs.errors import WorkersError
from placement.workers.compiling_once import compiled_once
from placement.workers.ray_cluster import joined
from placement.workers.runner import Preparing, Told

SharedT = TypeVar("SharedT")
TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")
_MOST_LOSSES = 3  # of workers, by one task; then it is the task that ends them


class Actor:
    """One worker, as it lives in a process of Ray, on one core."""

    def __init__(self, shared: Preparing, versions: dict[str, str]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # for what is loaded later, torch say
        mine = own_versions()
        if mine != versions:
            differing = ", ".join(f"{name} {mine[name]} there, {versions[name]} here" for name in sorted(mine)
                                  if mine[name] != versions[name])  # fmt: skip
            raise WorkersError(f"the workers are of another version: {differing}; install the same, or leave out the "
                               "address to run on this machine.")  # fmt: skip
        self._shared = shared
        compiled_once(shared)

    def work(self, work: Callable[[Any, Any], Any], task: Any) -> Any:
        """Do a task."""
        numba.set_num_threads(1)  # of this thread of Python; compiled parallel loops would take all cores of the host
        return work(self._shared, task)

    def process(self) -> int:
        """The number of this process; answered once the worker is ready."""
        return os.getpid()


def own_versions() -> dict[str, str]:
    """What must be the same here and there, so that answers are."""
    names = ("placement", "numpy", "numba")
    return {name: importlib.metadata.version(name) for name in names} | {"Python": platform.python_version()}


@contextmanager
def ray_runner(shared: Preparing, workers: int, address: str | None) -> Iterator[RayRunner]:
    """A runner whose actors end with it.

    Raises:
        WorkersError: as `placement.workers.runner.opened`.
    """
    with joined(workers, address) as ray:
        runner = RayRunner(ray, shared, workers)
        try:
            yield runner
        finally:
            runner.close()


class RayRunner:
    """So many actors; each does one task at a time."""

    def __init__(self, ray: Any, shared: Preparing, workers: int) -> None:
        self._ray, self._shared = ray, ray.put(shared)
        self._kind = ray.remote(num_cpus=1, max_restarts=0)(Actor)
        self._versions = own_versions()
        self._actors = [self._started() for _ in range(workers)]
        for actor in self._actors:
            self._ready(actor)

    def processes(self) -> list[int]:
        """The process of each worker, on its own host."""
        return [self._ready(actor) for actor in self._actors]

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """As of any `Runner`."""
        ray, lost = self._ray, (self._ray.exceptions.ActorDiedError, self._ray.exceptions.ActorUnavailableError)
        waiting, free = deque(range(len(tasks))), deque(range(len(self._actors)))
        found: dict[int, FoundT] = {}
        running: dict[Any, tuple[int, int]] = {}  # actor and task by what is to come
        losses = dict.fromkeys(range(len(tasks)), 0)
        while waiting or running:
            while waiting and free:
                actor, task = free.popleft(), waiting.popleft()
                running[self._actors[actor].work.remote(work, tasks[task])] = actor, task
            for coming in ray.wait(list(running), num_returns=1)[0]:
                actor, task = running.pop(coming)
                try:
                    found[task] = ray.get(coming)
                    if told is not None:
                        told(task, found[task])
                except lost:
                    losses[task] += 1
                    if losses[task] == _MOST_LOSSES:
                        raise WorkersError(
                            f"a task has ended {_MOST_LOSSES} workers, most likely for want of memory; take fewer "
                            "workers, or leave them out to run in this process."
                        ) from None
                    self._actors[actor] = self._started()
                    waiting.appendleft(task)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                free.append(actor)
        return [found[task] for task in range(len(tasks))]

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)

    def _started(self) -> Any:
        return self._kind.remote(self._shared, self._versions)

    def _ready(self, actor: Any) -> int:
        """Raises: WorkersError: it cannot begin."""
        try:
            process: int = self._ray.get(actor.process.remote())
        except self._ray.exceptions.RayActorError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, WorkersError):
                raise cause from None
            text = str(error)
            where = text.find("WorkersError: ")
            if where >= 0:
                raise WorkersError(text[where + len("WorkersError: ") :].partition("\n")[0]) from None
            reason = next((line for line in reversed(text.splitlines()) if line.strip()), "no reason given")
            raise WorkersError(
                f"a worker did not begin ({reason.strip()}); the same version of placement has to be installed where "
                "workers run. Leave out workers to run in this process."
            ) from None
        return process
