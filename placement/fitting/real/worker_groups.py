"""`WorkerGroup`: the processes of a worker on several devices, which compute its gradients together."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from graphs.errors import FitError, RankError
from placement.fitting.real.groups import NO_LIMIT
from placement.processes.threads import on_one_core

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from placement.fitting.task import FitTask
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
