"""`recompute_stretches`: recompute for graphs without modules, along the topological order of the forward pass.

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016: sections 4.1 (the
square root of the memory for one more forward pass) and 4.3 (the logarithm, by recursion). Two things need less than
the equal stretches of the paper: the last stretch is not run again, as its backward pass comes at once, and earlier
ones are longer, since fewer kept tensors lie beside them when their turn comes: 1.4 instead of 2 square roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from graphs.arrays import FloatArray, IntArray, sums
from graphs.errors import GraphError
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.derived import Derived
from graphs.transforms.recomputing.recompute_graph import Runs, run_again
from graphs.transforms.recomputing.selecting import computes_forward, late_segments


def recompute_stretches(graph: OpGraph, segments: int | None = None, levels: int = 1) -> Derived:
    """Cut the forward pass into stretches, and let each but the last run again when the backward pass comes to it.

    Args:
        graph: a training step before any other transform; its backward ops say which forward ops they mirror.
        segments: number of stretches, each with the same share of the bytes that wait for the backward pass; None for
            those stretches, of unlike lengths, that need least memory.
        levels: how often: at 2 each stretch is cut once more into `segments` when it runs again, and so on. Two
            segments on many levels need memory in the logarithm of the ops, and half a forward pass for each level.

    Raises:
        GraphError: fewer than two segments or one level, or several levels without a number of segments.
    """
    if (segments is not None and segments < 2) or levels < 1 or (levels > 1 and segments is None):
        raise GraphError(
            f"got {segments} segments on {levels} levels; expected 2 or more segments (none for the best ones, on one "
            "level) and 1 level or more."
        )
    pass_ = _ForwardPass(graph)
    if len(pass_.ops) == 0:
        return Derived.identity(graph)
    runs = Runs.first(graph)
    stretches = [(0, len(pass_.ops))]
    for _ in range(levels):
        cut = [_cut(pass_, first, last, segments) for first, last in stretches]
        runs = _again(runs, pass_, cut)
        stretches = [stretch for parts in cut for stretch in parts]
    return runs.derived


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """The forward ops that compute something, k of them, as they run one after the other."""

    graph: OpGraph

    @cached_property
    def ops(self) -> IntArray:
        """int64 [k]: their numbers, in topological order."""
        order = self.graph.topological_order
        return order[computes_forward(self.graph)[order]]

    @cached_property
    def place(self) -> IntArray:
        """int64 [n]: where each op stands among them; -1 for others."""
        place = np.full(self.graph.n_ops, -1, dtype=np.int64)
        place[self.ops] = np.arange(len(self.ops))
        return place

    @cached_property
    def waiting_until(self) -> IntArray:
        """int64 [k + 1]: bytes, written before each place, that some op of the backward pass reads."""
        producer, reader, tensor = self.graph.edge_list
        is_late = (self.graph.phase[reader] != Phase.FORWARD) & (self.place[producer] >= 0)
        tensors = np.unique(tensor[is_late])
        places = self.place[self.graph.tensor_producer[tensors]]
        waiting = sums(places, self.graph.tensor_memory_bytes[tensors], len(self.ops))
        return np.concatenate([[0], np.cumsum(waiting)]).astype(np.int64)

    @cached_property
    def tensors(self) -> tuple[IntArray, IntArray, IntArray]:
        """Tensors that other forward ops read, by maker: places of maker and last reader, and bytes; int64 each."""
        producer, reader, tensor = self.graph.edge_list
        inner = (self.place[producer] >= 0) & (self.place[reader] >= 0)
        last = np.full(self.graph.n_tensors, -1, dtype=np.int64)
        np.maximum.at(last, tensor[inner], self.place[reader[inner]])
        chosen = np.flatnonzero(last >= 0)
        maker = self.place[self.graph.tensor_producer[chosen]]
        order = np.argsort(maker, kind="stable")
        return maker[order], last[chosen][order], self.graph.tensor_memory_bytes[chosen][order]

    def crossing(self, first: int, last: int) -> IntArray:
        """int64 [last - first]: bytes made from `first` on that cross a cut before place first + 1, ..., last."""
        maker, reader, size = self.tensors
        low, high = np.searchsorted(maker, (first, last))
        made, read = maker[low:high] - first, np.minimum(reader[low:high], last) - first
        change = sums(made, size[low:high], last - first + 1) - sums(read, size[low:high], last - first + 1)
        return np.cumsum(change)[:-1]


def _cut(pass_: _ForwardPass, first: int, last: int, segments: int | None) -> list[tuple[int, int]]:
    """Stretches (from, to) of places `first` to `last`."""
    if segments is None:
        return _least(pass_)
    waiting = pass_.waiting_until
    shares = waiting[first] + (waiting[last] - waiting[first]) * _shares(segments)
    cuts = np.searchsorted(waiting[first : last + 1], shares) + first
    return list(pairwise(np.unique([first, *cuts.tolist(), last]).tolist()))


def _shares(segments: int) -> FloatArray:
    return np.arange(1, segments) / segments


def _least(pass_: _ForwardPass) -> list[tuple[int, int]]:
    """The stretches of the smallest budget of bytes for which there are any, to a thousandth."""
    low, high = 0, int(pass_.waiting_until[-1])
    best = [(0, len(pass_.ops))]
    while high - low > max(1, high // 1024):
        middle = (low + high) // 2
        found = _within(pass_, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _within(pass_: _ForwardPass, budget: int) -> list[tuple[int, int]] | None:
    """Stretches whose bytes, with all that is kept at the cuts before them, fit into a budget; None if there are none.

    Each is as long as it may be, or ends before that where fewest bytes cross.
    """
    waiting, end = pass_.waiting_until, len(pass_.ops)
    result: list[tuple[int, int]] = []
    first, kept = 0, 0
    while True:
        last = int(np.searchsorted(waiting, waiting[first] + budget - kept, side="right")) - 1
        if last >= end:
            return [*result, (first, end)]
        if last <= first:
            return None
        crossing = pass_.crossing(first, last)
        length = last - first - int(np.argmin(crossing[::-1]))
        result.append((first, first + length))
        kept += int(crossing[length - 1])
        first += length
        if kept > budget:
            return None


def _again(runs: Runs, pass_: _ForwardPass, cut: list[list[tuple[int, int]]]) -> Runs:
    """Let the last run of every op run once more, but for the last stretch of each list."""
    stretch = np.full(len(pass_.ops), -1, dtype=np.int64)
    number = 0
    for parts in cut:
        for first, last in parts[:-1]:
            stretch[first:last] = number
            number += 1
    of_source = np.where(pass_.place >= 0, stretch[pass_.place], -1)
    last_run = np.zeros(pass_.graph.n_ops, dtype=np.int64)
    np.maximum.at(last_run, runs.origin, runs.run)
    made = np.where(runs.run == last_run[runs.origin], of_source[runs.origin], -1)
    late = late_segments(pass_.graph, of_source, np.full(pass_.graph.n_ops, -1, dtype=np.int64))
    return run_again(runs, made, np.where(runs.run == 0, late[runs.origin], -1))
