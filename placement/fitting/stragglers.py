"""How much longer a gradient takes than planned, drawn from a stated distribution: one line of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from graphs.errors import FitError, UnknownNameError

# Options of each distribution with their defaults, and the least that each may be.
_OPTIONS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "none": {},
    "exponential": {"mean": (0.5, 0.0)},
    "pareto": {"shape": (1.5, 1.0)},
    "slow": {"worker": (0.0, 0.0), "factor": (2.0, 1.0)},
}

_MOST = 1e9


@dataclass(frozen=True)
class Stragglers:
    """Factors by which gradients take longer.

    ``none``; ``exponential:mean=0.5``: 1 + X, X exponential with that mean; ``pareto:shape=1.5``: Pareto from 1 up,
    heavy-tailed, of infinite variance for shapes up to 2; ``slow:worker=1:factor=3``: one worker always, others never.

    Attributes:
        text: as above.
        seed: of the draws. One for each (worker, step): it does not depend on who asks first.
    """

    text: str
    seed: int
    _factor: Callable[[int, np.random.Generator], float]

    @classmethod
    def parse(cls, text: str, seed: int, workers: int | None = None) -> Stragglers:
        """The distribution that a text names, of so many workers if that is known.

        Raises:
            UnknownNameError: there is no such distribution.
            FitError: an option that it does not have, a number out of range, or a worker that is not there.
        """
        name, *options = text.strip().split(":")
        if name not in _OPTIONS:
            raise UnknownNameError("distribution of stragglers", name, _OPTIONS)
        values = {key: default for key, (default, _) in _OPTIONS[name].items()}
        for option in options:
            key, _, number = option.partition("=")
            if key not in values:
                expected = ", ".join(values) or "none"
                raise FitError(f"stragglers {text!r}: {name} has no option {key!r}; expected one of: {expected}.")
            values[key] = _number(number, key, _OPTIONS[name][key][1], text)
            if key == "worker" and values[key] not in range(workers or 1 << 30):
                there = "" if workers is None else f" below {workers}, the number of workers"
                raise FitError(f"stragglers {text!r}: there is no worker {number}; expected a whole number{there}.")
        return cls(text, seed, _factors(name, values))

    def factor(self, worker: int, step: int) -> float:
        """1 or more: how many times as long as planned a worker's gradient number `step` takes."""
        return self._factor(worker, np.random.default_rng((self.seed, worker, step)))


def _number(text: str, key: str, least: float, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        raise FitError(
            f"stragglers {whole!r}: {key}={text} is out of range; expected a number from {least:g} to {_MOST:g}."
        )
    return value


def _factors(name: str, values: Mapping[str, float]) -> Callable[[int, np.random.Generator], float]:
    if name == "exponential":
        return lambda worker, generator: 1.0 + generator.exponential(values["mean"])
    if name == "pareto":
        return lambda worker, generator: 1.0 + generator.pareto(values["shape"])  # numpy's begins at 0
    if name == "slow":
        return lambda worker, generator: values["factor"] if worker == values["worker"] else 1.0
    return lambda worker, generator: 1.0
