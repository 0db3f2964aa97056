"""How long a pipeline takes to fill, as a lower bound whatever its cuts, unequal stages included.

A stage begins no sooner than one micro-batch has come through the stages before it, and then does its own work for all
micro-batches: forward ops, and the backward ops that mirror them, which lie on the same device. Those that the backward
pass of the stages before waits for end so much sooner. Forward ops are cut in topological order, so stages
are stretches of a line along which neither heads, the earliest starts, nor tails fall (`Line`). Adding up gradients
comes with what makes them. Stages of one device each wait for what is sent, too (`Placed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baselines.kernel_records import Readers
from baselines.strategies.bounding.copies import Costs, Staged, waiting_readers
from baselines.strategies.bounding.extents import Extents
from baselines.strategies.bounding.line import Line
from baselines.strategies.bounding.placed import Placed
from baselines.strategies.bounding.serial import Serial
from baselines.strategies.bounding.synchronised import Synchronised
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.splitter import BATCH

_LAGGING = 0.9  # of the latest head before it: ops that could start much sooner than others before them do not count
_EXACT = 16  # places and numbers of micro-batches up to which each is looked at alone
_RATIO = 1.12
_HALVINGS = 30


@dataclass(frozen=True, eq=False)
class _Copies:
    """Seconds of ops at one place, the mean over all places, for the smallest micro-batch and for all of them.

    Attributes:
        share: float64 [n], of an op's work at a place, that of the smallest micro-batch.
        smallest_s, all_s: float64 [n].
        added_s: float64 [n], of adding up what an op makes for all of them.
    """

    share: FloatArray
    smallest_s: FloatArray
    all_s: FloatArray
    added_s: FloatArray


@dataclass(frozen=True, eq=False)
class Filling:
    """Pipelines of one graph on devices that are as fast as the fastest.

    Attributes:
        graph, costs, extents: of which.
        parts: float64 [n], into how many each op may be cut at most.
        staged: area and path, below which no bound falls.
        placed: of stages of one device each.
        synchronised: norms with statistics of the batch.
    """

    graph: OpGraph
    costs: Costs
    extents: Extents
    parts: FloatArray
    staged: Staged
    placed: Placed
    synchronised: Synchronised

    def placed_s(self, places: int, devices: int) -> float:
        """Seconds that no replicas of so many devices each, on which ops are placed one by one, can beat."""
        staged, once = self.staged, np.ones(1)
        k, p = np.array([places]), np.array([devices])
        return max(
            float(staged.area_s(k, p, once)[0]),
            float(staged.path_s(k, once)[0]),
            self.synchronised.least_s(places, devices),
            self._placed_s(self._copies((places, places), (1, 1)), places, devices),
        )

    def least_s(self, devices: int, places: tuple[int, int], is_v: bool, known_s: float = np.inf) -> float:
        """Seconds that no mesh of so many places, number of stages and of micro-batches can beat.

        Args:
            devices: of all stages together.
            places: from the first to the last number.
            is_v: a device has two stages.
            known_s: of no interest beyond.
        """
        cases = [
            (self._outside_s(k, m, devices), k, m)
            for k in _ranges(*places)
            for m in _ranges(1, self.extents.micro_batches)
        ]
        best_s = known_s
        for base_s, k, m in sorted(cases):
            if base_s >= best_s:
                break
            copies, stages = self._copies(k, m), devices // k[0]
            base_s = max(base_s, self._queued_s(copies, stages * (2 if is_v else 1)))
            if m[1] == 1:
                base_s = max(base_s, self._serial.least_s(copies.all_s, stages * (2 if is_v else 1)))
                if k[0] == k[1]:
                    base_s = max(base_s, self.synchronised.least_s(k[0], stages))
            if base_s < best_s:
                if (k, m) not in self._placed:  # of which straight and V-shaped orders have the same
                    self._placed[k, m] = self._placed_s(copies, k[1], stages)
                base_s = max(base_s, self._placed[k, m])
            if base_s < best_s:
                best_s = self._filled_s(self._line(copies), stages, is_v, base_s, best_s)
        return best_s

    def _outside_s(self, k: tuple[int, int], m: tuple[int, int], devices: int) -> float:
        """The larger of area and path for a range of places and micro-batches: each where in the range it is least."""
        staged = self.staged
        copies_s = staged.copies_s(np.array([k[0]]), np.array([float(m[0])]))[0]
        used = min(k[1] * (devices // k[0]), devices)
        path_s = staged.path_s(np.array([k[1]]), np.array([float(m[1])]))
        return max(float(copies_s / staged.price_sum[used - 1]), float(path_s[0]))

    def _copies(self, k: tuple[int, int], m: tuple[int, int]) -> _Copies:
        """Seconds of ops for any mesh and number of micro-batches in a range, so that they hold for all of them."""
        costs, parts = self.costs, np.minimum(k[1], self.parts)
        units, chunked = self.extents.along[BATCH], self.extents.is_chunked
        # Micro-batches are uneven where the batch does not divide, and the smallest may come first.
        share = np.where(chunked, np.floor(units / m[1]) / units, np.where(self.parts > 1, 0.5 / m[1], 1.0))
        share = np.minimum(share, 1.0) if m[1] > 1 else np.ones_like(share)
        return _Copies(
            share=share,
            smallest_s=costs.least_launch_s + costs.least_work_s / parts * share,
            all_s=costs.least_launch_s * np.where(chunked, m[0], 1) + costs.least_work_s / parts,
            added_s=(m[0] - 1) * (costs.least_adds + costs.least_added_s / k[1]),
        )

    def _queued_s(self, copies: _Copies, stages: int) -> float:
        """One micro-batch along a path, and the others in line behind it where the path's forward ops take longest.

        Some stage has at least its share of them, and does them for all micro-batches before the last one goes on.
        """
        stays = np.zeros(self.graph.n_ops, dtype=np.bool_)
        stays[self._loose[0]] = True
        is_forward = self.graph.phase == Phase.FORWARD
        more_s = np.where(stays, copies.all_s, 0.0) - np.where(is_forward, copies.smallest_s, 0.0)
        return max(float(copies.smallest_s[path].sum() + more_s[path].sum() / stages) for path in self.staged.paths)

    def _placed_s(self, copies: _Copies, places: int, stages: int) -> float:
        """Exchanges of a micro-batch at a place that has its even share of every op, and the work of all of them."""
        all_s = copies.all_s + copies.added_s
        # Where a border changes how a tensor is cut, each place may have a piece of its part from every place.
        share = copies.share / np.minimum(places, self.parts) ** 2
        return self.placed.least_s(copies.smallest_s, share, np.stack([all_s, all_s / stages]))

    def _line(self, copies: _Copies) -> Line:
        """The forward ops whose starts do not fall, each with what mirrors it."""
        from baselines.path_kernel import downward, upward  # loads the compiler

        head_s, rest_s, free_s = np.empty(self.graph.n_ops), np.empty(self.graph.n_ops), np.zeros(self.graph.n_tensors)
        downward(self.graph.topological_order, self._readers, copies.smallest_s, free_s, head_s)
        upward(self.graph.topological_order, self._readers, copies.smallest_s, free_s, rest_s)
        tail_s = rest_s - copies.smallest_s
        ops, mirror, mirrored = self._loose
        total_s = copies.all_s + copies.added_s
        np.add.at(total_s, mirrored, total_s[mirror])
        heads = head_s[ops]
        counted = heads >= _LAGGING * np.maximum.accumulate(heads)
        ops = ops[counted]
        held_s, until_s = self._held(copies, tail_s)
        tails = until_s[ops]
        is_held = tails >= _LAGGING * np.maximum.accumulate(tails)
        least_s = np.minimum.accumulate(np.where(is_held, tails, np.inf)[::-1])[::-1]
        return Line(
            done_s=np.concatenate([[0.0], np.cumsum(total_s[ops])]),
            held_s=np.concatenate([[0.0], np.cumsum(np.where(is_held, held_s[ops], 0.0))]),
            head_s=np.minimum.accumulate(heads[counted][::-1])[::-1],
            tail_s=np.where(np.isinf(least_s), 0.0, least_s),  # nothing is held any more
        )

    def _held(self, copies: _Copies, tail_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """``(seconds, tails)``, float64 [n] each: of a forward op and what mirrors it, the work that much must follow.

        The gradient of an op's input has the longer tail, that of its weights a short one, and does not count.
        """
        _, mirror, mirrored = self._loose
        longest_s = np.zeros(self.graph.n_ops)
        np.maximum.at(longest_s, mirrored, tail_s[mirror])
        until_s = _LAGGING * longest_s
        held_s = np.where(tail_s >= until_s, copies.all_s, 0.0)
        is_late = tail_s[mirror] >= until_s[mirrored]
        np.add.at(held_s, mirrored[is_late], copies.all_s[mirror[is_late]])
        return held_s, until_s

    @cached_property
    def _serial(self) -> Serial:
        return Serial(self.graph, *self._loose, self.staged.paths[0])

    @staticmethod
    def _filled_s(line: Line, devices: int, is_v: bool, base_s: float, most_s: float) -> float:
        """The least step from `base_s` on in which the devices cover the line, or `most_s` if it is no shorter."""
        covered = line.is_covered_twice if is_v else line.is_covered
        if not len(line.head_s) or covered(devices, base_s):
            return base_s
        low, high = base_s, min(most_s, float(line.head_s[-1] + line.tail_s[0] + line.done_s[-1]))
        if not covered(devices, high):
            return most_s
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if covered(devices, middle) else (middle, high)
        return low

    @cached_property
    def _placed(self) -> dict[tuple[tuple[int, int], tuple[int, int]], float]:
        return {}

    @cached_property
    def _readers(self) -> Readers:
        return waiting_readers(self.graph)

    @cached_property
    def _loose(self) -> tuple[IntArray, IntArray, IntArray]:
        """Forward ops in topological order that stay in the stage where they lie, and pairs of a backward op and the
        forward op that it certainly goes with.

        Colocation takes ops to the stage of another forward op of their group, if there is one.
        """
        graph = self.graph
        group, is_forward = graph.colocation, graph.phase == Phase.FORWARD
        members = np.bincount(group[is_forward & (group >= 0)], minlength=int(group.max(initial=0)) + 1)
        stays: BoolArray = is_forward & ((group < 0) | (members[group] == 1))
        order = graph.topological_order
        mirror = np.flatnonzero((graph.forward_of >= 0) & ~is_forward)
        mirrored = graph.forward_of[mirror]
        together = (group[mirror] < 0) | (group[mirror] == group[mirrored])
        return order[stays[order]], mirror[together], mirrored[together]


def _ranges(first: int, last: int) -> list[tuple[int, int]]:
    """Whole numbers in ranges, each alone at first and then as many as a constant share."""
    result = []
    while first <= last:
        end = first if first < _EXACT else max(first, int(first * _RATIO))
        result.append((first, min(end, last)))
        first = end + 1
    return result
