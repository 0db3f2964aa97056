"""How the learning rate follows the batch: scaled by the number of workers, after a warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.batch_rules.torch_optimizers import ElementWise, check_momentum

if TYPE_CHECKING:
    from placement.fitting.role import Updater
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class Ramp:
    """A learning rate that grows by equal steps from a worker's own to the one for the whole batch.

    Attributes:
        begin: that of the first update.
        end: that of all updates from number `length` on, counted from 0.
        length: 0 begins with the end.
    """

    begin: float
    end: float
    length: int

    def rate(self, update: int) -> float:
        """The learning rate of an update by number."""
        return self.begin + (self.end - self.begin) * (min(update / self.length, 1.0) if self.length else 1.0)


def check_warmup(updates: int) -> None:
    """FitError if a warm-up cannot take so many updates."""
    if updates < 0:
        raise FitError(f"a warm-up takes {updates} updates; expected 0 or more.")


@dataclass(frozen=True)
class LinearScaling:
    """SGD whose learning rate grows with the number of workers (Goyal et al. 2017, sections 2.1 and 2.2).

    The rate stands outside of the momentum, as in torch, so a change of it needs no correction (their remark 2).

    Attributes:
        warmup: updates until the rate of the whole batch is reached.
        momentum: of SGD.
    """

    warmup: int = 0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_warmup(self.warmup)
        check_momentum(self.momentum)

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """SGD at the learning rate times `workers` after the warm-up."""
        ramp = Ramp(learning_rate, learning_rate * workers, self.warmup)
        return ElementWise(lambda flat: torch.optim.SGD([flat], lr=ramp.rate(0), momentum=self.momentum), ramp.rate)
