"""Lower bounds on the step time, and proofs that nothing fits (docs/score.md, "Bounds").

All of them hold for every placement that respects pins and colocation, under every order of work.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.memory_bounds import memory_reason
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray

_THRESHOLDS = 128  # heads and tails tried each; a larger grid finds barely more
_REFINED = 4  # subsets of ops whose area is computed with prices of their own


@dataclass(frozen=True)
class Bound:
    """What no placement can beat.

    Attributes:
        critical_path_s: longest path, every op on its fastest allowed device, free transfers.
        area_s: least time in which all work fits, fractionally, on the devices it is allowed on.
        interval_s: the same for work between a common head and a common tail, and for groups that share one device.
        memory_reason: one sentence if provably no placement fits into memory, else None.
    """

    critical_path_s: float
    area_s: float
    interval_s: float
    memory_reason: str | None = None

    @property
    def value_s(self) -> float:
        """The best of them."""
        return max(self.critical_path_s, self.area_s, self.interval_s)

    def gap(self, step_time_s: float) -> float:
        """(step time - bound) / step time: 0 proves optimality."""
        return max(0.0, (step_time_s - self.value_s) / step_time_s) if step_time_s > 0 else 0.0


def lower_bound(problem: Problem) -> Bound:
    """All bounds of a problem. Takes about 1 s for 100,000 ops on equal devices, 2 s on three kinds."""
    fastest_s = np.where(problem.allowed, problem.op_s, np.inf).min(axis=1)
    head_s, tail_s = _heads_and_tails(problem, fastest_s)
    work = _Work.of(problem)
    everything = np.ones(problem.graph.n_ops, dtype=np.bool_)
    area_s, price = work.area(everything)
    interval_s = max(_interval_work(work, head_s, tail_s, price), _one_device_groups(problem, work, head_s, tail_s))
    # A simulated step adds up n times, each with a rounding error; a bound must not exceed it for that.
    safety = 1.0 - 1e-12 - problem.graph.n_ops * np.finfo(np.float64).eps
    return Bound(
        critical_path_s=float((head_s + fastest_s + tail_s).max() * safety),
        area_s=float(area_s * safety),
        interval_s=float(interval_s * safety),
        memory_reason=memory_reason(problem),
    )


def _heads_and_tails(problem: Problem, fastest_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds that must pass before each op can start, and after it has ended."""
    graph = problem.graph
    producer, consumer, _ = graph.edge_list
    order = graph.topological_order.tolist()
    seconds = fastest_s.tolist()
    return (
        np.array(_longest_before(order, producer, consumer, seconds)),
        np.array(_longest_before(order[::-1], consumer, producer, seconds)),
    )


def _longest_before(order: list[int], source: IntArray, target: IntArray, seconds: list[float]) -> list[float]:
    by_source = np.argsort(source, kind="stable")
    ptr = np.searchsorted(source[by_source], np.arange(len(order) + 1)).tolist()
    targets = target[by_source].tolist()
    longest = [0.0] * len(order)
    for i in order:
        after = longest[i] + seconds[i]
        for c in targets[ptr[i] : ptr[i + 1]]:
            longest[c] = max(longest[c], after)
    return longest


@dataclass(frozen=True)
class _Work:
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
    def of(problem: Problem) -> _Work:
        seconds = np.where(problem.allowed, problem.op_s, np.inf)
        classes: dict[bytes, list[int]] = {}
        for d in range(problem.cluster.n_devices):
            classes.setdefault(seconds[:, d].tobytes(), []).append(d)
        columns = [members[0] for members in classes.values()]
        size = np.array([float(len(members)) for members in classes.values()])
        return _Work(np.ascontiguousarray(seconds[:, columns]), size, problem.group_of, len(problem.groups))

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


def _interval_work(work: _Work, head_s: FloatArray, tail_s: FloatArray, price: FloatArray) -> float:
    """Largest, over thresholds h and t, of h + t + area of the ops with head >= h and tail >= t."""
    cheapest_s = np.where(np.isfinite(work.seconds), work.seconds * price, np.inf).min(axis=1)
    heads, tails = _thresholds(head_s), _thresholds(tail_s)
    row = np.searchsorted(heads, head_s, side="right") - 1
    column = np.searchsorted(tails, tail_s, side="right") - 1
    cell_s = np.bincount(row * len(tails) + column, cheapest_s, len(heads) * len(tails))
    beyond_s = cell_s.reshape(len(heads), len(tails))[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    reached = np.bincount(row * len(tails) + column, minlength=len(heads) * len(tails))
    some = reached.reshape(len(heads), len(tails))[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1] > 0
    bound_s = np.where(some, heads[:, None] + tails[None, :] + beyond_s, 0.0)
    best = float(bound_s.max())
    for cell in np.argsort(bound_s, axis=None)[::-1][:_REFINED]:
        h, t = heads[cell // len(tails)], tails[cell % len(tails)]
        chosen = (head_s >= h) & (tail_s >= t)
        if chosen.any():
            best = max(best, float(h + t + work.area(chosen)[0]))
    return best


def _thresholds(values: FloatArray) -> FloatArray:
    distinct = np.unique(values)
    if len(distinct) <= _THRESHOLDS:
        return distinct
    return distinct[np.unique(np.linspace(0, len(distinct) - 1, _THRESHOLDS).astype(np.int64))]


def _one_device_groups(problem: Problem, work: _Work, head_s: FloatArray, tail_s: FloatArray) -> float:
    """Largest single-device bound over colocation groups, and over the ops that only one device may run."""
    best = 0.0
    columns = range(work.seconds.shape[1])
    for members in problem.groups:
        if len(members) > 1:
            possible = [d for d in columns if np.isfinite(work.seconds[members[0], d])]
            best = max(
                best, min(_one_device(work.seconds[members, d], head_s[members], tail_s[members]) for d in possible)
            )
    only = problem.allowed.sum(axis=1) == 1
    for d in np.unique(problem.allowed[only].argmax(axis=1)).tolist():
        members = np.flatnonzero(only & problem.allowed[:, d])
        best = max(best, _one_device(problem.op_s[members, d], head_s[members], tail_s[members]))
    return best


def _one_device(seconds: FloatArray, head_s: FloatArray, tail_s: FloatArray) -> float:
    """Step time of one device that may interrupt ops: always run the released op with the longest tail.

    Jackson's preemptive schedule, the best possible with heads and tails; O(k log k). J. Carlier, "The one-machine
    sequencing problem", European J. of Operational Research 11 (1982), doi:10.1016/S0377-2217(82)80007-6.
    """
    release = sorted(zip(head_s.tolist(), tail_s.tolist(), seconds.tolist(), strict=True))
    ready: list[tuple[float, float]] = []  # (-tail, seconds left)
    now = best = 0.0
    k = 0
    while ready or k < len(release):
        if not ready:
            now = max(now, release[k][0])
        while k < len(release) and release[k][0] <= now:
            heapq.heappush(ready, (-release[k][1], release[k][2]))
            k += 1
        minus_tail, left = heapq.heappop(ready)
        until = release[k][0] if k < len(release) else np.inf
        if now + left <= until:
            now += left
            best = max(best, now - minus_tail)
        else:
            heapq.heappush(ready, (minus_tail, left - (until - now)))
            now = until
    return best
