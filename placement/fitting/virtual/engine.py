"""Participants in virtual time: an event queue answers their requests, and links say when messages arrive."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from env.communication.as_used import AsUsed
from placement.fitting.log import CurvePoint, FitLog, FitRun, Stop, tell_no_one
from placement.fitting.participants import (
    LOST,
    AllGather,
    AllReduce,
    Compute,
    Computed,
    Inbox,
    Message,
    Participant,
    ParticipantLost,
    Post,
    Receive,
    Request,
    Updated,
)
from placement.processes.threads import single_threaded

if TYPE_CHECKING:
    from torch import Tensor

    from env.cluster import Cluster
    from placement.fitting.task import FitTask
    from placement.fitting.virtual.speeds import Speeds


@dataclass(eq=False)
class VirtualNetwork:
    """Times at which the links of a cluster are free again. Transfers are asked for in order of time.

    Attributes:
        cluster: whose routes are taken.
        free_s: of each link that has carried a transfer, when the last one ends.
    """

    cluster: Cluster
    free_s: dict[int, float] = field(default_factory=dict)

    def arrival_s(self, source: int, target: int, size: int, now_s: float) -> float:
        """Arrival of `size` bytes that are sent now, between two devices by number."""
        if source == target:
            return now_s
        route = self.cluster.routes[source, target]
        exclusive = [link for link in route.links if self.cluster.links[link].exclusive]
        begin_s = max([now_s, *(self.free_s.get(link, 0.0) for link in exclusive)])
        end_s = begin_s + route.latency_s + size / route.bandwidth_bytes_per_s
        self.free_s.update(dict.fromkeys(exclusive, end_s))
        return end_s


@dataclass(eq=False)
class _ParticipantState:
    """A participant as the engine sees it: what it waits for, and what has arrived for it."""

    participant: Participant
    inbox: Inbox = field(default_factory=Inbox)
    waiting: Receive | None = None
    steps: int = 0


class VirtualEngine:
    """Runs participants until the end, deterministically for a seed: equal times are taken in order of asking."""

    def __init__(
        self, task: FitTask, cluster: Cluster, workers: int, participants: Sequence[Participant], speeds: Speeds
    ) -> None:
        self._task, self._workers, self._speeds = task, workers, speeds
        self._network = VirtualNetwork(cluster)
        self._states = [_ParticipantState(participant) for participant in participants]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._meetings: dict[tuple[type, tuple[int, ...]], dict[int, tuple[Tensor, ...]]] = {}
        self._last_arrival_s: dict[tuple[int, int], float] = {}
        self._lost: set[int] = set()
        self._computing: set[int] = set()  # workers in the middle of a gradient
        self.now_s, self.bytes = 0.0, 0

    def lose(self, number: int, time_s: float) -> None:
        """Have a participant die at a moment of the run; what it has sent by then still arrives."""
        self._at(time_s, lambda: self._lose(number))

    def run(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None] = tell_no_one) -> FitRun:
        """Run until the end; `tell` gets each point of the curve."""
        # Where computing is timed, as in a process of a run, which has one core.
        with nullcontext() if self._speeds.exchanges is None else single_threaded():
            return self._run(method, stop, tell)

    def _run(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None]) -> FitRun:
        self._log = FitLog(stop, self._task.held_out_loss, tell)
        self._log.evaluate(self._task.weights(), 0, 0.0, 0)
        for number in range(len(self._states)):
            self._go_on(number, None)
        while self._events and not self._log.is_over:
            time_s, _, then = heapq.heappop(self._events)
            if time_s > stop.seconds:
                self.now_s = stop.seconds
                self._log.end()
                break
            self.now_s = time_s
            then()
        self._log.end("the run ended early: every participant waited for another one")
        for state in self._states:
            state.participant.close()
        return self._log.run(method, self.now_s, self.bytes)

    def _at(self, time_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), then))

    def _later(self, time_s: float, number: int, answer: Any) -> None:
        self._at(time_s, lambda: self._go_on(number, answer))

    def _go_on(self, number: int, answer: Any) -> None:
        """Hand a participant its answer, and carry out what it asks for, until it has to wait."""
        state = self._states[number]
        self._computing.discard(number)
        while not self._log.is_over and number not in self._lost:
            began_s = time.thread_time()
            try:
                if isinstance(answer, ParticipantLost):
                    request = state.participant.throw(answer)
                else:
                    request = state.participant.send(answer)
            except StopIteration:
                return
            except ParticipantLost as lost:
                self._log.end(lost.sentence(self._workers))
                return
            if self._speeds.exchanges is not None:
                own_s = time.thread_time() - began_s
                self._at(self.now_s + own_s, partial(self._take, number, request))
                return
            if not self._is_answered_now(number, state, request):
                return
            answer = self._answer

    def _take(self, number: int, request: Request) -> None:
        """Carry out what a participant has asked for after some computing of its own."""
        if number not in self._lost and self._is_answered_now(number, self._states[number], request):
            self._go_on(number, self._answer)

    def _is_answered_now(self, number: int, state: _ParticipantState, request: Request) -> bool:
        self._answer: Any = None
        match request:
            case Post():
                own_s = self._send(number, request)
                if own_s:
                    self._later(self.now_s + own_s, number, None)
                return not own_s
            case Receive():
                self._answer = state.inbox.take(request)
                state.waiting = request if request.wait and self._answer is None else None
                return state.waiting is None
            case Compute():
                self._compute(number, state, request)
            case Updated():
                self._update(number, request)
            case AllReduce() | AllGather():
                self._meet(number, request)
        return False

    def _compute(self, number: int, state: _ParticipantState, request: Compute) -> None:
        step, state.steps = state.steps, state.steps + 1
        samples = self._task.samples_of(request.samples, number, self._workers, step)
        self._log.read(number, step, request.version)
        with self._task.drawing(number, step):
            loss, gradient = self._task.gradient(request.weights, samples, request.backward_weights)
        self._log.computed(request.weights, gradient, len(samples))
        seconds = self._speeds.step_s(number, step, len(samples))
        self._computing.add(number)
        self._later(self.now_s + seconds, number, Computed(loss, gradient, len(samples)))

    def _send(self, number: int, request: Post) -> float:
        """Send a message on its way; returns seconds that this takes its sender."""
        tensors = tuple(each.clone() for each in request.tensors)
        size = _size(tensors)
        self.bytes += size
        device = self._speeds.device
        pair = number, request.to
        exchanges = self._speeds.exchanges
        measured = None if exchanges is None else exchanges.message_s(size, pair, self._computing)
        if measured is None or request.to == number:
            own_s, arrival_s = 0.0, self._network.arrival_s(device[number], device[request.to], size, self.now_s)
        else:
            own_s, arrival_s = measured[0], self.now_s + measured[1]
        # Where links carry any number of transfers at once, a small one would overtake.
        arrival_s = self._last_arrival_s[pair] = max(arrival_s, self._last_arrival_s.get(pair, 0.0))
        message = Message(number, request.tag, tensors, request.version)
        self._at(arrival_s, lambda: self._deliver(request.to, message))
        return own_s

    def _deliver(self, number: int, message: Message) -> None:
        state = self._states[number]
        state.inbox.put(message)
        if state.waiting is not None:
            taken = state.inbox.take(state.waiting)
            if taken is not None:
                state.waiting = None
                self._go_on(number, taken)

    def _lose(self, number: int) -> None:
        self._states[number].participant.close()
        self._lost.add(number)
        for other in range(len(self._states)):
            if other not in self._lost:
                self._send(number, Post(other, LOST))
        for key in [key for key in self._meetings if number in key[1]]:
            for member in self._meetings.pop(key):
                self._later(self.now_s, member, ParticipantLost(number))

    def _update(self, number: int, request: Updated) -> None:
        self._log.updated(request, self.now_s, self.bytes)
        self._later(self.now_s + self._speeds.update_s(number) * request.part, number, None)

    def _meet(self, number: int, request: AllReduce | AllGather) -> None:
        """A collective begins once all have asked, and goes around a ring of its members."""
        kind = type(request)
        for lost in self._lost.intersection(request.group):
            self._later(self.now_s, number, ParticipantLost(lost))
            return
        here = self._meetings.setdefault((kind, request.group), {})
        here[number] = tuple(each.clone() for each in request.tensors)
        if len(here) < len(request.group):
            return
        del self._meetings[kind, request.group]
        gathered = tuple(here[member] for member in request.group)
        if kind is AllReduce:
            answer: Any = tuple(torch.stack(each).sum(0) for each in zip(*gathered, strict=True))
            size = _size(gathered[0])
            end_s = self._together("all_reduce", request.group, [size // len(request.group)], size)
        else:
            answer = gathered
            sizes = [_size(each) for each in gathered]
            end_s = self._together("all_gather", request.group, sizes, sum(sizes))
        for member in request.group:
            self._later(end_s, member, answer)

    def _together(self, kind: str, group: tuple[int, ...], sizes: Sequence[int], whole: int) -> float:
        """End of a collective of `whole` bytes: as measured on the cluster, or once around a ring, or twice."""
        rounds = {"all_reduce": 2, "all_gather": 1}[kind] * (len(group) - 1)
        if self._speeds.exchanges is not None and len(group) > 1:
            self.bytes += sum(sizes) * rounds * (len(group) if len(sizes) == 1 else 1)
            own = whole if kind == "all_reduce" else max(sizes)
            return self.now_s + self._speeds.exchanges.collective_s(kind, len(group), own)
        devices = {self._speeds.device[member] for member in group}
        found = AsUsed.of(self._network.cluster, np.array([sorted(devices)], dtype=np.int64))
        if found is None or not found.knows(kind) or len(devices) < len(group):
            return self._around(group, sizes, rounds)
        self.bytes += sum(sizes) * rounds * (len(group) if len(sizes) == 1 else 1)
        return self.now_s + float(found.seconds(kind, whole))

    def _around(self, group: tuple[int, ...], sizes: Sequence[int], rounds: int) -> float:
        """End of so many turns of pieces of these sizes to the next member of a ring; each turn waits for all."""
        now_s = self.now_s
        for turn in range(rounds):
            ends = []
            for place, member in enumerate(group):
                size = sizes[(place - turn) % len(sizes)]
                other = group[(place + 1) % len(group)]
                self.bytes += size
                device = self._speeds.device
                ends.append(self._network.arrival_s(device[member], device[other], size, now_s))
            now_s = max(ends)
        return now_s


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
