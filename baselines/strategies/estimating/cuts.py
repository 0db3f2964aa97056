"""`Cuts`: how a graph is cut along each axis of a mesh, kept for many sizes of the mesh.

The walk that chooses the rows (`graphs.transforms.splitting.sharding`) takes most of the time of an estimate. Along a
named axis its choices depend on the number of parts only where that passes what an op allows; so one walk serves many
sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.records import OWN_FAMILY, ByGroups, Shard, parts_statistics
from graphs.transforms.derived import Derived
from graphs.transforms.splitting.copies import divided_extents
from graphs.transforms.splitting.cuts import IN_TIME, SUM, WHOLE, Axis, Sharding
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.masks import in_time
from graphs.transforms.splitting.ring_rows import turned
from graphs.transforms.splitting.rings import in_rings


@dataclass(frozen=True, eq=False)
class AxisCut:
    """A graph cut along one axis into any number of parts (n ops, m tensors, e inputs, s states).

    Attributes:
        key: tells it from all other cuts of the graph.
        extent: int64 [n], units into which an op may be cut; 1 where its work is not divided, 0 where it is not cut.
        divided: int64 [n], the number of the extent that its parts divide, as of `divided_extents`.
        whole_flops, whole_bytes, whole_time: float64 [n], what every part has in full, as of `SplitRow`.
        sums_bytes: float64 [n], as of `SplitRow`.
        written_extent: int64 [m], units of a tensor that is written cut; 0 for one that is not.
        written, read, state: as of `Sharding`.
        halo: float64 [e], as of `Sharding`.
        load: float64 [n], of each op as of `SplitRow`; `written_load`, float64 [m], of what is written by groups.
        has_parted_statistics: bool [n], ops with statistics of a batch whose parts each see some of it.
        turns: bool [e], keys and values that go round a ring; sums: bool [m], gradients that do.
    """

    key: tuple[object, ...]
    extent: IntArray
    divided: IntArray
    whole_flops: FloatArray
    whole_bytes: FloatArray
    whole_time: FloatArray
    sums_bytes: FloatArray
    written_extent: IntArray
    written: IntArray
    read: IntArray
    state: IntArray
    halo: FloatArray
    load: FloatArray
    written_load: FloatArray
    has_parted_statistics: BoolArray
    turns: BoolArray
    sums: BoolArray

    def share(self, size: int, weights: Sequence[int] = (), part: int | None = None) -> FloatArray:
        """float64 [n]: share of an op's divided work of the part that has most, or of one of uneven parts."""
        weight = 0 if part is None else weights[part]
        return np.minimum(_largest_share(self.extent, size, weights, weight) * self.load, 1.0)

    def written_share(self, size: int, weights: Sequence[int] = ()) -> FloatArray:
        """float64 [m]: share of each tensor of the part that has most; 1 for a tensor that is not cut."""
        is_cut = ~np.isin(self.written, (WHOLE, SUM))
        largest = np.minimum(_largest_share(self.written_extent, size, weights) * self.written_load, 1.0)
        return np.where(is_cut, largest, 1.0)


def _largest_share(extent: IntArray, size: int, weights: Sequence[int], weight: int = 0) -> FloatArray:
    units = np.maximum(extent, 1)
    uneven = np.ceil(units * (weight or max(weights)) / sum(weights)) if weights else -(-units // size)
    largest = np.minimum(uneven, units)
    return np.where(extent > 1, largest / units, 1.0)


class Cuts:
    """The cuts of one graph, made when they are first asked for.

    Args:
        runs: the graph with some ops that run again, if there are any; each run is cut as the first one is.
        first: cuts of the graph before, then.
    """

    def __init__(self, graph: OpGraph, runs: Derived | None = None, first: Cuts | None = None) -> None:
        self.graph, self._first = graph, first
        self._origins = None if runs is None else _Origins.of(runs)
        self._walked: dict[tuple[object, ...], Sharding] = {}
        self._made: dict[tuple[object, ...], AxisCut] = {}
        self._failed: dict[tuple[object, ...], StrategyError] = {}
        # A run allows as many parts as the first one.
        self._extents: dict[str, list[int]] = _extents_of(graph) if first is None else first._extents
        self._units: dict[str, int] = _units_of(graph) if first is None else first._units

    def units(self, word: str) -> int:
        """Units of the inputs along an axis word, e.g. samples of the batch; 0 where no input has any."""
        return self._units.get(word, 0)

    def along(self, axis: Axis, others: Sequence[Axis]) -> AxisCut:
        """The cut along one axis, beside others that may cut the same dimensions.

        Raises:
            StrategyError: as `graphs.transforms.splitting.split`.
        """
        parts = axis.size
        for other in others:
            if set(other.words) & set(axis.words) or not axis.words:
                parts *= other.size
        words = OWN_FAMILY if axis.cuts_weights else axis.words  # the rows of weights do not depend on other axes
        levels = tuple(bisect_left(self._extents.get(word, []), parts) for word in words)
        size = axis.size if axis.cuts_weights or "experts" in axis.words else 0
        too_small = tuple(word for word in axis.words if 0 < self.units(word) < parts)
        every = (axis, *others)
        heads = tuple((other.size, other.is_ring) for other in every if other.by_heads or other.is_ring)
        experts = (
            axis.has_experts,
            axis.once_a_host,
            *(other.size for other in every if other.has_experts or "experts" in other.words),
        )
        named = (axis.words, axis.sequence, axis.in_stages, axis.modules, axis.tensor_modules)
        walk = (*named, size, levels, too_small, heads, experts)
        key = (*walk, axis.name == IN_TIME)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._made and self._first is not None and self._origins is not None:
            self._made[key] = self._origins.cut_alike(self._first.along(axis, others))
        if key not in self._made:
            if walk not in self._walked:
                try:
                    self._walked[walk] = cut(self.graph, axis, others)
                except StrategyError as error:
                    self._failed[key] = error
                    raise
            made = self._walked[walk]
            self._made[key] = _kept(self.graph, in_time(self.graph, made) if key[-1] else made, key)
        return self._made[key]


def _extents_of(graph: OpGraph) -> dict[str, list[int]]:
    """The extents of all rows along each axis word, increasing."""
    result: dict[str, set[int]] = {}
    for rows in graph.split_rows:
        for row in rows:
            result.setdefault(row.axis, set()).add(row.extent)
    return {word: sorted(extents) for word, extents in result.items()}


def _units_of(graph: OpGraph) -> dict[str, int]:
    result: dict[str, int] = {}
    for kind, rows in zip(graph.kinds, graph.split_rows, strict=False):
        for row in rows if kind == "input" else ():
            result[row.axis] = max(row.extent, result.get(row.axis, 1))
    return result


@dataclass(frozen=True, eq=False)
class _Origins:
    """Where each op, tensor and input of a graph with recomputation comes from.

    Attributes:
        op: int64 [n].
        tensor: int64 [m]; -1 for a gate, which is empty, and whole everywhere.
        input: int64 [e]; -1 for a gate.
    """

    op: IntArray
    tensor: IntArray
    input: IntArray

    @staticmethod
    def of(runs: Derived) -> _Origins:
        graph, before, op = runs.graph, runs.source, runs.origin
        # A run writes what its op writes, in the same order, and after that its gate.
        slot = np.arange(graph.n_tensors) - graph.output_ptr[graph.tensor_producer]
        origin = op[graph.tensor_producer]
        tensor = np.where(slot < np.diff(before.output_ptr)[origin], before.output_ptr[origin] + slot, -1)
        known = _input_keys(before, np.arange(before.n_ops), np.arange(before.n_tensors), before.n_tensors)
        wanted = _input_keys(graph, op, tensor, before.n_tensors)
        place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        is_gate = tensor[graph.inputs[1]] < 0
        return _Origins(op, tensor, np.where(is_gate, -1, place))

    def cut_alike(self, first: AxisCut) -> AxisCut:
        """The cut whose runs are each cut as the first one is."""
        none_of_tensor, none_of_input = self.tensor < 0, self.input < 0
        return replace(
            first,
            extent=first.extent[self.op],
            divided=first.divided[self.op],
            whole_flops=first.whole_flops[self.op],
            whole_bytes=first.whole_bytes[self.op],
            whole_time=first.whole_time[self.op],
            sums_bytes=first.sums_bytes[self.op],
            written_extent=np.where(none_of_tensor, 0, first.written_extent[self.tensor]),
            written=np.where(none_of_tensor, WHOLE, first.written[self.tensor]),
            read=np.where(none_of_input, WHOLE, first.read[self.input]),
            halo=np.where(none_of_input, 0.0, first.halo[self.input]),
            load=first.load[self.op],
            written_load=np.where(none_of_tensor, 1.0, first.written_load[self.tensor]),
            has_parted_statistics=first.has_parted_statistics[self.op],
            turns=first.turns[self.input] & ~none_of_input,
            sums=first.sums[self.tensor] & ~none_of_tensor,
        )


def _input_keys(graph: OpGraph, op: IntArray, tensor: IntArray, n_tensors: int) -> IntArray:
    """int64 [e]: a number for each (reader, tensor), given what to call either."""
    ptr, tensors = graph.inputs
    reader = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
    return np.asarray(op[reader] * n_tensors + tensor[tensors], dtype=np.int64)


def _kept(graph: OpGraph, made: Sharding, key: tuple[object, ...]) -> AxisCut:
    extent, written_extent = np.zeros(graph.n_ops, dtype=np.int64), np.zeros(graph.n_tensors, dtype=np.int64)
    flops, moved, time, sums = np.zeros((4, graph.n_ops))
    load, written_load = np.ones(graph.n_ops), np.ones(graph.n_tensors)
    first = graph.output_ptr.tolist()
    for op, row in enumerate(made.row):
        if row is None:
            continue
        extent[op], flops[op], moved[op], time[op] = row.extent, row.whole_flops, row.whole_bytes, row.whole_time
        sums[op], load[op] = row.sums_bytes, row.load
        for t, part in enumerate(row.outputs, start=first[op]):
            if isinstance(part, Shard):
                written_extent[t] = part.extent
                written_load[t] = part.load if isinstance(part, ByGroups) else 1.0
    parted = [row is not None and parts_statistics(kind, row) for row, kind in zip(made.row, graph.kinds, strict=True)]
    whole = made.written, made.read, made.state, made.halo, load, written_load, np.array(parted), *_turning(graph, made)
    return AxisCut(key, extent, divided_extents(graph, made.row), flops, moved, time, sums, written_extent, *whole)


def _turning(graph: OpGraph, made: Sharding) -> tuple[BoolArray, BoolArray]:
    """bool [e] and [m]: what goes round a ring, as of `AxisCut`."""
    turns, sums = np.zeros(len(made.read), dtype=np.bool_), np.zeros(graph.n_tensors, dtype=np.bool_)
    for op in in_rings(graph, [made]):
        found = turned(graph, op, made.row[op])
        assert found is not None
        turns[graph.inputs[0][op] + np.array(found[0], dtype=np.int64)] = True
        sums[graph.output_ptr[op] + np.array(found[1], dtype=np.int64)] = True
    return turns, sums
