"""Main function of a process that runs one participant, and the processes that a worker on several devices has."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from graphs.errors import FitError, PlacementError, RankError
from placement.fitting.log import Stop, Turns
from placement.fitting.participants import (
    AllGather,
    AllReduce,
    Compute,
    Computed,
    Participant,
    ParticipantLost,
    Post,
    Receive,
    Request,
    Updated,
)
from placement.fitting.real.exchanging import NO_LIMIT, Gatherings, Mail
from placement.fitting.task import CPU, FitTask
from placement.processes.threads import on_one_core

if TYPE_CHECKING:
    from torch import Tensor

    from placement.processes.starting import Parent
    from placement.runtime.torch_runner.setup import Setup

READY = "ready"  # what a process says that has met the others


@dataclass(frozen=True, eq=False)
class WorkerGroup:
    """A worker on several devices, as its processes know it.

    Attributes:
        number: of the worker.
        setup: how they run a step of a mini-batch.
        meet: opens the store where they meet.
    """

    task: FitTask
    number: int
    setup: Setup
    meet: Callable[[], Any]

    @property
    def size(self) -> int:
        """How many processes there are."""
        return math.prod(self.setup.mesh.values())


class WorkerRank:
    """One process of a worker. The first is the worker itself; the others do what it asks for until they are ended.

    Raises:
        RankError: they cannot reach each other.
    """

    def __init__(self, worker: WorkerGroup, rank: int, place: torch.device) -> None:
        self._worker, self._task = worker, replace(worker.task, place=place)
        model, self._layout = self._task.model, worker.task.layout  # of the whole model
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        # By each name of tied parameters, the one that the layout has.
        self._names = {name: first[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
        from placement.runtime.modules.strategy_module import StrategyModule  # loads capture

        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        axes = worker.setup.mesh
        try:
            dist.init_process_group(backend, store=worker.meet(), rank=rank, world_size=worker.size, timeout=NO_LIMIT)
            mesh = init_device_mesh(place.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        except RuntimeError as error:
            raise RankError(f"the processes of worker {worker.number} do not meet: {error}") from None
        self._module = StrategyModule(model, worker.setup, mesh, place, self._task.loss)
        self._weights = torch.empty(self._layout.size)

    def gradient(self, weights: Tensor, samples: Tensor, step: int) -> tuple[float, Tensor]:
        """In the first process: as `FitTask.gradient`, of a whole mini-batch.

        Raises:
            FitError: another number of samples.
            RankError: another process of the worker has ended or failed.
        """
        if len(samples) != self._task.batch:
            raise FitError(
                f"a worker on {self._worker.size} devices computes gradients of {self._task.batch} samples, and the "
                f"method asks for {len(samples)}; take workers on one device each, or another method."
            )
        self._weights.copy_(weights)
        loss, gradients = self._together(samples, torch.tensor([step]))
        return loss, torch.cat([gradients[name].reshape(-1).float() for name in self._layout.names])

    def follow(self) -> None:
        """In the others: take part in gradients until this process is ended."""
        while True:
            self._together(torch.empty(self._task.batch, dtype=torch.int64), torch.empty(1, dtype=torch.int64))

    def _together(self, samples: Tensor, step: Tensor) -> tuple[float, dict[str, Tensor]]:
        """The loss, and in the first process the whole gradients by name. The arguments are those of the first."""
        try:
            for each in (step, samples, self._weights):
                dist.broadcast(each, 0)
            self._take_weights()
            self._module.zero_grad()
            with self._task.drawing(self._worker.number, int(step)):
                loss = self._module.step(*(each[samples].to(self._task.place) for each in self._task.data))
            return float(loss), self._module.gathered_gradients()
        except RuntimeError as error:
            raise RankError(f"a process of worker {self._worker.number} has ended: {error}") from None

    def _take_weights(self) -> None:
        """Give this process's parameters their parts of the weights."""
        from placement.runtime.modules.shared_module import fill

        whole = dict(zip(self._layout.names, self._layout.views(self._weights), strict=True))
        for name, parameter in self._module.named_parameters():
            if self._names[name] in whole:
                fill(parameter, whole[self._names[name]])


def follow(worker: WorkerGroup, rank: int, core: int, place: torch.device, parent: Parent) -> None:
    """Main function of a process that helps a worker. The worker hears of a failure, and tells."""
    on_one_core(core)
    try:
        helper = WorkerRank(worker, rank, place)
        parent.say((READY,))
        helper.follow()
    except RankError:
        os._exit(1)


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
