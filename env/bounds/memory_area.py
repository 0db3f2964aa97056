"""Loads and paths under limits of memory: work that leaves the devices where it would be fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from env.bounds.area import WorkByClass
from env.bounds.memory_prices import Prices, Programme
from env.problem import BoolArray, Problem
from graphs.opgraph import FloatArray

if TYPE_CHECKING:
    from env.bounds.heads import Pairs
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray


_CLASSES = 40  # with more, programmes of a size quickly solved would have too few units
_CLOSE = 1e-9  # relative


@dataclass(frozen=True)
class MemoryRoom:
    """Work and what it keeps, by class of devices that treat every op alike and have as much memory.

    Devices on one memory count as if each had all of it, which makes no bound too high.

    Attributes:
        work: op times by such class.
        kept: float64 [n], bytes kept, relative to those of all ops. The bytes that a unit of placement keeps are spread
        over its ops in proportion to their least times, so that no op is cheap to move without its unit.
        capacity: float64 [K], memory of a device of each class, in the same unit.
    """

    work: WorkByClass
    kept: FloatArray
    capacity: FloatArray

    @staticmethod
    def of(problem: Problem) -> MemoryRoom:
        """The classes of a problem."""
        total, unit, count = float(problem.graph.kept_bytes.sum()) or 1.0, problem.unit_of, problem.n_units
        work, first = WorkByClass.classes(problem, problem.capacity_bytes)
        weight = work.seconds.min(axis=1)
        weight = np.where(np.bincount(unit, weight, count)[unit] > 0, weight, 1.0)
        share = weight / np.bincount(unit, weight, count)[unit]
        kept = np.bincount(unit, problem.graph.kept_bytes, count)[unit] * share
        return MemoryRoom(work, kept / total, problem.capacity_bytes[first] / total)

    def may_raise(self, area_s: float) -> bool:
        """True if memory may make the area of all ops larger than ``area_s``.

        It cannot where every device holds everything, nor where the same share of each op on each device, by their
        speeds, fits and takes no longer.
        """
        seconds, size = self.work.seconds, self.work.size
        if self.capacity.min() >= 1.0 or not self.kept.any() or len(size) > _CLASSES:
            return False
        if not np.isfinite(seconds).all():
            return True
        speed = 1.0 / np.maximum(seconds.sum(axis=0), 1e-300)
        share = speed / (speed * size).sum()
        return bool((share > self.capacity).any() or 1.0 / (speed * size).sum() > area_s * (1 + _CLOSE))

    def slows_paths(self) -> bool:
        """True if memory may keep ops from their fastest devices: not all fit there."""
        seconds, size = self.work.seconds, self.work.size
        if len(size) > _CLASSES or (seconds == seconds[:, :1]).all():
            return False
        return bool((np.bincount(seconds.argmin(axis=1), self.kept, len(size)) > self.capacity * size).any())

    def prices(self, chosen: BoolArray, one_by_one: bool = False) -> Prices:
        """Least time to run the chosen ops where all must keep what they keep: spread fractionally, units whole.

        Args:
            chosen: bool [n].
            one_by_one: the chosen ops are a path.
        """
        work = self.work
        seconds = np.column_stack(
            [
                np.bincount(work.unit_of, np.where(chosen | np.isinf(column), column, 0.0), work.n_units)
                for column in work.seconds.T
            ]
        )
        kept = np.bincount(work.unit_of, self.kept, work.n_units)
        some = (seconds.min(axis=1) > 0) | (kept > 0)
        return Programme(seconds[some], kept[some], work.size, self.capacity, one_by_one).best()

    def costs(self, prices: Prices) -> tuple[FloatArray, float]:
        """Bound that prices prove, op by op: seconds [n] that each chosen op adds, and seconds of no op, often < 0."""
        allowed, size = np.isfinite(self.work.seconds), self.work.size
        memory = np.where(allowed, self.kept[:, None] * prices.memory, np.inf)
        idle = memory.min(axis=1)
        busy = (memory + np.where(allowed, self.work.seconds, 0.0) * prices.time).min(axis=1)
        paid = float((prices.memory * self.capacity * size).sum())
        rounding = 4 * len(idle) * np.finfo(np.float64).eps * (float(busy.sum()) + paid)
        return busy - idle, float(idle.sum()) - paid - rounding


_ROUNDS = 4  # paths for which prices are sought, each the longest under the prices of the one before, while that helps


def slowed_path_s(room: MemoryRoom, pairs: Pairs) -> float:
    """Seconds of the longest path with transfers where ops that keep bytes on a fast device pay for them.

    With a price z_d for each byte of device d, an op counts a_u = min_d (t_ud + z_d kept_u) - min_d z_d kept_u. Make
    each op of a schedule last longer by z_d kept_u - min z kept_u, and it ends later by at most their sum, which is at
    most sum_d z_d capacity_d - sum_u min_d z_d kept_u wherever the placement fits. Every op then lasts at least a_u, so
    each bound on schedules of such ops (`Pairs.heads`), less that sum, is a bound on this one. Prices are the best for
    one path, by the linear programme of `MemoryRoom.prices`.
    """
    free = replace(pairs, remote_s=np.zeros(len(pairs.source)))
    path, best_s = _longest(free)
    paying, unpaid_s = pairs, 0.0
    for _ in range(_ROUNDS):
        seconds, less_s = room.costs(room.prices(path, one_by_one=True))
        path, path_s = _longest(replace(free, op_s=seconds))
        if path_s + less_s <= best_s:
            break
        best_s, paying, unpaid_s = path_s + less_s, replace(pairs, op_s=seconds), less_s
    return 0.0 if paying is pairs else float((paying.heads() + paying.op_s).max()) + unpaid_s


def _longest(pairs: Pairs) -> tuple[BoolArray, float]:
    """bool [n]: a longest path where transfers are free; its seconds."""
    end_s: FloatArray = pairs.heads(1) + pairs.op_s
    by_target = np.argsort(pairs.target, kind="stable")
    ptr = np.searchsorted(pairs.target[by_target], np.arange(len(end_s) + 1))
    at = int(end_s.argmax())
    chosen = np.zeros(len(end_s), dtype=np.bool_)
    chosen[at] = True
    while ptr[at] < ptr[at + 1]:
        before = pairs.source[by_target[ptr[at] : ptr[at + 1]]]
        at = int(before[end_s[before].argmax()])
        chosen[at] = True
    return chosen, float(end_s.max())
