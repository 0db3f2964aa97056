"""`participant_main`: main function of a process that runs one participant."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from graphs.errors import PlacementError, RankError
from placement.fitting.log import Stop, Turns
from placement.fitting.real.gatherings import Gatherings
from placement.fitting.real.mail import Mail
from placement.fitting.real.worker_groups import READY, WorkerGroup, WorkerRank
from placement.fitting.requests import (
    AllGather,
    AllReduce,
    Compute,
    Computed,
    Participant,
    ParticipantLost,
    Pause,
    Post,
    Receive,
    Request,
    Updated,
)
from placement.fitting.task import CPU, FitTask
from placement.processes.threads import on_one_core

if TYPE_CHECKING:
    from placement.processes.starting import Parent

READ, COMPUTED, UPDATED = "read", "computed", "updated"


@dataclass(frozen=True, eq=False)
class ParticipantSettings:
    """Knowledge shared by all participants of a run.

    Attributes:
        total: participants, the first `workers` of them workers.
        delay_s: (worker, step) -> seconds by which the gradient of a mini-batch takes longer.
        store: where they meet.
        groups: of each worker, if it lies on several devices.
        place: where this process computes.
    """

    task: FitTask
    stop: Stop
    workers: int
    total: int
    delay_s: Callable[[int, int], float]
    store: Any
    groups: tuple[WorkerGroup, ...] = ()
    place: torch.device = CPU


def participant_main(
    settings: ParticipantSettings, number: int, participant: Participant, core: int, parent: Parent
) -> None:
    """Meet the others, begin when told to, and carry out what the participant asks for until this process is ended."""
    on_one_core(core)
    mail = Mail(settings.store, number, settings.total)
    group = WorkerRank(settings.groups[number], 0, settings.place) if number < len(settings.groups) else None
    task = settings.task.on(settings.place) if group is None else settings.task
    if task.place != CPU:
        task.gradient(task.weights(), torch.arange(task.batch))  # the first one starts the GPU
    gatherings = Gatherings(settings.store, mail, settings.place)
    parent.say((READY,))
    told_s = parent.hear()
    began_s = time.monotonic() if told_s is None else told_s
    runner = _RequestRunner(replace(settings, task=task), number, mail, gatherings, parent, began_s, group)
    try:
        runner.work(participant)
    except RankError:  # of the worker's own processes: it is lost, with which some methods go on
        os._exit(1)
    except PlacementError as error:
        parent.fail(error.sentence(settings.workers) if isinstance(error, ParticipantLost) else str(error))
        return
    while True:  # others may still read what this one has sent; the parent ends all
        time.sleep(1.0)


class _RequestRunner:
    """Runner of the requests of one participant."""

    def __init__(
        self,
        settings: ParticipantSettings,
        number: int,
        mail: Mail,
        gatherings: Gatherings,
        parent: Parent,
        began_s: float,
        group: WorkerRank | None,
    ) -> None:
        self._group = group
        self._settings, self._number, self._began_s = settings, number, began_s
        self._mail, self._gatherings, self._parent = mail, gatherings, parent
        self._turns, self._steps = Turns(settings.stop), 0

    def work(self, participant: Participant) -> None:
        """Carry out requests until the participant has no more."""
        answer: Any = None
        lost: ParticipantLost | None = None
        while True:
            try:
                request = participant.send(answer) if lost is None else participant.throw(lost)
            except StopIteration:
                return
            answer = lost = None
            try:
                answer = self._answer(request)
            except ParticipantLost as error:
                lost = error

    def _answer(self, request: Request) -> Any:
        match request:
            case Compute():
                return self._compute(request)
            case Post():
                self._mail.post(request)
            case Receive():
                return self._mail.receive(request)
            case AllReduce():
                return self._gatherings.all_reduce(request)
            case AllGather():
                return self._gatherings.all_gather(request)
            case Updated():
                self._update(request)
            case Pause():
                time.sleep(request.seconds)
        return None

    def _compute(self, request: Compute) -> Computed:
        task, step = self._settings.task, self._steps
        self._steps += 1
        self._parent.say((READ, self._now_s(), step, request.version))
        samples = task.samples_of(request.samples, self._number, self._settings.workers, step)
        if self._group is not None:
            loss, gradient = self._group.gradient(request.weights, samples, step)
        else:
            with task.drawing(self._number, step):
                loss, gradient = task.gradient(request.weights, samples, request.backward_weights)
        if step % self._settings.stop.every == 0 and self._settings.workers > 1:
            at = hashlib.sha256(request.weights.detach().numpy().tobytes()).hexdigest()
            self._parent.say((COMPUTED, at, gradient.numpy().copy(), len(samples)))
        time.sleep(self._settings.delay_s(self._number, step) * len(samples) / task.batch)
        return Computed(loss, gradient, len(samples))

    def _update(self, request: Updated) -> None:
        weights = request.weights
        is_due = weights is not None and self._turns.is_due(request.version)
        told = weights.numpy().copy() if weights is not None and is_due else None
        sent_bytes = self._mail.sent_bytes + self._gatherings.sent_bytes
        self._parent.say((UPDATED, self._now_s(), request.version, request.staleness, told, sent_bytes))

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s
