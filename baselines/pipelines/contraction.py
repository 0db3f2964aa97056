"""`Quotient`: a graph contracted to the parts that a contiguous split keeps together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
from networkx.utils import UnionFind

from env.units import Units
from graphs.arrays import pointers
from graphs.opgraph import IntArray, Phase

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem


@dataclass(frozen=True, eq=False)
class Quotient:
    """A graph contracted to N parts.

    Attributes:
        of_op: int64 [n], part of each op.
        edges: int64 [2, x], which part must precede which.
        notes: what a split of the parts does not see, for people.
    """

    of_op: IntArray
    edges: IntArray
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return int(self.of_op.max()) + 1

    def merged(self, label: IntArray) -> Quotient:
        """Parts of one label, int64 [N], 0 to some number without gaps, become one."""
        edges = label[self.edges]
        edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
        return Quotient(label[self.of_op], edges, self.notes)


def contract(problem: Problem) -> Quotient:
    """Parts that every contiguous split of a problem keeps together, as a graph without cycles.

    After the code published with Tarnawski et al., NeurIPS 2020 (github.com/msr-fiddle/dnn-partitioning, MIT licence):
    contiguity is a matter of the forward ops, since a pipeline runs backward ops on the devices of their forward ops
    in the opposite order. A part is a colocation group, with the backward and update ops that mirror its forward ops.
    Forward edges between parts say what precedes what; edges between backward ops say it in reverse where one end
    mirrors no forward op.

    Where that code merges all parts on a cycle of such edges, here the edges of a cycle that lead back to a part with
    an earlier first op are left out: a first and a last layer that share their weights would else keep the whole
    network on one device. Such a group is the only thing then that is not contiguous. O(n + e).
    """
    graph = problem.graph
    part = _with_mirrors(problem)
    producer, consumer, _ = graph.edge_list
    forward = graph.phase == Phase.FORWARD
    leads = np.zeros(int(part.max()) + 1, dtype=np.bool_)  # parts with a forward op
    leads[part[forward]] = True
    ahead = forward[producer] & forward[consumer]
    mirrored = ~forward[producer] & ~forward[consumer] & ~(leads[part[producer]] & leads[part[consumer]])
    edges = np.concatenate(
        [part[[producer[ahead], consumer[ahead]]], part[[consumer[mirrored], producer[mirrored]]]], axis=1
    )
    edges = edges[:, edges[0] != edges[1]]
    cycle = np.arange(len(leads))
    for parts in nx.strongly_connected_components(nx.DiGraph(edges.T.tolist())):
        cycle[list(parts)] = min(parts)
    rank = _ranks(problem, part)
    leads_back = (cycle[edges[0]] == cycle[edges[1]]) & (rank[edges[0]] > rank[edges[1]])
    notes = ("ops that must share a device lie on both sides of others",) if leads_back.any() else ()
    return Quotient(part, edges[:, ~leads_back], notes).merged(np.arange(len(leads)))


def _ranks(problem: Problem, part: IntArray) -> IntArray:
    """int64 [N]: parts by their first forward op, those without one behind, by their last op in reverse."""
    graph = problem.graph
    position = graph.topological_position
    late = graph.phase != Phase.FORWARD
    key = np.full(int(part.max()) + 1, 2 * graph.n_ops, dtype=np.int64)
    np.minimum.at(key, part, np.where(late, 2 * graph.n_ops - 1 - position, position))
    return np.argsort(np.argsort(key)).astype(np.int64)


def _with_mirrors(problem: Problem) -> IntArray:
    """int64 [n]: part of each op: units, joined with those they mirror wherever some device suits both."""
    units, graph = Units.of(problem), problem.graph
    joined = UnionFind(range(units.n_units))
    allowed = units.allowed.copy()
    mirrors = np.flatnonzero((graph.forward_of >= 0) & (graph.phase != Phase.FORWARD))
    unit_of = problem.unit_of
    for op, mirrored in zip(unit_of[mirrors].tolist(), unit_of[graph.forward_of[mirrors]].tolist(), strict=True):
        a, b = joined[op], joined[mirrored]
        common = allowed[a] & allowed[b]
        if a != b and common.any():
            joined.union(a, b)
            allowed[joined[a]] = common
    number: dict[int, int] = {}
    part = np.array([number.setdefault(joined[unit], len(number)) for unit in range(units.n_units)], dtype=np.int64)
    return part[unit_of]


def without_idle_ends(problem: Problem, quotient: Quotient, memory_binds: bool) -> Quotient:
    """Give every part that takes no time and touches one other part only to that part, again and again.

    No split is lost that is better than all others: together with its neighbour such a part costs nothing. It must
    be allowed wherever the neighbour is and, if memory binds, bring no bytes that the neighbour does not hold anyway.
    """
    while True:
        label = _idle_ends(problem, quotient, memory_binds)
        if (label == np.arange(quotient.count)).all():
            return quotient
        _, dense = np.unique(label, return_inverse=True)
        quotient = quotient.merged(dense.reshape(-1).astype(np.int64))


def _idle_ends(problem: Problem, quotient: Quotient, memory_binds: bool) -> IntArray:
    """int64 [N]: the part each part joins, itself if none; joined parts take none in themselves."""
    graph, part, count = problem.graph, quotient.of_op, quotient.count
    producer, consumer, tensor = graph.edge_list
    a, b = part[producer], part[consumer]
    pairs = np.unique(np.stack([np.concatenate([a, b]), np.concatenate([b, a])])[:, np.tile(a != b, 2)], axis=1)
    degree = np.bincount(pairs[0], minlength=count)
    neighbour = np.full(count, -1, dtype=np.int64)
    neighbour[pairs[0]] = pairs[1]
    work_s = np.bincount(part, problem.op_s.sum(axis=1), count)
    own = graph.kept_bytes + graph.workspace_bytes
    own = np.bincount(part, own, count) + np.bincount(part[graph.tensor_producer], graph.tensor_memory_bytes, count)
    sent = np.unique(tensor[a != b])
    own -= np.bincount(part[graph.tensor_producer[sent]], graph.tensor_memory_bytes[sent], count)
    allowed = allowed_parts(problem, quotient)
    idle = (work_s == 0) & (degree <= 1) & ((own == 0) | (not memory_binds))
    label = np.arange(count)
    taken = np.zeros(count, dtype=np.bool_)
    busiest = int(work_s.argmax())  # takes what touches nothing
    for p in np.flatnonzero(idle).tolist():
        q = int(neighbour[p]) if degree[p] else busiest
        if p != q and not taken[p] and label[q] == q and not (allowed[q] & ~allowed[p]).any():
            label[p] = q
            taken[q] = True
    return label


def allowed_parts(problem: Problem, quotient: Quotient) -> BoolArray:
    """bool [N, D]: where all ops of a part may run."""
    refused = np.zeros((quotient.count, problem.cluster.n_devices), dtype=np.int64)
    np.add.at(refused, quotient.of_op, ~problem.allowed)
    result: BoolArray = refused == 0
    return result


def linear_order(problem: Problem, quotient: Quotient, depth_first: bool) -> IntArray:
    """int64 [N]: a linear order of the parts: depth first, so that a branch is finished before the next begins.

    Otherwise the part whose first op comes first in the graph is next. Among equals the same decides.
    """
    missing = np.bincount(quotient.edges[1], minlength=quotient.count).tolist()
    ptr, after = (array.tolist() for array in rows(quotient.edges[0], quotient.edges[1], quotient.count))
    ranks = _ranks(problem, quotient.of_op)
    key, part_of = ranks.tolist(), np.argsort(ranks).tolist()
    ready = sorted((key[p] for p in range(quotient.count) if not missing[p]), reverse=depth_first)
    result: list[int] = []
    while ready:  # a stack, or a heap
        p = part_of[ready.pop() if depth_first else heapq.heappop(ready)]
        result.append(p)
        freed = []
        for q in after[ptr[p] : ptr[p + 1]]:
            missing[q] -= 1
            if not missing[q]:
                freed.append(key[q])
        if depth_first:
            ready += sorted(freed, reverse=True)
        else:
            for k in freed:
                heapq.heappush(ready, k)
    return np.array(result, dtype=np.int64)


def renumbered(quotient: Quotient, order: IntArray) -> Quotient:
    """The same parts, numbered by their place in an order, int64 [N]."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return quotient.merged(rank)


def segments(problem: Problem, quotient: Quotient, count: int) -> Quotient:
    """At most `count` runs of consecutive parts of an ordered quotient, of much the same work and size."""
    work_s = np.bincount(quotient.of_op, problem.mean_op_s, quotient.count)
    share = work_s / max(float(work_s.sum()), 1e-300) + 1.0 / quotient.count
    middle = (np.cumsum(share) - share / 2) / share.sum()
    _, label = np.unique((middle * count).astype(np.int64), return_inverse=True)
    note = f"cuts were looked for between {label.max() + 1} runs of ops only"
    coarse = quotient.merged(label.reshape(-1).astype(np.int64))
    return replace(coarse, notes=(*coarse.notes, note))


def rows(row: IntArray, value: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Values by row, as ``(ptr [count + 1], values)``; increasing within a row."""
    order = np.lexsort((value, row))
    return pointers(row, count), value[order].astype(np.int64)
