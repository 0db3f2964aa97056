"""What is done once for all samples: masks and positions, made of integers alone, and ops over pairs of samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import BoolArray, per_graph
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.cuts import SUM, WHOLE, Sharding
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.splitting.sharding import shard

_REAL = ("float", "bfloat", "complex")


def with_whole_masks(graph: OpGraph, chunks: Sharding) -> Sharding:
    """The cut into micro-batches, but what is made of integer arguments is made once where it is read across samples.

    An attention mask that is looked up by the numbers of samples is an example. No micro-batch waits for another then,
    and in a pipeline every stage has it at the beginning of the step.
    """
    ptr, tensors = graph.inputs
    consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
    producers = graph.tensor_producer[tensors]
    known = of_integer_inputs(graph)
    is_across = (chunks.written[tensors] > SUM) & (chunks.read != chunks.written[tensors]) & known[producers]
    stack = np.unique(producers[is_across]).tolist()
    whole = np.zeros(graph.n_ops, dtype=np.bool_)
    while stack:
        op = stack.pop()
        if not whole[op]:
            whole[op] = True
            stack += graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]].tolist()
    if not whole.any():
        return chunks
    made = whole[graph.tensor_producer]
    return replace(
        chunks,
        row=tuple(None if whole[op] else row for op, row in enumerate(chunks.row)),
        written=np.where(made, WHOLE, chunks.written),
        read=np.where(whole[consumers], WHOLE, chunks.read),
        share=np.where(whole[:, None], 1.0, chunks.share),
        written_share=np.where(made[:, None], 1.0, chunks.written_share),
    )


@per_graph
def of_integer_inputs(graph: OpGraph) -> BoolArray:
    """bool [n]: ops that make integers of integer arguments of the step, recomputed ones too, and those arguments."""
    ptr, tensors = graph.inputs
    states, starts, producers = states_of(graph), ptr.tolist(), graph.tensor_producer[tensors].tolist()
    found = [False] * graph.n_ops
    for op in graph.topological_order.tolist():
        if graph.dtypes[op].startswith(_REAL) or states[op] or op_kind(graph.kinds[op]).is_drawn:
            continue  # what is drawn is the mask of a dropout, one for each sample
        found[op] = all(found[before] for before in producers[starts[op] : starts[op + 1]])
    return np.array(found, dtype=np.bool_)


def in_time(graph: OpGraph, chunks: Sharding) -> Sharding:
    """A cut into micro-batches, but for what is done once for all of them; so are updates."""
    once = joint_ops(graph, chunks)
    is_update = graph.phase == Phase.UPDATE
    if any(chunks.row[op] is not None for op in np.flatnonzero(is_update).tolist()):
        once |= is_update
    return with_whole_masks(graph, shard(graph, chunks.axis, ~once) if once.any() else chunks)


def joint_ops(graph: OpGraph, chunks: Sharding) -> BoolArray:
    """bool [n]: forward ops that would read those of all micro-batches, and what follows them, both passes.

    Ops before them stay in micro-batches, so a pipeline whose backward passes follow all forward passes can
    carry that out. Masks, integers made of integers, are none of them: every micro-batch can have those of all.
    """
    ptr, tensors = graph.inputs
    consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
    is_chunked = np.array([row is not None for row in chunks.row], dtype=np.bool_)
    across = (chunks.written[tensors] > SUM) & (chunks.read != chunks.written[tensors])
    across &= is_chunked[consumers] & (graph.phase[consumers] == Phase.FORWARD)
    across &= ~of_integer_inputs(graph)[graph.tensor_producer[tensors]]
    first = np.zeros(graph.n_ops, dtype=np.bool_)
    first[consumers[across]] = True
    return _with_followers(graph, first) if first.any() else first


def _with_followers(graph: OpGraph, first: BoolArray) -> BoolArray:
    """bool [n]: these forward ops, all that follow in the forward pass, and their backward passes.

    An op of the backward pass that mirrors none, such as an add of gradients, is among them if all that it reads are.
    """
    ptr, tensors = graph.inputs
    found = first.copy()
    for op in graph.topological_order.tolist():
        before = found[graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]]]
        if graph.phase[op] == Phase.FORWARD:
            found[op] |= before.any()
        elif graph.phase[op] == Phase.BACKWARD:
            mirrored = graph.forward_of[op]
            found[op] = found[mirrored] if mirrored >= 0 else bool(len(before)) and before.all()
    return found
