"""Optimizers of torch that treat every entry by itself: SGD, momentum, Adagrad, Adam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Updater
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` is above 0, and below 1."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_momentum(self.momentum)

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """The learning rate does not depend on the number of workers."""
        return ElementWise(lambda flat: torch.optim.SGD([flat], lr=learning_rate, momentum=self.momentum))


@dataclass(frozen=True)
class Adagrad:
    """Duchi et al. 2011; what Downpour SGD uses at its servers (Dean et al. 2012, section 4.1)."""

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """The learning rate does not depend on the number of workers."""
        return ElementWise(lambda flat: torch.optim.Adagrad([flat], lr=learning_rate))


@dataclass(frozen=True)
class Adam:
    """Kingma and Ba 2015."""

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """The learning rate does not depend on the number of workers."""
        return ElementWise(lambda flat: torch.optim.Adam([flat], lr=learning_rate))


def check_momentum(momentum: float) -> None:
    """FitError if a momentum would let gradients grow for ever."""
    if not 0.0 <= momentum < 1.0:
        raise FitError(f"a momentum is {momentum:g}; expected one from 0 to below 1.")


class ElementWise:
    """An optimizer of torch on one flat vector; it is made at the first update, and follows the vector it is given.

    Args of the constructor:
        make: the optimizer of a vector.
        rate: (update, from 0) -> its learning rate, where it changes.
    """

    def __init__(
        self,
        make: Callable[[Tensor], torch.optim.Optimizer],
        rate: Callable[[int], float] | None = None,
    ) -> None:
        self._make, self._rate = make, rate
        self._updates = 0
        self._flat: Tensor | None = None

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """As `Updater.update`."""
        if self._flat is None:
            self._flat = torch.nn.Parameter(weights.clone())
            self._optimizer = self._make(self._flat)
        self._flat.data.copy_(weights)
        self._flat.grad = gradient.clone()
        if self._rate is not None:
            self._optimizer.param_groups[0]["lr"] = self._rate(self._updates)
        self._optimizer.step()
        self._updates += 1
        weights.copy_(self._flat.data)
