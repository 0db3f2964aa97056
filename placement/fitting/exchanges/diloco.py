"""DiLoCo: local steps, and an outer optimizer that takes the mean change of all workers for a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from placement.fitting.batch_rules.torch_optimizers import ElementWise
from placement.fitting.exchanges.local_sgd import local_steps
from placement.fitting.exchanges.refusals import below, first_of, outside, with_arrival_rule
from placement.fitting.requests import Participant, told
from placement.fitting.role import MethodParts, Role


@dataclass(frozen=True)
class DiLoCo:
    """Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models", algorithm 1.

    The batch rule is the inner optimizer (the paper: AdamW, 500 steps), and keeps its state. The outer one is SGD with
    Nesterov momentum. An outer learning rate of 1 without momentum is local SGD.

    Attributes:
        period: steps of a worker between two outer updates.
        outer_lr, outer_momentum: of the outer optimizer.
    """

    period: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """None."""
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Numbers out of range; an arrival rule."""
        return first_of(
            below("diloco:period", self.period, 1),
            below("diloco:outer_lr", self.outer_lr, 0),
            outside("diloco:outer_momentum", self.outer_momentum, 0, 1),
            with_arrival_rule("diloco", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker."""
        weights, inner, compressor = role.start.clone(), role.updater(1), role.compressor()
        outer, start = ElementWise(self._outer_optimizer), role.start.clone()
        for turn in count():
            version = self.period * (turn + 1)
            yield from local_steps(weights, inner, range(version - self.period, version))
            change = yield from compressor.mean(start - weights, role.everybody)
            outer.update(start, change)
            weights.copy_(start)
            if role.number == 0:
                yield told(version, weights)

    def _outer_optimizer(self, flat: Tensor) -> torch.optim.Optimizer:
        momentum = self.outer_momentum
        return torch.optim.SGD([flat], lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)
