"""LAMB: Adam, in each layer by a step as long as suits the layer's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.batch_rules.scaling import Ramp, check_warmup

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Updater
    from placement.fitting.task import WeightLayout

_BETAS, _EPSILON = (0.9, 0.999), 1e-6


@dataclass(frozen=True)
class Lamb:
    """You et al. 2020, algorithm 2, each parameter a layer; the rate grows with the root of the number of workers.

    A layer's step, Adam's with decay of the weights, is brought to the norm of the layer's weights times the rate.
    Where a norm is 0 it is left as it is.

    Attributes:
        decay: of the weights.
        warmup: updates until the rate of the whole batch is reached.
    """

    decay: float = 0.01
    warmup: int = 0

    def __post_init__(self) -> None:
        check_warmup(self.warmup)
        if not self.decay >= 0.0:
            raise FitError(f"lamb has decay={self.decay:g}; expected 0 or more.")

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """At the learning rate times the root of `workers` after the warm-up (their section 4)."""
        return _LambUpdater(self.decay, layout, Ramp(learning_rate, learning_rate * math.sqrt(workers), self.warmup))


class _LambUpdater:
    def __init__(self, decay: float, layout: WeightLayout, ramp: Ramp) -> None:
        self._decay, self._layout, self._ramp = decay, layout, ramp
        self._updates = 0
        self._mean, self._square = torch.zeros(layout.size), torch.zeros(layout.size)

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """As `Updater.update`."""
        rate = self._ramp.rate(self._updates)
        self._updates += 1
        mean, square = (
            moment.to(weights.device).lerp(value, 1 - beta)
            for moment, value, beta in zip(
                (self._mean, self._square), (gradient, gradient.square()), _BETAS, strict=True
            )
        )
        self._mean, self._square = mean, square
        first, second = (
            moment / (1 - beta**self._updates) for moment, beta in zip((mean, square), _BETAS, strict=True)
        )
        steps = first / (second.sqrt() + _EPSILON) + self._decay * weights
        for w, step in zip(self._layout.views(weights), self._layout.views(steps), strict=True):
            w_norm, step_norm = float(w.norm()), float(step.norm())
            share = w_norm / step_norm if w_norm > 0 and step_norm > 0 else 1.0
            w.sub_(step, alpha=rate * share)
