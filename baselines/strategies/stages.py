"""Stages of a pipeline: stretches of a graph of about equal time, cut where little is sent.

Forward ops are cut in topological order; backward ops and updates go with the forward ops and parameters they belong
to.
"""

from __future__ import annotations

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase

_SLACK = 0.1  # of the longest stage's time: so much longer it may be where less is sent


def balanced_stages(graph: OpGraph, op_s: FloatArray, n_stages: int) -> tuple[IntArray, BoolArray]:
    """``(stage, is_apart)``, int64 and bool [n]: the stage of every op, 0 to n_stages - 1.

    Ops of one colocation group are of one stage, that of the op of most work. An op that its group takes out of the
    stretch it lies in is apart: it works for another stage than its own, as a tied embedding does, and has no place
    among the blocks of a pipeline order. A forward op's time counts with that of the backward ops that mirror it.

    Args:
        op_s: float64 [n], seconds of each op, on whatever device.

    Raises:
        StrategyError: fewer forward ops that take time than stages.
    """
    forward = graph.topological_order[graph.phase[graph.topological_order] == Phase.FORWARD]
    work = op_s.copy()
    mirrored = graph.forward_of >= 0
    np.add.at(work, graph.forward_of[mirrored], op_s[mirrored])
    if np.count_nonzero(work[forward] > 0) < n_stages:
        raise StrategyError(
            f"graph {graph.name!r} has {np.count_nonzero(work[forward] > 0)} forward ops that take time; a pipeline of "
            f"{n_stages} stages needs at least one for each."
        )
    cuts = _cuts(work[forward], _sent_after(graph, forward), n_stages)
    stage = np.full(graph.n_ops, -1, dtype=np.int64)
    stage[forward] = np.searchsorted(cuts, np.arange(len(forward)), side="right")
    natural = stage.copy()
    for group in np.unique(graph.colocation[graph.colocation >= 0]).tolist():
        members = np.flatnonzero(graph.colocation == group)
        first = members[graph.phase[members] == Phase.FORWARD]
        if len(first):
            stage[members] = stage[first[np.argmax(work[first])]]
    stage = _followed(graph, stage)
    is_apart = (natural >= 0) & (natural != stage) & (graph.kernels > 0)
    is_apart[mirrored] = is_apart[graph.forward_of[mirrored]]
    return stage, is_apart


def _sent_after(graph: OpGraph, forward: IntArray) -> FloatArray:
    """float64 [f]: bytes of forward tensors that are still to be read after each place of the forward pass."""
    position = np.full(graph.n_ops, -1, dtype=np.int64)
    position[forward] = np.arange(len(forward))
    producer, consumer, tensor = graph.edge_list
    inside = (position[producer] >= 0) & (position[consumer] >= 0) & (graph.kernels[producer] > 0)
    last = np.zeros(graph.n_tensors, dtype=np.int64)
    np.maximum.at(last, tensor[inside], position[consumer[inside]])
    change = np.zeros(len(forward) + 1)
    read = np.unique(tensor[inside])
    np.add.at(change, position[graph.tensor_producer[read]], graph.tensor_bytes[read])
    np.add.at(change, last[read], -graph.tensor_bytes[read])
    return np.cumsum(change)[:-1]


def _cuts(work: FloatArray, sent: FloatArray, n_stages: int) -> IntArray:
    """int64 [n_stages - 1]: place of the first op after each cut. O(S f w) for f ops, w of which a stage may have.

    No stage takes much longer than the longest must; within that least is sent, and then stages are as even as can be.
    """
    done = np.concatenate([[0.0], np.cumsum(work)])
    limit_s = _shortest(done, n_stages) * (1 + _SLACK)
    f, unit_s = len(work), max(float(done[-1]), 1e-300)
    # Where a stage may begin that ends before op j: no earlier than low[j], and before high[j].
    low, high = np.searchsorted(done, done - limit_s), np.searchsorted(done, done)
    cost = np.full(f + 1, np.inf)  # bytes, and less than one for the squares of times
    cost[0] = 0.0
    came_from = np.zeros((n_stages, f + 1), dtype=np.int64)
    for k in range(n_stages):
        here = np.full(f + 1, np.inf)
        for j in np.flatnonzero(low < high).tolist() if k + 1 < n_stages else [f]:
            begins = slice(low[j], high[j])
            options = cost[begins] + ((done[j] - done[begins]) / unit_s) ** 2 / 2
            best = int(options.argmin())
            came_from[k, j] = low[j] + best
            here[j] = options[best] + (sent[j - 1] if k + 1 < n_stages else 0.0)
        cost = here
    cuts, at = [], f
    for k in reversed(range(1, n_stages)):
        at = int(came_from[k, at])
        cuts.append(at)
    return np.array(cuts[::-1], dtype=np.int64)


def _shortest(done: FloatArray, n_stages: int) -> float:
    """The time of the longest stage where that is least: bisection over what a stage may take."""
    low, high = float(max(np.diff(done).max(), done[-1] / n_stages)), float(done[-1])
    for _ in range(60):
        middle, at = (low + high) / 2, 0
        for _ in range(n_stages):
            at = int(np.searchsorted(done, done[at] + middle, side="right")) - 1
        low, high = (low, middle) if at >= len(done) - 1 else (middle, high)
    return high


def _followed(graph: OpGraph, stage: IntArray) -> IntArray:
    """Ops without a stage take that of their forward op, else of what they read, else of what reads them."""
    known = stage.copy()
    mirrored = (known < 0) & (graph.forward_of >= 0)
    known[mirrored] = known[graph.forward_of[mirrored]]
    producer, consumer, _ = graph.edge_list
    before: list[list[int]] = [[] for _ in range(graph.n_ops)]
    after: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for p, c in zip(producer.tolist(), consumer.tolist(), strict=True):
        before[c].append(p)
        after[p].append(c)
    order = graph.topological_order.tolist()
    for op in order:
        if known[op] < 0:
            known[op] = max((int(known[p]) for p in before[op]), default=-1)
    for op in reversed(order):
        # Data that is there before the step lies where it is read first.
        if known[op] < 0 or (graph.kernels[op] == 0 and not before[op]):
            known[op] = min((int(known[c]) for c in after[op] if known[c] >= 0), default=max(int(known[op]), 0))
    return known
