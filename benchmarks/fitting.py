"""`fitted`: the figures of a machine that make its measured times likely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_LARGE = 0.1  # errors beyond it count less than by their squares


def fitted(
    errors: Callable[[T], Sequence[float]],
    start: T,
    bounds: Mapping[str, tuple[float, float]],
    hold: float = 0.0,
) -> T:
    """The figures between bounds whose errors are least, in squares while they are small, then in absolute values.

    Args:
        errors: of the times that a record of figures predicts, as logarithms of ratios.
        start: a dataclass of figures.
        bounds: least and largest value of each field that is fitted.
        hold: error that a figure counts for at e times its start, so that what no row tells stays where it is.
    """
    from scipy.optimize import least_squares

    names = list(bounds)
    first = np.log([getattr(start, name) for name in names])
    low, high = np.log(np.array([bounds[name] for name in names])).T

    def made(logs: np.ndarray) -> T:
        changed: Any = replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))  # type: ignore[type-var]
        result: T = changed
        return result

    def residuals(logs: np.ndarray) -> np.ndarray:
        held = hold * (logs - first) if hold else np.zeros(0)
        return np.concatenate([np.asarray(errors(made(logs))), held])

    found = least_squares(
        residuals, first, bounds=(low, high), diff_step=0.01, loss="soft_l1", f_scale=_LARGE, xtol=1e-4, ftol=1e-4,
        max_nfev=40,
    )  # fmt: skip
    return made(found.x)
