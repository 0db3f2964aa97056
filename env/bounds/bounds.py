"""Lower bounds on step time and largest load, and proofs that nothing fits (docs/score.md, "Bounds").

All of them hold for every placement that fits and respects pins and colocation, under every order of work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from env.bounds.area import WorkByClass
from env.bounds.heads import Pairs
from env.bounds.memory import memory_reason
from env.bounds.memory_area import MemoryRoom, slowed_path_s
from env.objectives import THROUGHPUT
from env.problem import BoolArray, Problem
from graphs.opgraph import FloatArray

_THRESHOLDS = 128  # heads and tails tried each; a larger grid finds barely more
_REFINED = 4  # subsets of ops whose area is computed with prices of their own


@dataclass(frozen=True)
class Bound:
    """A value that no placement can beat, in seconds of the problem's objective.

    Attributes:
        critical_path_s: longest path, every op on its fastest allowed device, free transfers. For throughput 0: steps
            overlap.
        communication_s: the same where a path either pays for a transfer or keeps what it joins on one device, which
            must have room for it; where the fast devices lack room for all ops, slower ones count. For throughput 0.
        area_s: least time in which all work fits, fractionally, on the devices it is allowed on, and so do kept bytes.
        interval_s: the same for work between a common head and a common tail, and for groups that share one device. For
            throughput the largest unit of placement on its fastest allowed device.
        memory_reason: one sentence if provably no placement fits into memory, else None.
    """

    critical_path_s: float
    communication_s: float
    area_s: float
    interval_s: float
    memory_reason: str | None = None

    @property
    def value_s(self) -> float:
        """The best of them."""
        return max(self.critical_path_s, self.communication_s, self.area_s, self.interval_s)

    def gap(self, objective_s: float) -> float:
        """(objective - bound) / objective: 0 proves optimality."""
        return max(0.0, (objective_s - self.value_s) / objective_s) if objective_s > 0 else 0.0


def lower_bound(problem: Problem) -> Bound:
    """All bounds of a problem, of its objective. Takes 2 s for 1,000 devices or 100,000 ops, 4 s where memory binds."""
    work, room = WorkByClass.of(problem), MemoryRoom.of(problem)
    everything = np.ones(problem.graph.n_ops, dtype=np.bool_)
    area_s, price = work.area(everything)
    with_memory = room.prices(everything) if room.may_raise(area_s) else None
    if with_memory is not None and with_memory.value_s <= area_s:
        with_memory = None
    elif with_memory is not None:
        area_s = with_memory.value_s
    # A score adds up n times, each with a rounding error; a bound must not exceed it for that.
    safety = 1.0 - 1e-12 - 4 * problem.graph.n_ops * np.finfo(np.float64).eps
    if problem.objective == THROUGHPUT:
        largest_s = work.largest_unit_s()
        return Bound(0.0, 0.0, float(area_s * safety), float(largest_s * safety), memory_reason(problem))
    pairs = Pairs.of(problem)
    head_s, tail_s = pairs.heads(), pairs.tails()
    communication_s = float((head_s + pairs.op_s + tail_s).max())
    if room.slows_paths():
        communication_s = max(communication_s, slowed_path_s(room, pairs))
    interval_s = max(
        interval_work(head_s, tail_s, work.cheapest_s(price), 0.0, _REFINED, lambda some: work.area(some, price)[0]),
        _one_device_groups(problem, work, head_s, tail_s),
    )
    if with_memory is not None:
        costs = room.costs(with_memory)
        by_memory_s = interval_work(head_s, tail_s, *costs, 1, lambda some: room.prices(some).value_s)
        interval_s = max(interval_s, by_memory_s)
    return Bound(
        critical_path_s=float(pairs.critical_path_s * safety),
        communication_s=float(communication_s * safety),
        area_s=float(area_s * safety),
        interval_s=float(interval_s * safety),
        memory_reason=memory_reason(problem),
    )


def interval_work(
    head_s: FloatArray,
    tail_s: FloatArray,
    cheapest_s: FloatArray,
    without_s: float,
    refined: int,
    area: Callable[[BoolArray], float],
) -> float:
    """Largest, over thresholds h and t, of h + t + area of the ops with head >= h and tail >= t.

    Args:
        head_s, tail_s: float64 [n].
        cheapest_s, without_s: what each chosen op adds to the area at least, float64 [n], and the area of none.
        refined: how many sets of ops, the most promising ones, get prices of their own.
        area: seconds of chosen ops, bool [n].
    """
    heads, tails = _thresholds(head_s), _thresholds(tail_s)
    row = np.searchsorted(heads, head_s, side="right") - 1
    column = np.searchsorted(tails, tail_s, side="right") - 1
    cell_s = np.bincount(row * len(tails) + column, cheapest_s, len(heads) * len(tails))
    beyond_s = cell_s.reshape(len(heads), len(tails))[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    reached = np.bincount(row * len(tails) + column, minlength=len(heads) * len(tails))
    some = reached.reshape(len(heads), len(tails))[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1] > 0
    bound_s = np.where(some, heads[:, None] + tails[None, :] + beyond_s + without_s, 0.0)
    best = float(bound_s.max())
    for cell in np.argsort(bound_s, axis=None)[::-1][:refined]:
        h, t = heads[cell // len(tails)], tails[cell % len(tails)]
        chosen = (head_s >= h) & (tail_s >= t)
        if chosen.any():
            best = max(best, float(h + t + area(chosen)))
    return best


def _thresholds(values: FloatArray) -> FloatArray:
    distinct = np.unique(values)
    if len(distinct) <= _THRESHOLDS:
        return distinct
    return distinct[np.unique(np.linspace(0, len(distinct) - 1, _THRESHOLDS).astype(np.int64))]


def _one_device_groups(problem: Problem, work: WorkByClass, head_s: FloatArray, tail_s: FloatArray) -> float:
    """Largest single-device bound over colocation groups, and over the ops that only one device may run."""
    best = 0.0
    columns = range(work.seconds.shape[1])
    for members in problem.units:
        if len(members) > 1:
            possible = [d for d in columns if np.isfinite(work.seconds[members[0], d])]
            best = max(
                best, min(one_device(work.seconds[members, d], head_s[members], tail_s[members]) for d in possible)
            )
    only = problem.allowed.sum(axis=1) == 1
    for d in np.unique(problem.allowed[only].argmax(axis=1)).tolist():
        members = np.flatnonzero(only & problem.allowed[:, d])
        best = max(best, one_device(problem.op_s_on(d)[members], head_s[members], tail_s[members]))
    return best


def one_device(seconds: FloatArray, head_s: FloatArray, tail_s: FloatArray) -> float:
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
