"""`RayRunner`: tasks on actors of a Ray cluster, which replaces those that die and does their tasks again."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numba

from graphs.errors import WorkersError
from graphs.formatting import show
from graphs.zoo.cache import cache_dir
from placement.processes.runner import MOST_LOSSES, Preparing, Told, too_many_losses

SharedT = TypeVar("SharedT")
TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")
_ANSWER_S = 5.0  # that a cluster has to answer
_HERE = "leave out the address to run on this machine"
# Before Ray is imported: it asks nothing of the network, and leaves the accelerators as they are.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


class Actor:
    """One worker, as it lives in a process of Ray, on one core."""

    def __init__(self, shared: Preparing, versions: dict[str, str]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # for what is loaded later, torch say
        mine = own_versions()
        if differing := [f"{name} {mine[name]} there, {versions[name]} here" for name in mine
                         if mine[name] != versions[name]]:  # fmt: skip
            raise WorkersError(f"the workers are of another version: {', '.join(differing)}; install the same, or "
                               f"{_HERE}.")  # fmt: skip
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
    """Versions that must be the same here and there, so that answers are."""
    names = ("placement", "numpy", "numba")
    return {name: importlib.metadata.version(name) for name in names} | {"Python": platform.python_version()}


@contextmanager
def ray_runner(shared: Preparing, workers: int, address: str) -> Iterator[RayRunner]:
    """A runner whose actors end with it.

    Raises:
        WorkersError: as `placement.processes.runner.opened`.
    """
    ray, was_there = _joined(address)
    try:
        resources: Any = ray.cluster_resources
        if (cores := int(resources().get("CPU", 0))) < workers:
            raise WorkersError(
                f"{workers} workers take a core each, and the Ray cluster has {cores}; take fewer, or add machines."
            )
        runner = RayRunner(ray, shared, workers)
        try:
            runner.start()
            yield runner
        finally:
            runner.end()
    finally:
        if not was_there:
            ray.shutdown()


class RayRunner:
    """So many actors; each does one task at a time."""

    def __init__(self, ray: Any, shared: Preparing, workers: int) -> None:
        self._ray = ray
        # Held: Ray drops what an actor began with (its issue 53727), and one that is replaced reads it again.
        self._shared = ray.put(shared)
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=MOST_LOSSES - 1)(Actor)
        self._actors = [kind.remote(self._shared, own_versions()) for _ in range(workers)]

    def start(self) -> None:
        """Wait until all actors are ready.

        Raises:
            WorkersError: one cannot begin.
        """
        for actor in self._actors:
            try:
                self._ray.get(actor.process.remote())
            except self._ray.exceptions.RayActorError as error:
                raise WorkersError(_reason(error)) from None

    def run(
        self, work: Callable[[SharedT, TaskT], FoundT], tasks: Sequence[TaskT], told: Told | None = None
    ) -> list[FoundT]:
        """As of any `Runner`."""
        waiting, free = deque(enumerate(tasks)), list(self._actors)
        running: dict[Any, tuple[Any, int]] = {}  # actor and number of the task by what is to come
        found: dict[int, FoundT] = {}
        while waiting or running:
            while waiting and free:
                actor, (number, task) = free.pop(), waiting.popleft()
                running[actor.work.remote(work, task)] = actor, number
            for coming in self._ray.wait(list(running), num_returns=1)[0]:
                actor, number = running.pop(coming)
                try:
                    found[number] = self._ray.get(coming)
                except self._ray.exceptions.RayActorError:
                    raise too_many_losses() from None
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                if told is not None:
                    told(number, found[number])
                free.append(actor)
        return [found[number] for number in range(len(tasks))]

    def end(self) -> None:
        """End the actors."""
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)


def _reason(error: Exception) -> str:
    """The reason why an actor did not begin, in a sentence: its own, if it has one."""
    text = str(error)
    if (own := text.find("WorkersError: ")) >= 0:
        return text[own + len("WorkersError: ") :].partition("\n")[0]
    reason = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
    return (
        f"a worker did not begin ({reason}); the same version of placement has to be installed where workers run, or "
        f"{_HERE}."
    )


def _joined(address: str) -> tuple[Any, bool]:
    """The module `ray`, connected to the cluster, and whether it was before: then it is the caller's own."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise WorkersError(
            f"workers of a cluster take Ray, which is not installed; run pip install 'placement[ray]', or {_HERE}."
        ) from None
    _check_answers(address)
    if ray.is_initialized():
        return ray, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own: files and processes that it leaves to Python to close
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0].removesuffix(".")[:300]
            raise WorkersError(
                f"the Ray cluster at {show(address)} does not take this process in ({first}); it has to run, with the "
                f"same versions of Ray and Python as here. Else {_HERE}."
            ) from None
    return ray, False


def _check_answers(address: str) -> None:
    """Raises: WorkersError: it is no address, or nobody is there; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 2**16):
        raise WorkersError(f"address {show(address)} is none; expected auto or HOST:PORT, as `ray start` prints it.")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise WorkersError(f"no Ray cluster answers at {show(address)} ({error}); {_HERE}.") from None


def compiled_once(shared: Preparing) -> None:
    """Have what tasks call compiled, or loaded, one process of a user and host after the other."""
    folder = cache_dir()  # which nobody else can write to
    folder.mkdir(parents=True, exist_ok=True)
    with _in_turn(folder / f"compiling-{socket.gethostname()}"):  # the folder may be that of several hosts
        shared.prepare()


@contextmanager
def _in_turn(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks here: compiled more than once
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
