"""Coarsening to a number of groups: heaviest edges first, in rounds that cannot create a cycle.

The multilevel scheme of J. Herrmann et al., "Acyclic Partitioning of Large Directed Acyclic Graphs", CCGrid 2017,
doi:10.1109/CCGRID.2017.101, with stars instead of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np

from graphs.arrays import FloatArray, IntArray, numbered, sums
from graphs.errors import GraphError
from graphs.opgraph import OpGraph
from graphs.transforms.coarsen.contraction import contract, merge_classes
from graphs.transforms.derived import Derived

_FREE, _SOURCE, _SINK, _LEAF = range(4)  # what an op is to the star it belongs to
_ROOM = 1.5  # a group may have this many times the mean group's work before the bound is relaxed
_GROUPS_TIED = 2  # so many groups' work may be tied together: a layer's forward and backward ops
_BYTES_PER_S = 12e9  # weighs measured transfer times against sizes where a graph has both


def to_size(graph: OpGraph, n_groups: int) -> Derived:
    """Merge ops until `n_groups` groups are left, along heavy edges, of about equal work.

    Work is the mean share of FLOPs, bytes moved, kernels and measured time. Parallel branches are merged only where no
    edge is left to merge along. Colocation groups that meet in a group become one, but no more than a few groups' worth
    of work is tied together while there is another way: the fewer groups are asked for, the more of a training graph
    ends up tied. Fewer ops than `n_groups` stay as they are; and ops of different phases or pins are never merged, so
    that a graph may end with more groups than asked for.

    Takes O(e log e) per round, and about ``log(n_ops / n_groups)`` rounds.

    Raises:
        GraphError: `n_groups` is below 1.
    """
    if n_groups < 1:
        raise GraphError(f"n_groups is {n_groups}; expected 1 or more.")
    return contract(graph, _merged_to(_first_clusters(graph), n_groups).of_op)


def to_units(graph: OpGraph, n_units: int) -> IntArray:
    """int64 [n_ops]: the unit of each op, numbered from 0, where `n_units` share a device each.

    Colocation groups and free ops are merged as `to_size` merges ops, along what they send each other. Units run op by
    op, so they may hold ops of all phases; ops of different pins are never merged, so that there may be more.

    Raises:
        GraphError: `n_units` is below 1.
    """
    if n_units < 1:
        raise GraphError(f"n_units is {n_units}; expected 1 or more.")
    return numbered(_merged_to(_colocated(graph), n_units).of_op)[0]


def _merged_to(clusters: _Clusters, n_groups: int) -> _Clusters:
    """Merge until so many are left, or nothing more can be merged."""
    room = _ROOM / n_groups
    while clusters.size > n_groups:
        size = clusters.size
        clusters = _merged(clusters, _stars(clusters, room, size - n_groups))
        if clusters.size > 0.98 * size:  # hardly an edge left: merge what could run at the same time
            clusters = _merged(clusters, _siblings(clusters, room, clusters.size - n_groups))
        if clusters.size == size:
            if room > 2:
                break
            room *= 2
    return clusters


@dataclass(frozen=True)
class _Clusters:
    """Groups so far, and the graph between them. k groups, e edges, each pair of groups once.

    Attributes:
        of_op: int64 [n_ops], the group of each op.
        source, target: int64 [e].
        weight: float64 [e], bytes along the edge.
        work: float64 [k], share of all work; sums to 1.
        classes: int64 [k], see `merge_classes`.
        tie: int64 [k], number of the set of groups that must share a device; a group without such has its own.
    """

    of_op: IntArray
    source: IntArray
    target: IntArray
    weight: FloatArray
    work: FloatArray
    classes: IntArray
    tie: IntArray

    @property
    def size(self) -> int:
        return len(self.work)

    def levels(self) -> IntArray:
        """int64 [k]: the most edges on a path to each group."""
        by_source = np.argsort(self.source, kind="stable")
        ptr = np.searchsorted(self.source[by_source], np.arange(self.size + 1)).tolist()
        targets = self.target[by_source].tolist()
        missing = np.bincount(self.target, minlength=self.size).tolist()
        level = [0] * self.size
        ready = [group for group in range(self.size) if missing[group] == 0]
        for group in ready:  # grows while it is walked
            for target in targets[ptr[group] : ptr[group + 1]]:
                level[target] = max(level[target], level[group] + 1)
                missing[target] -= 1
                if missing[target] == 0:
                    ready.append(target)
        return np.array(level, dtype=np.int64)


def _first_clusters(graph: OpGraph) -> _Clusters:
    n = graph.n_ops
    producer, consumer, tensor = graph.edge_list
    transfer_s = np.nan_to_num(graph.tensor_transfer_s, nan=0.0)
    weight = (graph.transfer_bytes + transfer_s * _BYTES_PER_S)[tensor]
    source, target, weight = _unique_edges(producer, consumer, weight, n)
    tie = np.where(graph.colocation >= 0, graph.colocation, n + np.arange(n)).astype(np.int64)
    _, tie = np.unique(tie, return_inverse=True)
    return _Clusters(np.arange(n), source, target, weight, _work(graph), merge_classes(graph), tie.reshape(-1))


def _colocated(graph: OpGraph) -> _Clusters:
    """Colocation groups and free ops; an edge leads from the one whose first op is first in topological order."""
    ops, position = _first_clusters(graph), graph.topological_position
    unit_of = numbered(ops.tie)[0]
    k = int(unit_of.max()) + 1
    first = np.full(k, graph.n_ops, dtype=np.int64)
    np.minimum.at(first, unit_of, position)
    ends = np.stack([unit_of[ops.source], unit_of[ops.target]])
    low, high = np.take_along_axis(ends, first[ends].argsort(axis=0), axis=0)
    between = low != high
    source, target, weight = _unique_edges(low[between], high[between], ops.weight[between], k)
    classes = np.empty(k, dtype=np.int64)
    classes[unit_of] = merge_classes(graph, by_phase=False)
    return _Clusters(unit_of, source, target, weight, sums(unit_of, ops.work, k), classes, np.arange(k))


def _work(graph: OpGraph) -> FloatArray:
    measured = np.nan_to_num(graph.time_s, nan=0.0).sum(axis=1)
    columns = [graph.flops, graph.bytes_moved, graph.kernels.astype(np.float64), measured]
    shares = [column / column.sum() for column in columns if column.sum() > 0]
    return np.asarray(np.mean(shares, axis=0)) if shares else np.full(graph.n_ops, 1 / graph.n_ops)


def _unique_edges(
    source: IntArray, target: IntArray, weight: FloatArray, size: int
) -> tuple[IntArray, IntArray, FloatArray]:
    pairs, inverse = np.unique(source * size + target, return_inverse=True)
    return pairs // size, pairs % size, sums(inverse.reshape(-1), weight, len(pairs))


class _Ties:
    """Sets of groups that share a device, and the work of each set."""

    def __init__(self, clusters: _Clusters, room: float) -> None:
        self.parent = list(range(int(clusters.tie.max()) + 1))
        self.work = np.bincount(clusters.tie, weights=clusters.work).tolist()
        self.size = np.bincount(clusters.tie).tolist()
        self.of = clusters.tie.tolist()
        self.room = room

    def root(self, tie: int) -> int:
        while self.parent[tie] != tie:
            self.parent[tie] = self.parent[self.parent[tie]]
            tie = self.parent[tie]
        return tie

    def join(self, a: int, b: int, work: float) -> bool:
        """Tie two groups together that will hold `work`; False, and nothing changes, where that is too much.

        Groups that share a device anyway may always be merged.
        """
        first, second = self.root(self.of[a]), self.root(self.of[b])
        if first == second:
            return True
        tied = self.work[first] + self.work[second]
        if work > self.room or (self.size[first] + self.size[second] > 2 and tied > _GROUPS_TIED * self.room):
            return False
        self.parent[second] = first
        self.work[first] += self.work[second]
        self.size[first] += self.size[second]
        return True


def _stars(clusters: _Clusters, room: float, most: int) -> IntArray:
    """int64 [k]: for each group the group to merge it into; at most `most` merges, none above `room` work.

    Merges along edges from a level to the next only, so a merged group fills two levels. Edges rise, so one from a
    group to another leads to a group that begins no lower, and a cycle would lie among groups that begin at one level,
    where edges lead from lower ops to upper ones. A star round a lower op takes upper ones that nothing else on its
    level leads to, so no such edge leads into it; a star round an upper op takes lower ones that lead to nothing else
    on its level, so none leads out of it. No cycle can pass through either.
    """
    level = clusters.levels()
    source, target = clusters.source, clusters.target
    step = level[target] == level[source] + 1
    inputs = np.bincount(target[step], minlength=clusters.size)
    outputs = np.bincount(source[step], minlength=clusters.size)
    fits = (clusters.work[source] + clusters.work[target] <= room) | (clusters.tie[source] == clusters.tie[target])
    alike = clusters.classes[source] == clusters.classes[target]
    edges = np.flatnonzero(step & fits & alike)
    edges = edges[np.lexsort((clusters.work[source[edges]] + clusters.work[target[edges]], -clusters.weight[edges]))]
    into, work, ties = np.arange(clusters.size), clusters.work.tolist(), _Ties(clusters, room)
    role = [_FREE] * clusters.size
    for low, high in zip(source[edges].tolist(), target[edges].tolist(), strict=True):
        if most == 0:
            break
        if inputs[high] == 1 and role[high] == _FREE and role[low] in (_FREE, _SOURCE):
            centre, leaf, kind = low, high, _SOURCE
        elif outputs[low] == 1 and role[low] == _FREE and role[high] in (_FREE, _SINK):
            centre, leaf, kind = high, low, _SINK
        else:
            continue
        if ties.join(centre, leaf, work[centre] + work[leaf]):
            into[leaf], role[centre], role[leaf] = centre, kind, _LEAF
            work[centre] += work[leaf]
            most -= 1
    return into


def _siblings(clusters: _Clusters, room: float, most: int) -> IntArray:
    """As `_stars`, for groups of one level, which no path connects: each is filled up to `room` before the next."""
    level = clusters.levels()
    first_input = np.full(clusters.size, clusters.size, dtype=np.int64)
    np.minimum.at(first_input, clusters.target, clusters.source)
    tied = np.where(np.bincount(clusters.tie)[clusters.tie] > 1, clusters.tie, -1)
    order = np.lexsort((np.arange(clusters.size), first_input, tied, clusters.classes, level))
    into, work, ties = np.arange(clusters.size), clusters.work.tolist(), _Ties(clusters, room)
    centre = int(order[0])
    for group in order[1:].tolist():
        alike = level[group] == level[centre] and clusters.classes[group] == clusters.classes[centre]
        if most > 0 and alike and ties.join(centre, group, work[centre] + work[group]):
            into[group] = centre
            work[centre] += work[group]
            most -= 1
        else:
            centre = group
    return into


def _merged(clusters: _Clusters, into: IntArray) -> _Clusters:
    """The clusters after each went `into` another."""
    kept, number = np.unique(into, return_inverse=True)
    number = number.reshape(-1).astype(np.int64)
    source, target = number[clusters.source], number[clusters.target]
    between = source != target
    source, target, weight = _unique_edges(source[between], target[between], clusters.weight[between], len(kept))
    return _Clusters(
        of_op=number[clusters.of_op],
        source=source,
        target=target,
        weight=weight,
        work=sums(number, clusters.work, len(kept)),
        classes=clusters.classes[kept],
        tie=_united(clusters.tie, number),
    )


def _united(tie: IntArray, number: IntArray) -> IntArray:
    """Ties of the merged groups: the ties that meet in one group become one."""
    united, first = nx.utils.UnionFind(), dict[int, int]()
    for group, label in zip(number.tolist(), tie.tolist(), strict=True):
        united.union(first.setdefault(group, label), label)
    roots = [united[first[group]] for group in range(len(first))]
    _, result = np.unique(roots, return_inverse=True)
    return result.reshape(-1).astype(np.int64)
