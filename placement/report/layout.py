"""Positions for drawing a graph in layers, left to right, with few crossings.

The method is Sugiyama, Tagawa and Toda 1981 ("Methods for visual understanding of hierarchical system structures"):
levels by longest path, then sweeps that order every level by the mean position of its neighbours. Positions within a
level are the least-squares fit to those means that keeps neighbours one unit apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.opgraph import FloatArray, IntArray, OpGraph

MAX_NODES = 6000  # a drawing with more dots than this is slower to draw and no easier to read
SWEEPS = 8


@dataclass(frozen=True, eq=False)
class Drawing:
    """Places to draw a graph (v nodes, w lines).

    Attributes:
        node_of: int64 [n], the node that stands for each op; several ops share a node in a large graph.
        x, y: float64 [v]; x is the level, y is centred on 0 with nodes of one level at least 1 apart.
        source, target: int64 [w], nodes; no line twice, none from a node to itself.
    """

    node_of: IntArray
    x: FloatArray
    y: FloatArray
    source: IntArray
    target: IntArray


def layered_layout(graph: OpGraph, max_nodes: int = MAX_NODES) -> Drawing:
    """Place the ops of a graph, or, above ``max_nodes``, groups of ops near in level and alike in module."""
    level = levels(graph)
    node_of = np.arange(graph.n_ops)
    if graph.n_ops > max_nodes:
        level, node_of = _merge(graph, level, max_nodes)
    producer, consumer, _ = graph.edge_list
    lines = np.unique(np.stack([node_of[producer], node_of[consumer]], axis=1), axis=0)
    lines = lines[lines[:, 0] != lines[:, 1]]
    x = np.zeros(int(node_of.max()) + 1)
    x[node_of] = level
    y = _rows(x.astype(np.int64), lines[:, 0], lines[:, 1])
    return Drawing(node_of, x, y, lines[:, 0], lines[:, 1])


def levels(graph: OpGraph) -> IntArray:
    """int64 [n]: edges on the longest path to each op; an op without inputs sits just before its first consumer."""
    producer, consumer, _ = graph.edge_list
    before: list[list[int]] = [[] for _ in range(graph.n_ops)]
    after: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for p, c in zip(producer.tolist(), consumer.tolist(), strict=True):
        before[c].append(p)
        after[p].append(c)
    result = [0] * graph.n_ops
    order = graph.topological_order.tolist()
    for i in order:
        result[i] = 1 + max((result[p] for p in before[i]), default=-1)
    for i in order:
        if not before[i] and after[i]:
            result[i] = min(result[c] for c in after[i]) - 1
    return np.array(result, dtype=np.int64)


def _merge(graph: OpGraph, level: IntArray, max_nodes: int) -> tuple[IntArray, IntArray]:
    """Bands of levels x modules, cut at the greatest module depth that leaves few enough nodes."""
    paths = [module.split(".") for module in graph.modules]
    for bands in (max_nodes // 4, max_nodes // 16, max_nodes // 64):
        band = level * bands // (int(level.max()) + 1)
        for depth in range(max(map(len, paths)), -1, -1):
            names = [".".join(path[:depth]) for path in paths]
            keys = {key: i for i, key in enumerate(dict.fromkeys(zip(band.tolist(), names, strict=True)))}
            if len(keys) <= max_nodes:
                node_of = [keys[key] for key in zip(band.tolist(), names, strict=True)]
                return band, np.array(node_of, dtype=np.int64)
    raise AssertionError("at depth 0 there is at most one node a band")


def _rows(level: IntArray, source: IntArray, target: IntArray) -> FloatArray:
    n = len(level)
    before: list[list[int]] = [[] for _ in range(n)]
    after: list[list[int]] = [[] for _ in range(n)]
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        after[s].append(t)
        before[t].append(s)
    columns: list[list[int]] = [[] for _ in range(int(level.max()) + 1)]
    for i, place in enumerate(level.tolist()):
        columns[place].append(i)
    y = [0.0] * n
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        near = before if forward else after
        if sweep == SWEEPS - 1:  # the last sweep straightens both sides at once
            near = [b + a for b, a in zip(before, after, strict=True)]
        for column in columns if forward else reversed(columns):
            wanted = {i: sum(y[j] for j in near[i]) / len(near[i]) if near[i] else y[i] for i in column}
            column.sort(key=lambda i: (wanted[i], i))
            for i, place in zip(column, _spread([wanted[i] for i in column]), strict=True):
                y[i] = place
    return np.array(y) - (max(y) + min(y)) / 2


def _spread(wanted: list[float]) -> list[float]:
    """Places at least 1 apart that are nearest to the wanted, increasing ones: isotonic regression by pooling."""
    pools: list[tuple[float, int]] = []  # (sum, count) of wanted[k] - k
    for k, value in enumerate(wanted):
        total, count = value - k, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            last = pools.pop()
            total, count = total + last[0], count + last[1]
        pools.append((total, count))
    places = [total / count for total, count in pools for _ in range(count)]
    return [place + k for k, place in enumerate(places)]
