"""The area bound: least time in which work fits, fractionally, on devices of unequal speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import distinct_rows

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from graphs.opgraph import FloatArray, IntArray

_FEW = 10  # classes of which prices are found exactly
MOST_WORK, _FEWEST_ROWS = 12_000_000, 300  # rows times classes times steps, a tenth of a second
_STEPS = 40, 400  # of an auction
_HOT, _COLD = 0.3, 0.002  # temperatures, relative to the cheapest cost
_RATE = 0.5
_FORBIDDEN = 1e30  # seconds, float32 still has room above


@dataclass(frozen=True)
class WorkByClass:
    """Op times by class of devices: devices that treat every op alike count as one class.

    Attributes:
        seconds: float64 [n, K], infinite where not allowed or too little memory.
        size: float64 [K], devices in each class.
        unit_of: int64 [n], the unit each op is placed with.
        n_units: number of units.
    """

    seconds: FloatArray
    size: FloatArray
    unit_of: IntArray
    n_units: int

    @staticmethod
    def of(problem: Problem) -> WorkByClass:
        """The classes of a problem whatever their memory."""
        return WorkByClass.classes(problem, np.zeros(problem.cluster.n_devices, dtype=np.int64))[0]

    @staticmethod
    def classes(problem: Problem, kind: IntArray) -> tuple[WorkByClass, IntArray]:
        """Classes of devices that have the same ``kind``, int64 [D], too, and the first device of each, int64 [K]."""
        rows, row_of = distinct_rows(problem.suits)

        @cache
        def seconds(suited: bytes, kind: int) -> FloatArray:
            return np.where(np.frombuffer(suited, dtype=np.bool_)[row_of], problem.kind_s[:, kind], np.inf)

        columns = [seconds(rows[:, d].tobytes(), int(k)) for d, k in enumerate(problem.kind_of)]
        classes: dict[tuple[bytes, int], list[int]] = {}
        for d, column in enumerate(columns):
            classes.setdefault((column.tobytes(), int(kind[d])), []).append(d)
        first = np.array([members[0] for members in classes.values()])
        size = np.array([float(len(members)) for members in classes.values()])
        chosen = np.ascontiguousarray(np.column_stack([columns[d] for d in first.tolist()]))
        return WorkByClass(chosen, size, problem.unit_of, problem.n_units), first

    def cheapest_s(self, price: FloatArray) -> FloatArray:
        """float64 [n]: what each op costs at least, at a price for a second of each class."""
        result: FloatArray = np.where(np.isfinite(self.seconds), self.seconds * price, np.inf).min(axis=1)
        return result

    def largest_unit_s(self) -> float:
        """Seconds of the largest unit on its fastest allowed device: one device must do it all. O(n K)."""
        seconds = np.column_stack([np.bincount(self.unit_of, column, self.n_units) for column in self.seconds.T])
        return float(seconds.min(axis=1).max())

    def area(self, chosen: BoolArray, start: FloatArray | None = None) -> tuple[float, FloatArray]:
        """Least time to run the chosen ops, units whole but spread fractionally, and the prices that prove it.

        The dual of a linear program: with a price y_d >= 0 for a second of device d and sum y_d = 1, the load L_d <= T
        of any placement obeys T >= sum y_d L_d >= sum over units of their cheapest device. Any prices give a bound;
        those found here are the best to some 1e-12 for up to 10 classes, and to some 1e-3 for more (`_auction`).

        Args:
            chosen: bool [n].
            start: float64 [K], prices to begin with, if there are good ones.
        """
        totals = np.column_stack(
            [np.bincount(self.unit_of[chosen], column[chosen], self.n_units) for column in self.seconds.T]
        )
        totals = totals[totals.min(axis=1) > 0]
        return _dearest(totals, self.size, start)


def _dearest(totals: FloatArray, size: FloatArray, start: FloatArray | None) -> tuple[float, FloatArray]:
    """``sum_g min_k y_k totals[g, k]`` for good prices with ``sum size_k y_k = 1``; returns value and prices."""
    k = len(size)
    price = _by_load(totals, size)
    if k > 1 and len(totals):
        exact = k <= _FEW
        steps = 30 * k * k if exact else _STEPS[0]
        few = _joined(totals, max(_FEWEST_ROWS, MOST_WORK // (steps * k)))
        found = _ellipsoid(few, size) if exact else _auction(few, size, start)
        candidates = [price, found] if start is None else [price, found, start]
        price = max(candidates, key=lambda y: _value(totals, y))
    return _value(totals, price), price


def _value(totals: FloatArray, price: FloatArray) -> float:
    return float((totals * price).min(axis=1).sum())


def _by_load(totals: FloatArray, size: FloatArray) -> FloatArray:
    """Prices under which all of the work costs the same on each class: the best where speeds are all that differs."""
    load = np.where(np.isfinite(totals), totals, 0.0).sum(axis=0)
    price = 1.0 / np.where(load > 0, load, 1.0)
    result: FloatArray = price / (price * size).sum()
    return result


def _joined(totals: FloatArray, most: int) -> FloatArray:
    """About so many rows: the sums of rows with like ratios between classes (and the same classes forbidden)."""
    if len(totals) <= most:
        return totals
    allowed = np.isfinite(totals)
    pattern = distinct_rows(allowed)[1]
    logs = np.log(np.where(allowed, totals, 1.0))
    logs -= logs.sum(axis=1, keepdims=True) / allowed.sum(axis=1, keepdims=True)
    by = np.where(allowed, logs, 0.0)
    order = np.lexsort((by[:, by.var(axis=0).argmax()], pattern))
    kind = pattern[order]
    begins = np.arange(len(order)) % -(-len(order) // most) == 0
    begins[1:] |= kind[1:] != kind[:-1]
    return np.add.reduceat(totals[order], np.flatnonzero(begins), axis=0)


def _auction(totals: FloatArray, size: FloatArray, start: FloatArray | None) -> FloatArray:
    """Prices of many classes: those in demand get dearer, the others cheaper, step by step.

    Each row is spread over the classes by the exponential of minus its cost there, relative to the cheapest and to a
    temperature that falls; a price then changes by the ratio of its class's load to the mean (multiplicative weights:
    S. Arora, E. Hazan, S. Kale, Theory of Computing 8, 2012, doi:10.4086/toc.2012.v008a006). O(steps G K).
    """
    price = _by_load(totals, size) if start is None else np.maximum(start, 1e-6 * _by_load(totals, size))
    steps = int(np.clip(MOST_WORK // totals.size, *_STEPS))
    hot, steps = (_HOT, steps) if start is None else (_HOT * 0.1, steps // 3)
    seconds = np.where(np.isfinite(totals), totals / _value(totals, price), _FORBIDDEN).astype(np.float32)
    best, best_s = price, 0.0
    for step in range(steps):
        temperature = hot * (_COLD / hot) ** (step / steps)
        cost = seconds * price.astype(np.float32)
        cheapest = cost.min(axis=1)
        value_s = float(cheapest.sum(dtype=np.float64))
        if value_s > best_s:
            best, best_s = price, value_s
        share = np.exp((1.0 - cost / cheapest[:, None]) / np.float32(temperature))
        spent = (cost * (share / share.sum(axis=1, keepdims=True))).sum(axis=0, dtype=np.float64)
        demand = spent / (spent.sum() * price * size)
        price = price * np.exp(np.clip(_RATE * temperature * (demand - 1.0), -_RATE, _RATE))
        price = np.maximum(price / (price * size).sum(), 1e-30)
    return best


def _ellipsoid(totals: FloatArray, size: FloatArray) -> FloatArray:
    """The best prices of few classes, by the ellipsoid method (Grötschel, Lovász, Schrijver 1988, section 3.1).

    In K - 1 dimensions, the best prices stay inside an ellipsoid that shrinks by a fixed rate per step. Prices are
    scaled by each class's load, so that the optimum is not in a far corner when one class is a hundred times slower.
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
    n = k - 1
    centre, shape = weight[:n].copy(), np.eye(n)
    for _ in range(30 * k * k):
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
    return best_price
