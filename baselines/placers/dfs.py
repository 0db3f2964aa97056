"""DFS: depth first from the most important sources, weighing traffic against execution time."""

from __future__ import annotations

import numpy as np

from baselines.paths import importance
from baselines.placers.mite import place_by_product
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray, OpGraph


def dfs(problem: Problem, seed: int) -> Plan:
    """Ops depth first, each unit to the feasible device with the smallest Traffic * Execution of `mite`.

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    Sources and the successors of an op are visited by falling importance, equals by op number. A unit is placed
    when its first op is visited, colocation groups before free ops. O(n log n + e + n D + e D + m D^2).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    visited = problem.unit_of[_depth_first(problem.graph, importance(problem))]
    _, first = np.unique(visited, return_index=True)
    order = units.components_first(visited[np.sort(first)])
    return place_by_product(units, order, np.zeros(units.n_units), False)


def _depth_first(graph: OpGraph, importance: FloatArray) -> IntArray:
    """int64 [n]: ops in preorder."""
    producer, consumer, _ = graph.edge_list
    by_rank = np.lexsort((-consumer, importance[consumer], producer))  # a stack: the most important is put on last
    successors = consumer[by_rank].tolist()
    ptr = np.searchsorted(producer[by_rank], np.arange(graph.n_ops + 1)).tolist()
    sources = np.flatnonzero(np.bincount(consumer, minlength=graph.n_ops) == 0)
    stack = sources[np.lexsort((-sources, importance[sources]))].tolist()
    seen = [False] * graph.n_ops
    result = []
    while stack:
        op = stack.pop()
        if not seen[op]:
            seen[op] = True
            result.append(op)
            stack.extend(successors[ptr[op] : ptr[op + 1]])
    return np.array(result, dtype=np.int64)
