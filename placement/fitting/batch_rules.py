"""Rules by which a mean gradient becomes an update, and how each depends on the size of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.participants import Updater
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
