"""`WorkerGroup`: the processes of a worker on several devices, which compute its gradients together."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from graphs.errors import FitError, RankError
from placement.fitting.real.mail import NO_LIMIT
from placement.processes.threads import on_one_core
from placement.runtime.transport.gloo import gloo_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from placement.fitting.task import FitTask
    from placement.processes.starting import Parent
    from placement.runtime.planning.strategy_plan import StrategyPlan

READY = "ready"  # what a process says that has met the others


@dataclass(frozen=True, eq=False)
class WorkerGroup:
    """A worker on several devices, as its processes know it.

    Attributes:
        number: of the worker.
        plan: what each of them does in a step of a mini-batch.
        meet: opens the store where they meet.
    """

    task: FitTask
    number: int
    plan: StrategyPlan
    meet: Callable[[], Any]

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.plan.states)


class WorkerRank:
    """One process of a worker. The first is the worker itself; the others do what it asks for until they are ended.

    Raises:
        RankError: they cannot reach each other.
    """

    def __init__(self, worker: WorkerGroup, rank: int, place: torch.device) -> None:
        self._worker, self._task = worker, replace(worker.task, place=place)
        self._layout = worker.task.layout  # of the whole model, which becomes this process's own part below
        from placement.runtime.modules.strategy_module import StrategyModule  # loads capture
        from placement.runtime.ranks.process_group import ProcessGroup

        store = worker.meet()
        group = ProcessGroup.start(store, rank, worker.size, is_quiet=True)
        self._orders = gloo_group(PrefixStore("orders", store), rank, worker.size, NO_LIMIT)
        self._module = StrategyModule(self._task.model, worker.plan, group, place)
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
                self._orders.broadcast(each, 0).wait()
        except RuntimeError as error:
            raise RankError(f"a process of worker {self._worker.number} has ended: {error}") from None
        module, layout = self._module, self._layout
        with torch.no_grad():
            for name, value in zip(layout.names, layout.views(self._weights), strict=True):
                own = module.own_part(name, value)
                if own is not None:
                    module.get_parameter(name).copy_(own)
        module.zero_grad()
        with self._task.drawing(self._worker.number, int(step)):
            loss = module.step(*(each[samples].to(self._task.place) for each in self._task.data))
        return float(loss), module.gathered_gradients()


def follow(worker: WorkerGroup, rank: int, core: int, place: torch.device, parent: Parent) -> None:
    """Main function of a process that helps a worker. The worker hears of a failure, and tells."""
    on_one_core(core)
    try:
        helper = WorkerRank(worker, rank, place)
        parent.say((READY,))
        helper.follow()
    except RankError:
        os._exit(1)
