"""Stages whose batch is not cut in time: one has nothing to do while another works, but near the borders between them.

Stages are stretches of a line, the forward ops in topological order, and each does the backward ops that mirror its
own. Take an op of a path near each border, and its gradient on the path. All that comes after the one and before the
next is done between them, by one device; so is, on the way back, all between their gradients. The step takes as long as
all of this one after the other. Left out are ops that neither wait for the op near the border nor come before it:
branches beside it, and gradients of weights, which no other gradient waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.op_kinds import shape_readers
from graphs.opgraph import OpGraph

_NEAR = 200  # ops that borders may be near to


@dataclass(frozen=True, eq=False)
class Serial:
    """The line of a graph (n ops), and a path through it.

    Attributes:
        graph: which.
        line: forward ops that stay in the stage where they lie, in topological order.
        mirror, mirrored: pairs of a backward op and the op of the line that it certainly goes with.
        path: ops each of which waits for the one before, forward and backward ones.
    """

    graph: OpGraph
    line: IntArray
    mirror: IntArray
    mirrored: IntArray
    path: IntArray

    def least_s(self, op_s: FloatArray, stretches: int) -> float:
        """Seconds of stages that are so many stretches of the line, where ops take float64 [n] at a place."""
        near, is_lost, is_loose = self._near
        if not len(near):
            return 0.0
        position = self._position
        each_s = op_s[self.line]
        np.add.at(each_s, position[self.mirrored], op_s[self.mirror])
        done_s = np.concatenate([[0.0], np.cumsum(each_s)])
        lost_s = is_lost @ np.concatenate([op_s[self.line], op_s[self.mirror]])
        loose_s = is_loose @ op_s[self.mirror]
        # To a border between two of these ops belongs one before or after it, and what lies between is lost as well.
        after = np.minimum.accumulate((lost_s + done_s[near])[::-1])[::-1] - np.insert(done_s[near[:-1] + 1], 0, 0.0)
        before = np.minimum.accumulate(lost_s - done_s[near + 1]) + np.append(done_s[near[1:]], done_s[-1])
        between = np.minimum(np.append(after, np.inf), np.insert(before, 0, np.inf))
        return float(done_s[-1] - loose_s.max() - np.sort(between)[::-1][: stretches - 1].sum())

    @cached_property
    def _position(self) -> IntArray:
        result = np.full(self.graph.n_ops, -1)
        result[self.line] = np.arange(len(self.line))
        return result

    @cached_property
    def _near(self) -> tuple[IntArray, BoolArray, BoolArray]:
        """``(positions in the line, int64 [r], what is left out at each)``: ops of the path whose gradients are on it.

        The latter once of the line's ops and then of those that mirror them, and once of mirrors for which nothing of
        the path waits: those that one of the ops leaves out, the ops before it do as well.
        """
        at = np.full(self.graph.n_ops, -1)
        at[self.path] = np.arange(len(self.path))
        pairs = np.stack([at[self.mirrored], at[self.mirror]], axis=1)
        pairs = pairs[(pairs >= 0).all(axis=1) & (pairs[:, 0] < pairs[:, 1])]
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        pairs = pairs[pairs[:, 1] < np.concatenate([[len(self.path)], np.minimum.accumulate(pairs[:, 1])[:-1]])]
        pairs = pairs[np.unique(np.linspace(0, len(pairs) - 1, min(len(pairs), _NEAR)).astype(np.int64))]
        if not len(pairs):
            return pairs[:, 0], *np.zeros((2, 0, 0), dtype=np.bool_)
        op, gradient = pairs[:, :1], pairs[:, 1:]
        since, until = beside(self.graph, self.path)
        u, b = self.line, self.mirror
        here, there = self._position[self.path[op]], self._position[self.mirrored]
        is_between = (since[b] >= op) & (until[b] <= gradient)
        kept_there = np.where(there > here, is_between, (there < here) & (since[b] >= gradient)) | (at[b] == gradient)
        kept_here = (until[u] <= op) | ((since[u] >= op) & (until[u] <= gradient))
        is_loose = ~kept_there & (until[b] == len(self.path)) & (there >= here)
        return here[:, 0], ~np.concatenate([kept_here, kept_there | is_loose], axis=1), is_loose


def beside(graph: OpGraph, path: IntArray) -> tuple[IntArray, IntArray]:
    """``(since, until)``, int64 [n] each: places in a path of the last op that each op waits for, or is, and of the
    first one that waits for it. -1 and the path's length where there is none. O(n + e).
    """
    end = len(path)
    at = np.full(graph.n_ops, -1)
    at[path] = np.arange(end)
    since, until = at.tolist(), np.where(at >= 0, at, end).tolist()
    producer, consumer, _ = graph.edge_list
    waits = ~shape_readers(graph.kinds)[consumer]
    producer, consumer = producer[waits], consumer[waits]
    order = np.argsort(graph.topological_position[producer], kind="stable")
    for u, v in zip(producer[order].tolist(), consumer[order].tolist(), strict=True):
        since[v] = max(since[v], since[u])
    order = np.argsort(-graph.topological_position[consumer], kind="stable")
    for u, v in zip(producer[order].tolist(), consumer[order].tolist(), strict=True):
        until[u] = min(until[u], until[v])
    return np.array(since, dtype=np.int64), np.array(until, dtype=np.int64)
