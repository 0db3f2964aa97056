"""`sequenced`: a chunked graph whose pipeline stages run in given sequences of blocks, in any simulator.

A block is what one stage does for one micro-batch in one go: its forward pass (F), the backward pass for its inputs
(B), the backward pass for its weights (W), or both of these (BW). Named orders, such as 1F1B, are sequences of blocks.
The rules of a score start whatever is ready (docs/score.md), and an order may want a device to wait instead: a barrier
between two blocks, an op that does nothing and moves nothing, makes it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, frozen
from graphs.errors import GraphError, MismatchError
from graphs.opgraph import OpGraph
from graphs.records import LANE, Phase
from graphs.transforms.derived import Derived, columns_with, rewired
from graphs.transforms.splitting.exchange import ACCUMULATE
from graphs.transforms.splitting.op_states import from_inputs

BARRIER = "barrier"  # kind of an op that only waits
FORWARD, BACKWARD, WEIGHTS, WHOLE_BACKWARD = "F", "B", "W", "BW"
_KINDS = {FORWARD: (0,), BACKWARD: (1,), WEIGHTS: (2,), WHOLE_BACKWARD: (1, 2)}
_LETTERS = (FORWARD, BACKWARD, WEIGHTS)


class StageBlock(NamedTuple):
    """Work of one stage for one micro-batch in one go.

    Attributes:
        kind: ``"F"``, ``"B"``, ``"W"``, or ``"BW"``: both backward passes.
        stage: number of the virtual stage.
        micro_batch: number of the micro-batch.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, eq=False)
class BlockMap:
    """The block of every op of a chunked graph (n ops).

    Attributes:
        kind: int64 [n]: 0 forward, 1 backward for inputs, 2 backward for weights; -1 for an op of the whole step, or
            one outside the pipeline: whose forward pass an earlier stage waits for, or which reads what other
            micro-batches make, or makes for them what the arguments of the step say.
        stage: int64 [n], virtual stage; -1 outside all blocks.
        micro_batch: int64 [n]; -1 for an op of the whole step.
        in_lane: bool [n], whether it is communication, which runs beside the blocks.
        waited_by: int64 [n], of an op outside the pipeline the earlier stage whose forward pass waits for it, else -1.
    """

    kind: IntArray
    stage: IntArray
    micro_batch: IntArray
    in_lane: BoolArray
    waited_by: IntArray


def block_map(derived: Derived, stage: IntArray) -> BlockMap:
    """The block of every op. O(n + e log e).

    An op is in the backward pass for weights if nothing of another stage waits for it, nor any op that mirrors another
    op of the forward pass: what is left to wait for it are gradients of parameters.

    Args:
        derived: a graph that was chunked, or not: then there is one micro-batch, if any.
        stage: int64 [source.n_ops], virtual stage of every op of the source; -1 for an op outside all blocks.

    Raises:
        MismatchError: not one whole stage number, -1 or more, for each op of the source.
    """
    graph, source = derived.graph, derived.source
    stages = stage_numbers(source, stage)
    origin, of_step = derived.origin, derived.micro_batch < 0
    backward = graph.phase != Phase.FORWARD
    ancestry = _Ancestry.of(derived)
    kind = np.where(backward, np.where(ancestry.feeds_others(stages), 1, 2), 0)
    down, up = ancestry.earliest(stages)
    own = np.where(stages[origin] < 0, source.n_ops, stages[origin])
    none = of_step | (stages[origin] < 0) | (np.minimum(down, up) < own) | _is_across(derived)
    waited_by = np.where((down < own) & ~of_step, down, -1)
    return BlockMap(np.where(none, -1, kind), stages[origin], derived.micro_batch, graph.is_pinned_to(LANE), waited_by)


def joins(derived: Derived) -> tuple[IntArray, IntArray]:
    """``(producer, consumer)`` of the edges over which a pass reads what other micro-batches make in the same pass.

    Facts about all samples that follow from the step's arguments alone, such as how many labels count, are known before
    it begins. Gathers of parameters for all micro-batches wait for the first one, and read nothing of it.
    """
    graph, batch = derived.graph, derived.micro_batch
    producer, consumer, tensor = graph.edge_list
    across = (batch[producer] >= 0) & (batch[consumer] != batch[producer])
    across &= ~(graph.is_pinned_to(LANE)[consumer] & (graph.tensor_bytes[tensor] == 0))
    across &= graph.phase[producer] == graph.phase[consumer]
    if across.any():
        across &= ~from_inputs(derived.source)[derived.origin[producer]]
        across[across] = [graph.kinds[op] != ACCUMULATE for op in consumer[across].tolist()]
    return producer[across], consumer[across]


def _is_across(derived: Derived) -> BoolArray:
    """bool [n]: ops that wait for other micro-batches, and what inputs alone make for those.

    A block cannot wait for a block that comes after it, so these are of no block.
    """
    graph, batch = derived.graph, derived.micro_batch
    producer, consumer, _ = graph.edge_list
    across = (batch[producer] >= 0) & (batch[consumer] != batch[producer])
    across &= graph.phase[consumer] != Phase.UPDATE
    if not across.any():
        return np.zeros(graph.n_ops, dtype=np.bool_)
    known = from_inputs(derived.source)[derived.origin]
    early = _reached(known, producer[across & known[producer]], consumer, producer)
    in_pass = graph.phase[producer] == graph.phase[consumer]
    anything = np.ones(graph.n_ops, dtype=np.bool_)
    return early | _reached(anything, joins(derived)[1], producer[in_pass], consumer[in_pass])


def _reached(among: BoolArray, first: IntArray, from_: IntArray, to: IntArray) -> BoolArray:
    """bool [n]: ops of some that edges lead to, however far, from these, and these."""
    found = np.zeros(len(among), dtype=np.bool_)
    new = np.unique(first)
    while len(new):
        found[new] = True
        is_new = np.zeros(len(among), dtype=np.bool_)
        is_new[to[found[from_]]] = True
        new = np.flatnonzero(is_new & among & ~found)
    return found


def stage_numbers(graph: OpGraph, stage: IntArray) -> IntArray:
    """int64 [n]: these numbers of stages, if they are some of this graph.

    Raises:
        MismatchError: not one whole number, -1 or more, for each op.
    """
    stages = np.asarray(stage)
    if stages.shape != (graph.n_ops,) or stages.dtype.kind not in "iu" or (stages < -1).any():
        raise MismatchError(
            f"expected a stage number, -1 or more, for each of {graph.n_ops} ops of graph {graph.name!r}, got "
            f"{stages.dtype} of shape {stages.shape}."
        )
    return stages.astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Ancestry:
    """Edges among the ops of the source, worked out once for all copies (n ops of the derived graph).

    Ops of each phase stand apart, since a recomputed op is a copy of a forward op in the backward pass.

    Attributes:
        key: int64 [n], number of an op's origin and phase.
        edges: (number, number) of producer and consumer, of one phase; the producers in topological order. What is made
            once a step, such as a table of positions that is gathered, holds up no pass and is of none.
    """

    source: OpGraph
    key: IntArray
    edges: IntArray

    @staticmethod
    def of(derived: Derived) -> _Ancestry:
        graph, source = derived.graph, derived.source
        key = derived.origin * len(Phase) + graph.phase
        producer, consumer, tensor = graph.edge_list
        chosen = (graph.phase[producer] == graph.phase[consumer]) & (graph.phase[producer] != Phase.UPDATE)
        # A bucket of gradients stands at one of the ops it waits for; the others feed no op by that.
        in_lane = graph.is_pinned_to(LANE)
        chosen &= derived.micro_batch[producer] >= 0
        gathers = np.array([kind.startswith("all_gather") for kind in graph.kinds])[consumer]
        reads = (derived.origin[producer] == derived.origin[consumer]) | (gathers & (graph.tensor_bytes[tensor] > 0))
        chosen &= ~in_lane[consumer] | reads
        size = source.n_ops * len(Phase)
        low, high = np.divmod(np.unique(key[producer[chosen]] * size + key[consumer[chosen]]), size)
        order = np.argsort(source.topological_position[low // len(Phase)], kind="stable")
        return _Ancestry(source, key, np.column_stack([low[order], high[order]]))

    def feeds_others(self, stage: IntArray) -> BoolArray:
        """bool [n]: ops for which an op of its phase waits that belongs to another stage, or mirrors another op."""
        before, after = (self.edges // len(Phase)).T
        mirrored = self.source.forward_of
        other_op = (mirrored[before] >= 0) & (mirrored[after] >= 0) & (mirrored[before] != mirrored[after])
        feeds = np.zeros(self.source.n_ops * len(Phase), dtype=np.int64)
        feeds[self.edges[(stage[before] != stage[after]) | other_op, 0]] = 1
        return self._carried(feeds, self.edges[::-1], max)[self.key] > 0

    def earliest(self, stage: IntArray) -> tuple[IntArray, IntArray]:
        """int64 [n] each: the earliest stage that waits for an op in the forward pass, its own or another one, and of
        those that it waits for in the backward pass.

        They are earlier than its own for an embedding whose weights are tied to those of the head, and which so runs on
        the last stage's device.
        """
        of_key = np.repeat(np.where(stage < 0, len(stage), stage), len(Phase))
        backward = self.edges[:, 0] % len(Phase) == Phase.BACKWARD
        down = self._carried(of_key, self.edges[~backward][::-1], min)
        up = self._carried(of_key, self.edges[backward][:, ::-1], min)
        return down[self.key], up[self.key]

    def _carried(self, values: IntArray, edges: IntArray, best: Callable[[int, int], int]) -> IntArray:
        """Values of ops, each the best of its own and those that edges (to, from) lead to it, however far."""
        found, pairs, before = values.tolist(), edges.tolist(), None
        while before != found:  # once more than needed; in this order one pass mostly does
            before = list(found)
            for to, from_ in pairs:
                found[to] = best(found[to], found[from_])
        return np.array(found, dtype=np.int64)


def sequenced(
    derived: Derived, stage: IntArray, sequences: Sequence[Sequence[StageBlock]]
) -> tuple[Derived, FloatArray]:
    """The graph with barriers between consecutive blocks, and an explicit order for `env.plan.Plan`, lower first.

    Ops keep their numbers; barriers follow them, and have the part of the mesh, the micro-batch and an origin of the
    block that they let begin, and so belong on its device. Inside a block ops are in the order of the source. Ops of
    the whole step, such as updates, and ops of no block run as soon as they are ready, communication that no forward
    pass waits for last.

    Args:
        derived: a chunked graph.
        stage: int64 [source.n_ops], virtual stage of every op of the source.
        sequences: blocks of each device in the order in which it runs them; every part of a mesh keeps to them.

    Raises:
        MismatchError: a block of the graph that is in no sequence, one that is there twice, or sequences that can never
            be carried out.
    """
    blocks = block_map(derived, stage)
    position, sequence = _places(derived, blocks, sequences)
    last = 1 + max(map(len, sequences), default=0)
    is_last = blocks.in_lane & (blocks.waited_by < 0)
    where = np.where(blocks.kind >= 0, position, np.where(is_last, last, -1))
    rank = derived.source.topological_position[derived.origin]
    numbers = where * (derived.source.n_ops + 1.0) + rank
    if (blocks.kind < 0).all():  # not chunked: data alone says what follows what
        return derived, frozen(numbers)
    barriers = _Barriers.between(derived, blocks, position, sequence, last)
    try:
        graph = barriers.added(derived.graph)
    except GraphError as error:
        raise MismatchError(f"these sequences of blocks can never be carried out: {error}") from None
    first = barriers.first_op
    result = derived.with_more(graph, first)
    before = position[first] * (derived.source.n_ops + 1.0) - 0.5
    return result, frozen(np.concatenate([numbers, before]))


def _places(derived: Derived, blocks: BlockMap, sequences: Sequence[Sequence[StageBlock]]) -> tuple[IntArray, IntArray]:
    """int64 [n] each: place of an op's block in its sequence, and the number of that sequence; -1 without a block."""
    n_stages = 1 + max(int(blocks.stage.max()), *(b.stage for listed in sequences for b in listed), 0)
    n_micro = 1 + max(int(blocks.micro_batch.max()), *(b.micro_batch for listed in sequences for b in listed), 0)
    place = np.full((n_stages, n_micro, 3, 2), -1, dtype=np.int64)
    for number, listed in enumerate(sequences):
        for at, block in enumerate(listed):
            for kind in _KINDS[block.kind]:
                if place[block.stage, block.micro_batch, kind, 0] >= 0:
                    raise MismatchError(f"block {block} is twice in the sequences of an order; expected once.")
                place[block.stage, block.micro_batch, kind] = at, number
    found = place[blocks.stage, blocks.micro_batch, blocks.kind]
    none = blocks.kind < 0
    missing = ~none & (found[:, 0] < 0)
    if missing.any():
        i = int(np.argmax(missing))
        block = StageBlock(_LETTERS[blocks.kind[i]], int(blocks.stage[i]), int(blocks.micro_batch[i]))
        raise MismatchError(
            f"op {derived.graph.op_names[i]!r} belongs to block {block}, which is in no sequence of the order; make "
            "the order for as many stages and micro-batches as the graph has."
        )
    return np.where(none, -1, found[:, 0]), np.where(none, -1, found[:, 1])


def _opened_aside(derived: Derived, blocks: BlockMap, group: IntArray, before: IntArray) -> tuple[IntArray, IntArray]:
    """``(ops, barriers)``: ops outside the pipeline that a forward block waits for begin with the block before it.

    Else they would all run at once, and what they make wait in memory for as many micro-batches as there are.

    Args:
        group: int64 [n], of ops in blocks the number of the block among those of all workers, side by side.
        before: int64, the barrier that lets each such block begin; -1 for none.
    """
    parts, micro = 1 + int(derived.part.max()), blocks.micro_batch
    code = (np.maximum(blocks.stage, 0) * (1 + int(micro.max())) + micro) * parts + derived.part
    forward = np.flatnonzero((blocks.kind == 0) & ~blocks.in_lane & (group >= 0))
    codes, at = np.unique(code[forward], return_index=True)
    aside = np.flatnonzero((blocks.waited_by >= 0) & ~blocks.in_lane)
    wanted = (blocks.waited_by[aside] * (1 + int(micro.max())) + micro[aside]) * parts + derived.part[aside]
    place = np.minimum(np.searchsorted(codes, wanted), max(len(codes) - 1, 0))
    is_there = codes[place] == wanted if len(codes) else np.zeros(len(aside), dtype=np.bool_)
    aside, block = aside[is_there], group[forward[at[place[is_there]]]]
    opened = np.where(before[block] >= 0, before[block - 1], -1)  # -1: the first block, or the one after it
    return aside[opened >= 0], opened[opened >= 0]


@dataclass(frozen=True, eq=False)
class _Barriers:
    """Ops to add (k of them) and what they wait for and let begin, as pairs (op, barrier)."""

    first_op: IntArray
    waits_for: tuple[IntArray, IntArray]
    lets_begin: tuple[IntArray, IntArray]

    @staticmethod
    def between(derived: Derived, blocks: BlockMap, position: IntArray, sequence: IntArray, last: int) -> _Barriers:
        """One barrier for every two consecutive blocks of a sequence and part of the mesh that have ops."""
        chained = np.flatnonzero((blocks.kind >= 0) & ~blocks.in_lane)
        worker = sequence * (1 + int(derived.part.max())) + derived.part
        codes, first, inverse = np.unique(
            (worker * last + position)[chained], return_index=True, return_inverse=True
        )  # of all blocks, those of one worker side by side in its order
        group = np.full(derived.graph.n_ops, -1, dtype=np.int64)
        group[chained] = inverse.reshape(-1)
        follows = np.concatenate([[False], codes[1:] // last == codes[:-1] // last])  # another block of its worker
        before = np.where(follows, np.cumsum(follows) - 1, -1)  # barrier that lets each block begin
        after = np.concatenate([before[1:], [-1]])  # barrier that waits for it
        producer, consumer, _ = derived.graph.edge_list
        inside = (group[producer] == group[consumer]) & (group[producer] >= 0)
        ends, begins = group >= 0, group >= 0
        ends[producer[inside]] = False
        begins[consumer[inside]] = False
        ends &= after[group] >= 0
        begins &= before[group] >= 0
        # Communication with which a block begins, such as of parameters, waits for the block as its first ops do.
        with_lanes = np.where(blocks.kind >= 0, np.searchsorted(codes, worker * last + position), -1)
        with_lanes[blocks.in_lane & (codes[np.minimum(with_lanes, len(codes) - 1)] != worker * last + position)] = -1
        first_lanes = blocks.in_lane & (with_lanes >= 0) & (before[with_lanes] >= 0)
        first_lanes[consumer[(with_lanes[producer] == with_lanes[consumer]) & (with_lanes[producer] >= 0)]] = False
        group = np.where(first_lanes, with_lanes, group)
        out, into = np.flatnonzero(ends), np.flatnonzero(begins | first_lanes)
        aside, opening = _opened_aside(derived, blocks, group, before)
        opening = np.concatenate([before[group[into]], opening])
        return _Barriers(chained[first[follows]], (out, after[group[out]]), (np.concatenate([into, aside]), opening))

    def added(self, graph: OpGraph) -> OpGraph:
        """The graph with the barriers as its last ops. Rows and states are left out: what is in order is split."""
        n, k = graph.n_ops, len(self.first_op)
        (out, waiting), (into, opening) = self.waits_for, self.lets_begin
        extra = len(out) + k  # tensors of no bytes: from what barriers wait for, then from the barriers
        tensors = [
            (graph.tensor_producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s),
            (
                np.concatenate([out, n + np.arange(k)]),
                np.zeros(extra, dtype=np.int64),
                np.zeros(extra, dtype=np.bool_),
                np.full(extra, np.nan),
            ),
        ]
        edges = [
            (graph.edge_list[2], graph.consumers),
            (graph.n_tensors + np.arange(len(out)), n + waiting),
            (graph.n_tensors + len(out) + opening, into),
        ]
        columns = columns_with(graph, self.first_op)
        columns["op_names"] = (*graph.op_names, *(f"{BARRIER}.{i}" for i in range(k)))
        columns["kinds"] = (*graph.kinds, *(BARRIER,) * k)
        columns["colocation"][n:] = -1
        columns["split_rows"] = ()
        return replace(graph, **columns, **rewired(tensors, edges, np.arange(n + k)), states=())
