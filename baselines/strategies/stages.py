"""Stages of a pipeline: stretches of a graph of about equal time, cut where little is sent.

Forward ops are cut in topological order; backward ops and updates go with the forward ops and parameters they belong
to.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baselines.strategies.stage_kernels import best_begins, follow
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import LANE
from graphs.transforms.strategy import Strategy

_SLACK = 0.1  # of the longest stage's time: so much longer it may be where less is sent
LONG = 8192  # forward ops, of which not every one is considered for a cut
_NEAR = 8  # ops to both sides
_SWEEPS = 10  # over all cuts, to even out devices with several stages


def stages_from(graph: OpGraph, first_ops: IntArray, op_s: FloatArray) -> tuple[IntArray, BoolArray]:
    """``(stage, is_apart)``, int64 and bool [n]: the stage of every op, 0 to V - 1.

    Ops of one colocation group are of one stage, that of the op of most work, by FLOPs and then bytes moved: whether op
    times are measured must not matter, since a process that runs a strategy carries it out again without them. An op
    that its group takes out of the stretch it lies in is apart: it works for another stage than its own, as a tied
    embedding does, and has no place among the blocks of a pipeline order.

    Args:
        first_ops: int64 [V - 1], the forward ops with which stages 1 to V - 1 begin, in topological order.
        op_s: float64 [n, V], as of `even_cuts`.
    """
    forward = forward_ops(graph)
    by_cost = np.column_stack([graph.flops, graph.bytes_moved])
    work = work_s(graph, by_cost if by_cost.any() else op_s[:, :1])
    mirrored = graph.forward_of >= 0
    stage = np.full(graph.n_ops, -1, dtype=np.int64)
    cuts = graph.topological_position[first_ops]
    stage[forward] = np.searchsorted(cuts, graph.topological_position[forward], side="right")
    natural = stage.copy()
    for group in np.unique(graph.colocation[graph.colocation >= 0]).tolist():
        members = np.flatnonzero(graph.colocation == group)
        first = members[graph.phase[members] == Phase.FORWARD]
        if len(first):
            stage[members] = stage[max(first.tolist(), key=lambda op: tuple(work[op]))]
    stage = _followed(graph, stage)
    is_apart = (natural >= 0) & (natural != stage) & (graph.kernels > 0)
    is_apart[mirrored] = is_apart[graph.forward_of[mirrored]]
    return stage, is_apart


def even_cuts(graph: OpGraph, op_s: FloatArray, on: Sequence[int], fill: FloatArray | None = None) -> IntArray:
    """int64 [V - 1]: the forward ops with which stages begin, so that no device has much more to do than it must.

    A forward op's time counts with that of the backward ops that mirror it. Devices may be unlike each other. Where a
    device has several stages, their sum counts.

    Args:
        op_s: float64 [n, V], seconds of each op on the devices of each of V virtual stages.
        on: device of each virtual stage.
        fill: float64 [n, V], share of the memory of each stage that each op takes; stages then are such that fit, or
            lack little where none do. For devices with one stage each.

    Raises:
        StrategyError: fewer forward ops that take time than stages.
    """
    forward, n_stages = forward_ops(graph), len(on)
    work = _of_computing(graph.kernels[forward] > 0, work_s(graph, op_s)[forward])
    done = np.vstack([np.zeros((1, n_stages)), np.cumsum(work, axis=0)])
    n_timed = np.count_nonzero(np.diff(done[:, 0]) > 0)  # a time that is lost in the sum is none to cut by
    if n_timed < n_stages:
        raise StrategyError(
            f"graph {graph.name!r} has {n_timed} forward ops that take time; a pipeline of {n_stages} stages needs at "
            "least one for each."
        )
    sent = sent_after(graph, forward)
    if len(set(on)) < n_stages:
        cuts = _evened(_cuts(done, sent), done, sent, on)
    else:
        full = None if fill is None else np.vstack([np.zeros((1, n_stages)), np.cumsum(fill[forward], axis=0)])
        places = _places(sent, n_stages)
        ends = np.concatenate([[0], places])
        cuts = ends[_cuts(done[ends], sent[places - 1], None if full is None else full[ends])]
    result: IntArray = forward[cuts]
    return result


def named_cuts(graph: OpGraph, strategy: Strategy) -> IntArray:
    """int64 [V - 1]: the ops that a strategy names as the first of their stages.

    Raises:
        StrategyError: no forward op of that name, names out of topological order, or a stage without work.
    """
    index = {name: op for op, name in enumerate(graph.op_names)}
    for name in strategy.cuts:
        if graph.phase[index[name]] != Phase.FORWARD if name in index else True:
            near = difflib.get_close_matches(name, [graph.op_names[op] for op in forward_ops(graph)], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "expected the name of an op of the forward pass."
            raise StrategyError(
                f"strategy {strategy.text!r:.200} cuts at {name!r:.80}, which is no forward op of graph "
                f"{graph.name!r}; {hint}"
            )
    found = np.array([index[name] for name in strategy.cuts], dtype=np.int64)
    position = graph.topological_position[found]
    if (np.diff(position) <= 0).any():
        later = int(np.flatnonzero(np.diff(position) <= 0)[0])
        raise StrategyError(
            f"strategy {strategy.text!r:.200} cuts at {strategy.cuts[later]!r:.80} and then at "
            f"{strategy.cuts[later + 1]!r:.80}, which comes before it; name them in the order of the forward pass."
        )
    forward = forward_ops(graph)
    computing = graph.topological_position[forward[graph.kernels[forward] > 0]]
    empty = np.flatnonzero(np.diff(np.searchsorted(computing, position), prepend=0, append=len(computing)) == 0)
    if len(empty):
        raise StrategyError(
            f"strategy {strategy.text!r:.200} leaves stage {int(empty[0]) + 1} of {strategy.virtual_stages} no op that "
            "computes; cut elsewhere."
        )
    return found


def forward_ops(graph: OpGraph) -> IntArray:
    """int64 [f]: the ops of the forward pass in topological order."""
    order = graph.topological_order
    result: IntArray = order[graph.phase[order] == Phase.FORWARD]
    return result


def work_s(graph: OpGraph, op_s: FloatArray) -> FloatArray:
    """float64 [n, V]: seconds of ops, and of those that mirror them."""
    work = op_s.copy()
    mirrored = graph.forward_of >= 0
    np.add.at(work, graph.forward_of[mirrored], op_s[mirrored])
    return work


def _of_computing(computes: BoolArray, work: FloatArray) -> FloatArray:
    """Work where every op that computes nothing has given its own, that of its backward pass, to the next that does.

    So a stage that has work has an op that computes.
    """
    if computes.all() or not computes.any():
        return work
    places = np.flatnonzero(computes)
    heir = places[np.minimum(np.searchsorted(places, np.arange(len(work))), len(places) - 1)]
    found = np.zeros_like(work)
    np.add.at(found, heir, work)
    return found


def sent_after(graph: OpGraph, forward: IntArray) -> FloatArray:
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


def _places(sent: FloatArray, n_stages: int) -> IntArray:
    """int64: places where stages may end, all of them but in a long graph; the last one is its end.

    A long graph is cut only where no place nearby has less to send: that of the least sent is among them, as is one for
    each layer.
    """
    every = np.arange(1, len(sent) + 1)
    if len(sent) <= LONG:
        return every
    padded = np.pad(sent, _NEAR, constant_values=np.inf)
    least = np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEAR + 1).min(axis=1)
    chosen = every[(sent == least) | (every == len(sent))]
    return chosen if len(chosen) >= _NEAR * n_stages else every


def _cuts(done: FloatArray, sent: FloatArray, full: FloatArray | None = None) -> IntArray:
    """int64 [V - 1]: place of the first op after each cut. O(V f w) for f ops, w of which a stage may have.

    No stage takes much longer than the longest must; within that least is sent, and then stages are as even as can be.

    Args:
        done: float64 [f + 1, V], seconds of all ops before each place on the devices of each stage.
        sent: float64 [f], bytes sent where it is cut after each op.
        full: float64 [f + 1, V], share of the memory of each stage that all ops before each place take.
    """
    if full is not None:  # where nothing fits, the fullest stage lacks about as little as it must
        full = full / max(1.0, _shortest(full) * (1 + _SLACK))
    limit_s, all_s = _shortest(done), float(done[-1].max())
    while limit_s < all_s * (
        1 + _SLACK
    ):  # stages that must have an op each, and fit, may take longer than the shortest
        limit_s *= 1 + _SLACK
        cuts = _cuts_within(done, sent, limit_s, full)
        if cuts is not None:
            return cuts
    assert full is not None, "with an op for each stage there are cuts"
    return _cuts(done, sent, full / 2)  # every stage must have an op, also where the others could hold them all


def _cuts_within(done: FloatArray, sent: FloatArray, limit_s: float, full: FloatArray | None) -> IntArray | None:
    """`_cuts` where no stage takes longer than a limit or more than its memory; None where there are none."""
    f, n_stages = len(sent), done.shape[1]
    cost = np.full(f + 1, np.inf)  # bytes, and less than one for the squares of times
    cost[0] = 0.0
    came_from = np.zeros((n_stages, f + 1), dtype=np.int64)
    for k in range(n_stages):
        own = np.ascontiguousarray(done[:, k])
        unit_s = max(float(own[-1]), 1e-300)
        # Where a stage may begin that ends before op j: no earlier than low[j], and before high[j].
        low, high = np.searchsorted(own, own - limit_s), np.searchsorted(own, own)
        if full is not None:
            low = np.maximum(low, np.searchsorted(full[:, k], full[:, k] - 1.0))
        here = np.full(f + 1, np.inf)
        is_last = k + 1 == n_stages
        after = np.zeros(f + 1) if is_last else np.concatenate([[0.0], sent]).astype(np.float64)
        best_begins(cost, own, unit_s, low, high, after, f if is_last else 0, here, came_from[k])
        cost = here
    if not np.isfinite(cost[f]):
        return None
    cuts, at = [], f
    for k in reversed(range(1, n_stages)):
        at = int(came_from[k, at])
        cuts.append(at)
    return np.array(cuts[::-1], dtype=np.int64)


def _shortest(done: FloatArray) -> float:
    """The time of the longest stage where that is least: bisection over what a stage may take."""
    n_stages = done.shape[1]
    low = float(max(np.diff(done, axis=0).min(axis=1).max(), done[-1].min() / n_stages))
    high = float(done[-1].max())
    columns = np.ascontiguousarray(done.T)
    for _ in range(60):
        middle, at = (low + high) / 2, 0
        for own in columns:
            at = int(np.searchsorted(own, own[at] + middle, side="right")) - 1
        low, high = (low, middle) if at >= len(done) - 1 else (middle, high)
    return high


def _evened(cuts: IntArray, done: FloatArray, sent: FloatArray, on: Sequence[int]) -> IntArray:
    """Move one cut after the other, so that the devices on both sides have as much to do; the best one seen.

    Within a slack least is sent. Both sides of a cut may be on one device, which then has both anyway.
    """
    ends = np.concatenate([[0], cuts, [len(sent)]])
    best, seen = ends.copy(), {ends.tobytes()}
    for _ in range(_SWEEPS):
        for k in range(1, len(ends) - 1):
            load_s = _loads(ends, done, on)
            here, after, from_, to = on[k - 1], on[k], int(ends[k - 1]), int(ends[k + 1])
            if here == after:
                continue
            places = np.arange(from_ + 1, to)
            first_s = done[places, k - 1] - done[from_, k - 1]
            second_s = done[to, k] - done[places, k]
            own = places == ends[k]
            longest = np.maximum(load_s[here] - first_s[own] + first_s, load_s[after] - second_s[own] + second_s)
            longest[(first_s <= 0) | (second_s <= 0)] = np.inf  # no stage is left without work
            close = np.flatnonzero(longest <= longest.min() * (1 + _SLACK))
            ends[k] = places[close[np.lexsort((longest[close], sent[places[close] - 1]))[0]]]
        if _loads(ends, done, on).max() < _loads(best, done, on).max():
            best = ends.copy()
        if ends.tobytes() in seen:
            break
        seen.add(ends.tobytes())
    return best[1:-1]


def _loads(ends: IntArray, done: FloatArray, on: Sequence[int]) -> FloatArray:
    """float64: seconds of each device, given where its stages begin and end."""
    stages = np.arange(len(on))
    return np.bincount(on, done[ends[1:], stages] - done[ends[:-1], stages]).astype(np.float64)


def _followed(graph: OpGraph, stage: IntArray) -> IntArray:
    """Ops without a stage take that of their forward op, else of what they read, else of what reads them."""
    known = stage.copy()
    mirrored = (known < 0) & (graph.forward_of >= 0)
    known[mirrored] = known[graph.forward_of[mirrored]]
    ptr, tensors = graph.inputs
    reads, producers = np.asarray(ptr), graph.tensor_producer[tensors]
    is_data = (graph.kernels == 0) & (np.diff(reads) == 0)  # is there before the step
    readers = graph.output_ptr, graph.consumer_ptr, graph.consumers
    follow(known, graph.topological_order, reads, producers, *readers, is_data)
    return known


class Lookups(NamedTuple):
    """What an earlier stage reads of tables of later ones, int64 [k]; so it is with an embedding tied to the head.

    Attributes:
        table: groups of colocation.
        maker, reader: ops, of which one looks up, or passes on, what the other one reads.
    """

    table: IntArray
    maker: IntArray
    reader: IntArray

    @staticmethod
    def of(graph: OpGraph, stage: IntArray, part: IntArray | None = None, axes: int = 0) -> Lookups:
        """Those of a graph in virtual stages, int64 [n].

        Args:
            part: int64 [n], place of each op in a mesh.
            axes: of the mesh, along which what is looked up may be exchanged.
        """
        lane, (producer, consumer, _) = graph.is_pinned_to(LANE), graph.edge_list
        table = np.where(graph.phase == Phase.FORWARD, graph.colocation, -1)  # of each op, or of what it passes on
        own = True if part is None else part[producer] == part[consumer]
        for _ in range(axes):
            passes = lane[consumer] & own & (table[producer] >= 0)
            table[consumer[passes]] = table[producer[passes]]
        reads = (table[producer] >= 0) & (stage[consumer] < stage[producer]) & ~lane[consumer]
        return Lookups(table[producer[reads]], producer[reads], consumer[reads])

    def elsewhere(self, rank: IntArray) -> tuple[IntArray, IntArray]:
        """``(tables, ops)``: tables that are read on other devices, int64 [n], and there the first op that does.

        What is looked up comes from the table's own stage; but every framework keeps a copy of the table where it is
        read, with its gradient and its states.
        """
        is_away = rank[self.maker] != rank[self.reader]
        tables, first = np.unique(self.table[is_away], return_index=True)
        return tables, self.reader[is_away][first]
