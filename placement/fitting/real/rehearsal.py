"""`Rehearsal`: how long gradients, messages and collectives take here, measured as the processes of a run do them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from graphs.disk import temporary_folder
from graphs.errors import FitError
from placement.fitting.participants import AllGather, AllReduce, Post, Receive
from placement.fitting.real.exchanging import Gatherings, Mail, file_store
from placement.fitting.task import FitTask
from placement.processes.processes import how_ended, keep_to_loopback, orderly_end, usable_cores
from placement.processes.starting import Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.processes.threads import on_one_core

_TIMED_S, _FEWEST, _MOST = 1.0, 5, 50  # of a measurement: about its time, and how many it is of
_FIRST = 2  # turns that are not counted: memory is new, and members of a collective meet
_TAG = "rehearsal"

Part = Callable[["_Tools", int], Sequence[Any]]  # a participant's, for so many turns; its measurements


class Rehearsal:
    """Times of the participants of a run on cores of this host, each measured when it is first asked for.

    Args:
        task: whose gradients are computed meanwhile.
        gradients_s: of `gradient_times`.
        workers, servers: participants, each on a core of its own, or in turns where there are fewer.
        seed: of which measurement is taken.
    """

    def __init__(
        self, task: FitTask, gradients_s: Callable[[int], list[float]], workers: int, servers: int, seed: int
    ) -> None:
        self._task, self._gradients_s, self._workers, self._servers = task, gradients_s, workers, servers
        self._drawn, self._n_cores = np.random.default_rng(seed), len(usable_cores())
        self._messages, self._quiet_messages = cache(self._timed_messages), cache(self._timed_quiet_messages)
        self._collectives = cache(self._timed_collectives)

    def message_s(self, size: int, ends: tuple[int, int], computing: Collection[int]) -> tuple[float, float] | None:
        """Seconds that a message of so many bytes takes: its sender, and until it has arrived.

        A message to a core on which a worker computes takes far longer than one between cores that wait for it.

        Args:
            ends: numbers of its sender and its receiver.
            computing: those of the workers that compute a gradient meanwhile.

        Returns:
            None where none was waited for, as among fewer than two participants.
        """
        cores = [number % self._n_cores for number in ends]
        if any(number % self._n_cores in cores for number in computing):
            measured = self._messages(_rounded(size))
        else:
            measured = self._quiet_messages(_rounded(size), len(set(cores)))
        return measured[int(self._drawn.integers(len(measured)))] if measured else None

    def collective_s(self, kind: str, members: int, size: int) -> float:
        """Seconds from when all members have begun until all have ended.

        Args:
            kind: ``"all_reduce"`` or ``"all_gather"``.
            size: bytes that each member gives.
        """
        measured = self._collectives(kind, members, _rounded(size))
        return measured[int(self._drawn.integers(len(measured)))]

    def _timed_messages(self, size: int) -> list[tuple[float, float]]:
        """Times of messages between gradients, among all participants."""
        workers, servers = self._workers, self._servers
        if workers + servers < 2:
            return []
        to = [workers + k % servers if servers else (k + 1) % workers for k in range(workers)]
        parts: list[Part] = [partial(_talk, size, receiver, True) for receiver in to]
        parts += [partial(_reply, size, to.count(workers + k)) for k in range(servers)]
        return [each for own in self._measured(parts) for each in own]

    def _timed_quiet_messages(self, size: int, n_cores: int) -> list[tuple[float, float]]:
        """Times of messages of two participants, which have one core or two, while nobody computes."""
        if self._workers + self._servers < 2:
            return []
        parts: list[Part] = [partial(_talk, size, 1, False), partial(_reply, size, 1)]
        return [each for own in self._measured(parts, n_cores) for each in own]

    def _timed_collectives(self, kind: str, members: int, size: int) -> list[float]:
        group = tuple(range(members))
        times = np.array(self._measured([partial(_gather, kind, size, group)] * members))  # [member, turn, 2]
        began_s, ended_s = times.max(axis=0).T
        return [float(each) for each in ended_s - began_s]

    def _measured(self, parts: Sequence[Part], n_cores: int = _MOST) -> list[Any]:
        """Measurements of each participant, all at once, each in a process of its own, on so many cores at most."""
        turns = int(_TIMED_S / statistics.median(self._gradients_s(self._task.batch)))
        turns = _FIRST + min(_MOST, max(_FEWEST, turns))
        take_part = partial(_take_part, self._task, len(parts), turns, n_cores)
        with temporary_folder() as folder:
            mains = [partial(take_part, each, number) for number, each in enumerate(parts)]
            return _answers(mains, str(folder / "store"))


def gradient_times(task: FitTask, workers: int) -> Callable[[int], list[float]]:
    """(samples) -> seconds of gradients, measured while so many workers compute at once, each on a core of its own."""

    @cache
    def seconds(samples: int) -> list[float]:
        if not samples:
            return [0.0]
        mains = [partial(_time_gradients, task, samples, number) for number in range(workers)]
        return [each for own in _answers(mains, None) for each in own]

    return seconds


def _answers(mains: Sequence[Callable[[Parent], None]], question: str | None) -> list[Any]:
    """The answer of each of several processes to a question.

    Raises:
        FitError: one has failed, as on a sample that the model does not take.
    """
    with orderly_end():
        started = Workers.forked([partial(_failing_well, each) for each in mains])
        try:
            started.tell(question)
            return started.collect()
        except WorkerFailedError as error:
            raise FitError(str(error)) from None
        except WorkerEndedError as error:
            raise FitError(f"a process of the rehearsal {how_ended(error.code)}; run again.") from None
        finally:
            started.end()


def _failing_well(main: Callable[[Parent], None], parent: Parent) -> None:
    """Run the main function of a process, which tells why it fails."""
    try:
        main(parent)
    except FitError as error:
        parent.fail(str(error))


def _time_gradients(task: FitTask, samples: int, number: int, parent: Parent) -> None:
    """In one of several processes, which begin together: answer as many times as there is room for."""
    on_one_core(number)
    weights, times_s = task.weights(), list[float]()
    parent.hear()
    end_s = time.perf_counter() + _TIMED_S
    while len(times_s) < _FIRST + _FEWEST or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        _compute(task, weights, samples, number, len(times_s))
        times_s.append(time.perf_counter() - began_s)
    parent.answer(times_s[_FIRST:])


def _compute(task: FitTask, weights: torch.Tensor, samples: int, number: int, step: int) -> None:
    """A worker's computing of one gradient."""
    chosen = task.samples(number, 1, step) if samples == task.batch else torch.arange(samples) % len(task.data[0])
    with task.drawing(number, step):
        task.gradient(weights, chosen)


# -- exchanges, between gradients ------------------------------------------------------------------------------------


class _Tools:
    """Tools of a participant of a rehearsal."""

    def __init__(self, task: FitTask, number: int, total: int, path: str) -> None:
        keep_to_loopback()
        store = file_store(path)
        self._task, self._weights, self._number = task, task.weights(), number
        self.mail = Mail(store, number, total)
        self.gatherings = Gatherings(store, self.mail, task.place)

    def gradient(self, turn: int) -> None:
        """One as in a run, whose memory then fills the caches."""
        _compute(self._task, self._weights, self._task.batch, self._number, turn)

    def post(self, to: int, content: torch.Tensor) -> float:
        """Send, and say when; seconds that this takes."""
        began_s = time.monotonic()
        self.mail.post(Post(to, _TAG, (content, torch.tensor(began_s, dtype=torch.float64))))
        return time.monotonic() - began_s

    def receive(self) -> tuple[int, float | None]:
        """Sender of the next message, and seconds since it was sent; None where it came before the wait."""
        began_s = time.monotonic()
        message = self.mail.receive(Receive(_TAG))
        assert message is not None
        sent_s = float(message.tensors[-1])
        return message.sender, time.monotonic() - sent_s if sent_s >= began_s else None


def _talk(size: int, to: int, is_busy: bool, tools: _Tools, turns: int) -> list[tuple[float, float]]:
    """A worker's part: a gradient, if it is busy, a message to a server or another worker, and one from there."""
    content, found = torch.zeros(size // 4), []
    for turn in range(turns):
        if is_busy:
            tools.gradient(turn)
        own_s = tools.post(to, content)
        _, way_s = tools.receive()
        if way_s is not None and turn >= _FIRST:
            found.append((own_s, way_s))
    return found


def _reply(size: int, talkers: int, tools: _Tools, turns: int) -> list[tuple[float, float]]:
    """A server's part: an answer to each message of so many workers."""
    content, found = torch.zeros(size // 4), []
    for number in range(talkers * turns):
        sender, way_s = tools.receive()
        own_s = tools.post(sender, content)
        if way_s is not None and number >= talkers * _FIRST:
            found.append((own_s, way_s))
    return found


def _gather(kind: str, size: int, group: tuple[int, ...], tools: _Tools, turns: int) -> list[tuple[float, float]]:
    """A member's part: a gradient, and a collective; returns when each collective began and ended."""
    content, found = torch.zeros(size // 4), []
    for turn in range(turns):
        tools.gradient(turn)
        began_s = time.monotonic()
        if kind == "all_reduce":
            tools.gatherings.all_reduce(AllReduce((content,), group))
        else:
            tools.gatherings.all_gather(AllGather((content,), group))
        found.append((began_s, time.monotonic()))
    return found[_FIRST:]


def _take_part(task: FitTask, total: int, turns: int, n_cores: int, part: Part, number: int, parent: Parent) -> None:
    on_one_core(number % n_cores)
    tools = _Tools(task, number, total, parent.hear())
    parent.answer(part(tools, turns))
    parent.hear()  # others may still read what this one has sent; the parent ends all


def _rounded(size: int) -> int:
    """A number of bytes with one digit, so that few are measured; of whole numbers of float32."""
    return max(4, int(float(f"{size:.0e}")) // 4 * 4)
