"""The area bound: least time in which work fits, fractionally, on devices of unequal speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True)
class Work:
    """Op times by class of devices: devices that treat every op alike count as one class.

    Attributes:
        seconds: float64 [n, K], infinite where not allowed.
        size: float64 [K], devices in each class.
        group_of: int64 [n], the unit each op is placed with.
        n_groups: number of units.
    """

    seconds: FloatArray
    size: FloatArray
    group_of: IntArray
    n_groups: int

    @staticmethod
    def of(problem: Problem) -> Work:
        seconds = np.where(problem.allowed, problem.op_s, np.inf)
        classes: dict[bytes, list[int]] = {}
        for d in range(problem.cluster.n_devices):
            classes.setdefault(seconds[:, d].tobytes(), []).append(d)
        columns = [members[0] for members in classes.values()]
        size = np.array([float(len(members)) for members in classes.values()])
        return Work(np.ascontiguousarray(seconds[:, columns]), size, problem.group_of, len(problem.groups))

    def area(self, chosen: NDArray[np.bool_]) -> tuple[float, FloatArray]:
        """Least time to run the chosen ops, units whole but spread fractionally, and the prices that prove it.

        The dual of a linear program: with a price y_d >= 0 for a second of device d and sum y_d = 1, the load L_d <= T
        of any placement obeys T >= sum y_d L_d >= sum over units of their cheapest device. Any prices give a bound.
        """
        totals = np.column_stack(
            [np.bincount(self.group_of[chosen], column[chosen], self.n_groups) for column in self.seconds.T]
        )
        return _dearest(totals[totals.min(axis=1) > 0], self.size)


def _dearest(totals: FloatArray, size: FloatArray) -> tuple[float, FloatArray]:
    """Maximise ``sum_g min_k y_k totals[g, k]`` over prices with ``sum size_k y_k = 1``; returns value and prices.

    The ellipsoid method (Grötschel, Lovász, Schrijver 1988, section 3.1) in K - 1 dimensions: the best prices stay
    inside an ellipsoid that shrinks by a fixed rate per step. Prices are scaled by each class's load, so that the
    optimum is not in a far corner when one class is a hundred times slower.
    """
    k = len(size)
    load = np.where(np.isfinite(totals), totals, 0.0).sum(axis=0)
    scale = 1.0 / np.where(load > 0, load, 1.0)

    def evaluate(weight: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        price = weight * scale / (weight * scale * size).sum()
        cost = totals * price
        cheapest = cost.argmin(axis=1)
        rows = np.arange(len(totals))
        value = float(cost[rows, cheapest].sum())
        slope = np.bincount(cheapest, totals[rows, cheapest], k) - value * size
        return value, price, slope * scale

    weight = np.full(k, 1.0 / k)
    best, best_price, _ = evaluate(weight)
    if k == 1 or best == 0.0:
        return best, best_price
    n = k - 1
    centre, shape = weight[:n].copy(), np.eye(n)
    for _ in range(min(30 * k * k, max(60, 200_000_000 // totals.size))):
        weight = np.append(centre, 1.0 - centre.sum())
        if weight.min() <= 0:
            worst = int(weight.argmin())
            cut = np.eye(k)[worst]
        else:
            value, price, cut = evaluate(weight)
            if value > best:
                best, best_price = value, price
        direction = cut[:n] - cut[n]  # the last weight is what the others leave
        width = float(direction @ shape @ direction)
        if width <= 1e-24 * max(best, 1e-300) ** 2:
            break
        step = shape @ direction / np.sqrt(width)
        centre = centre + step / (n + 1)
        shrunk = shape - 2.0 / (n + 1) * np.outer(step, step)
        shape = n * n / (n * n - 1.0) * shrunk if n > 1 else shape / 4.0
    return best, best_price
