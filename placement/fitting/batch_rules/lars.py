"""LARS: SGD with momentum, in each layer at a rate that suits the layer's weights and gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.batch_rules.scaling import Ramp, check_warmup
from placement.fitting.batch_rules.torch_optimizers import check_momentum

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Updater
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class Lars:
    """You et al. 2017, algorithm 1, each parameter a layer; the learning rate grows with the number of workers.

    A layer's rate is the global one times trust |w| / (|g| + decay |w|), so that an update changes every layer by a
    like share of its norm. Where a norm is 0 it is the global one alone.

    Attributes:
        trust: that share, at a global rate of 1.
        momentum, decay: of the weights, as of SGD.
        warmup: updates until the rate of the whole batch is reached.
    """

    trust: float = 0.001
    momentum: float = 0.9
    decay: float = 0.0005
    warmup: int = 0

    def __post_init__(self) -> None:
        check_warmup(self.warmup)
        check_momentum(self.momentum)
        if not (self.trust > 0.0 and self.decay >= 0.0):
            raise FitError(
                f"lars has trust={self.trust:g} and decay={self.decay:g}; expected trust above 0, decay 0 or more."
            )

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """At the learning rate times `workers` after the warm-up."""
        return _LarsUpdater(self, layout, Ramp(learning_rate, learning_rate * workers, self.warmup))


class _LarsUpdater:
    def __init__(self, options: Lars, layout: WeightLayout, ramp: Ramp) -> None:
        self._options, self._layout, self._ramp = options, layout, ramp
        self._updates = 0
        self._velocity = torch.zeros(layout.size)

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """As `Updater.update`."""
        options, rate = self._options, self._ramp.rate(self._updates)
        self._updates += 1
        self._velocity = self._velocity.to(weights.device)
        flats = (weights, gradient, self._velocity)
        for w, g, velocity in zip(*map(self._layout.views, flats), strict=True):
            w_norm, g_norm = float(w.norm()), float(g.norm())
            divisor = g_norm + options.decay * w_norm
            share = options.trust * w_norm / divisor if w_norm > 0 and g_norm > 0 else 1.0
            velocity.mul_(options.momentum).add_(g + options.decay * w, alpha=rate * share)
            w.sub_(velocity)
