"""Nonlinear least squares of a few bounded numbers, as of Levenberg and Marquardt, in which outliers count little."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_STEPS = 60
_ENOUGH = 1e-7  # of the cost: below such a gain it ends


def least_squares(
    residuals: Callable[[Array], Array],
    first: Array,
    lower: Array,
    upper: Array,
    *,
    step: float = 0.003,
    scale: float = math.inf,
    steps: int = _STEPS,
) -> Array:
    """The numbers [p] that make residuals [n] smallest.

    Args:
        residuals: of some numbers.
        first: where to begin.
        lower, upper: what each number may be.
        step: over which derivatives are taken: large where residuals have steps of their own.
        scale: residuals far above it count by their logarithm (Cauchy's loss); infinite for plain squares.
        steps: at most.

    Each step solves the normal equations of the weighted residuals, damped more after a failure (Marquardt, An
    algorithm for least-squares estimation of nonlinear parameters, 1963).
    """
    x = np.clip(first, lower, upper)
    r = residuals(x)
    cost, damping = _cost(r, scale), 1e-2
    for _ in range(steps):
        weight = 1.0 / (1.0 + (r / scale) ** 2)
        slopes = _slopes(residuals, x, r, step, upper)
        normal, downhill = slopes.T @ (weight[:, None] * slopes), slopes.T @ (weight * r)
        gained = 0.0
        while damping < 1e8:
            # A constant on which no time depends has no curvature: that of the others keeps the equations regular.
            curvature = np.diag(normal)
            diagonal = np.diag(damping * np.maximum(curvature, 1e-6 * curvature.max() + 1e-30))
            tried = np.clip(x - np.linalg.lstsq(normal + diagonal, downhill)[0], lower, upper)
            there = residuals(tried)
            gained = cost - _cost(there, scale)
            if gained > 0.0:
                x, r, damping = tried, there, damping / 5.0
                break
            damping *= 4.0
        if gained <= _ENOUGH * cost:
            break
        cost -= gained
    return x


def _cost(r: Array, scale: float) -> float:
    if math.isinf(scale):
        return float(np.sum(r * r))
    return float(np.sum(scale * scale * np.log1p((r / scale) ** 2)))


def _slopes(residuals: Callable[[Array], Array], x: Array, r: Array, step: float, upper: Array) -> Array:
    """float64 [n, p]: derivatives by differences, taken downwards where a number is at its upper bound."""
    columns = []
    for k in range(len(x)):
        moved, by = x.copy(), step if x[k] + step <= upper[k] else -step
        moved[k] += by
        columns.append((residuals(moved) - r) / by)
    return np.stack(columns, axis=1)
