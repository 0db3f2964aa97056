"""Starting several processes of this host at once, collecting what they answer, and ending them.

All processes are started here: `placement.measuring.machine.workers` forks some for one piece of work,
`placement.measuring.runs.pool` keeps forked ones for many, `placement.runtime.ranks.launch` starts fresh interpreters.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from placement.processes.processes import begin_worker, forking, how_ended


@dataclass(frozen=True)
class StepProgress:
    """How far a measurement is.

    Attributes:
        done: steps that have been run.
        expected: how many it will be, as far as can be told.
        step_s: how long the last one took, or before the first how long one is predicted to take.
    """

    done: int
    expected: int
    step_s: float


Report = Callable[[StepProgress], None]


def tell_nobody(progress: StepProgress) -> None:
    """A `Report` for where nobody waits."""


_LOOK_S = 0.5  # between two looks at how the processes are
_REPORT_S = 0.1  # between two reports: each takes time from what is measured
_ANSWER, FAILURE, _REPORT, ENDED, SILENT = "answer", "failure", "report", "ended", "silent"
_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN)


class NoResultError(Exception):
    """A process gives no answer; says why."""


class WorkerEndedError(NoResultError):
    """A process has ended before it answered; ``code``: its exit code, negative for a signal."""

    def __init__(self, rank: int, code: int) -> None:
        hint = ", most likely for want of memory" if code == -signal.SIGKILL else ""
        super().__init__(f"rank {rank} {how_ended(code)}{hint}.")
        self.rank, self.code = rank, code


class WorkerSilentError(WorkerEndedError):
    """A process of another host is not reached any more; that host or the network is down."""


class WorkerFailedError(NoResultError):
    """A process has said why it cannot answer."""


class NoAnswerError(NoResultError):
    """Nothing came of the processes in the time they had."""


class Parent:
    """The process that started this one."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._reported_s = pipe, 0.0

    @classmethod
    def of_fresh(cls, task: Mapping[str, Any]) -> Parent:
        """In a process of `Workers.fresh`, which lives and dies with its parent from here on."""
        begin_worker(task["parent"])
        return cls(Connection(task["pipe"]))

    def hear(self) -> Any:
        """The next message of the parent.

        Raises:
            EOFError: it has ended.
        """
        try:
            return self._pipe.recv()
        except ConnectionResetError:
            raise EOFError from None

    def report(self, progress: StepProgress) -> None:
        """Tell how far this process is, unless it has just been told."""
        now = time.monotonic()
        if now - self._reported_s > _REPORT_S:
            self._reported_s = now
            self._send(_REPORT, progress)

    def say(self, content: Any) -> None:
        """Tell something at once, as often as there is something."""
        self._send(_REPORT, content)

    def answer(self, found: Any) -> None:
        """Give what this process was asked for."""
        self._send(_ANSWER, found)

    def fail(self, sentence: str) -> None:
        """Say why there is no answer."""
        self._send(FAILURE, sentence)

    def _send(self, kind: str, content: Any) -> None:
        with suppress(OSError):  # it has ended, and this process will
            self._pipe.send((kind, content))


class Pipe(Protocol):
    """A way to a process, as a connection of multiprocessing."""

    def send(self, content: Any, /) -> None: ...

    def recv(self) -> Any: ...

    def poll(self) -> bool: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Process(Protocol):
    """A process as of multiprocessing."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Workers:
    """Processes that were started together, by rank, each with a pipe to this one."""

    def __init__(self) -> None:
        self._started: list[tuple[_Process, Pipe]] = []
        self._silent: set[int] = set()  # those whose end was heard of

    @classmethod
    def forked(cls, lives: Sequence[Callable[[Parent], None]], *, may_fork: bool = False) -> Workers:
        """Forks of this process, which have all that it has without a file or a copy; each lives one of these lives.

        Args:
            may_fork: they may start processes in their turn.
        """
        context = multiprocessing.get_context("fork")
        workers = cls()
        try:
            for life in lives:
                ours, theirs = context.Pipe()
                process = context.Process(target=_live, args=(life, theirs, os.getpid()), daemon=not may_fork)
                with forking(), warnings.catch_warnings():
                    # Python warns of forking beside other threads, which may hold locks; a worker needs none of theirs.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                workers._started.append((process, ours))
        except BaseException:
            workers.end()
            raise
        return workers

    @classmethod
    def fresh(
        cls,
        program: str,
        tasks: Sequence[Mapping[str, Any]],
        environments: Sequence[Mapping[str, str]],
        stdout: int | None = None,
    ) -> Workers:
        """New interpreters, which have nothing of this process.

        Args:
            program: Python code; it begins with `Parent.of_fresh` of ``json.loads(sys.argv[1])``, its task.
            tasks: one for each process, of what JSON can hold.
            environments: variables of each beside those of this process; they import what this process does.
            stdout: file descriptor for what they print; that of this process by default.
        """
        workers = cls()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            for task, environment in zip(tasks, environments, strict=True):
                ours, theirs = multiprocessing.Pipe()
                words = json.dumps({**task, "pipe": theirs.fileno(), "parent": os.getpid()})
                # -P: a file of the caller's folder must not hide a package.
                process = _Fresh(
                    [sys.executable, "-P", "-c", program, words],
                    env={**os.environ, "PYTHONPATH": path, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    pass_fds=[theirs.fileno()],
                )
                theirs.close()
                workers._started.append((process, ours))
        except BaseException:
            workers.end()
            raise
        return workers

    def add(self, pipe: Pipe) -> None:
        """Add one that somebody else has started and ends, the next rank."""
        self._started.append((_Distant(), pipe))

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, 0 of those that somebody else has started."""
        return [process.pid or 0 for process, _ in self._started]

    @property
    def all_alive(self) -> bool:
        """True if there are any, and none has ended."""
        return bool(self._started) and all(process.exitcode is None for process, _ in self._started)

    def tell(self, message: Any) -> None:
        """Tell all processes something.

        Raises:
            WorkerEndedError: one has ended.
        """
        for rank, (_, pipe) in enumerate(self._started):
            try:
                pipe.send(message)
            except OSError:
                raise self._ended(rank) from None

    def post(self, message: Any) -> None:
        """As `tell`; of a process that has ended, `collect` says so."""
        with suppress(WorkerEndedError):
            self.tell(message)

    def collect(
        self, limit_s: float | None = None, report: Report = tell_nobody, look: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """The next answer of each process, by rank.

        Args:
            limit_s: how long to wait for answers, anew after each report.
            report: given what processes report.
            look: called now and then.

        Raises:
            WorkerFailedError, WorkerEndedError, NoAnswerError: what has come of the first that gives none.
        """
        answers: dict[int, Any] = {}
        looked_s = begun_s = time.monotonic()
        while len(answers) < len(self._started):
            rank_of: dict[Any, int] = {
                pipe: rank for rank, (_, pipe) in enumerate(self._started) if rank not in answers
            }
            left_s = _LOOK_S if limit_s is None else min(_LOOK_S, begun_s + limit_s - time.monotonic())
            ready = wait(list(rank_of), max(0.0, left_s))
            for pipe in ready:
                kind, content = self._heard(rank_of[pipe])
                if kind == FAILURE:
                    raise WorkerFailedError(content)
                if kind == _REPORT:
                    report(content)
                    begun_s = time.monotonic()
                else:
                    answers[rank_of[pipe]] = content
            if not ready:
                self._check(answers)
                if limit_s is not None and time.monotonic() - begun_s > limit_s:
                    raise NoAnswerError
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                look()
        return [answers[rank] for rank in range(len(self._started))]

    def hear(self, limit_s: float) -> list[tuple[int, str, Any]]:
        """Messages sent within a time, or before: rank, kind and content, one of each rank that sent any.

        One of each, so that a rank that says much is not heard before others that spoke first.

        The kind is `ENDED`, once, for a process that has ended without being asked to, and the content its exit code;
        it is `SILENT` for one that is not reached any more.
        """
        rank_of: dict[Any, int] = {
            pipe: rank for rank, (_, pipe) in enumerate(self._started) if rank not in self._silent
        }
        if not rank_of:
            time.sleep(limit_s)
        heard: list[tuple[int, str, Any]] = []
        for pipe in wait(list(rank_of), limit_s):
            rank = rank_of[pipe]
            try:
                heard.append((rank, *self._heard(rank)))
            except WorkerEndedError as error:
                self._silent.add(rank)
                heard.append((rank, SILENT if isinstance(error, WorkerSilentError) else ENDED, error.code))
        return heard

    def join(self, limit_s: float | None = None) -> None:
        """Wait for the processes to end by themselves, each of them no longer than that.

        Raises:
            WorkerEndedError: one has not ended well.
        """
        for rank, (process, _) in enumerate(self._started):
            process.join(limit_s)
            if process.exitcode:
                raise WorkerEndedError(rank, process.exitcode)

    def end(self) -> None:
        """End all processes at once."""
        started, self._started = self._started, []
        for process, _ in started:
            process.kill()
        for process, pipe in started:
            process.join()
            pipe.close()

    def _heard(self, rank: int) -> tuple[str, Any]:
        try:
            kind, content = self._started[rank][1].recv()
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _UNREACHED:
                raise WorkerSilentError(rank, -signal.SIGKILL) from None
            raise self._ended(rank) from None
        return kind, content

    def _check(self, answered: Mapping[int, Any]) -> None:
        """Nothing is in the pipes: who has ended and not answered never will, even where its child has the pipe."""
        for rank, (process, pipe) in enumerate(self._started):
            code = process.exitcode
            if code is not None and (code != 0 if rank in answered else not pipe.poll()):
                raise WorkerEndedError(rank, code)

    def _ended(self, rank: int) -> WorkerEndedError:
        process = self._started[rank][0]
        process.join(1.0)
        return WorkerEndedError(rank, -signal.SIGKILL if process.exitcode is None else process.exitcode)


def _live(life: Callable[[Parent], None], pipe: Connection, parent: int) -> None:
    begin_worker(parent)
    life(Parent(pipe))


class _Distant:
    """A process that somebody else has started, of which only the pipe tells whether it lives."""

    pid: int | None = None
    exitcode: int | None = None

    def kill(self) -> None:
        """Nothing: it ends when it hears no more."""

    def join(self, timeout: float | None = None) -> None:
        """Nothing."""


class _Fresh(subprocess.Popen[bytes]):
    """A new interpreter, with the methods of a process of multiprocessing."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)
