"""Ops over pairs of samples, as a contrastive loss has them: done once for the whole step, not for each micro-batch."""

from __future__ import annotations

import numpy as np

from graphs.arrays import BoolArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.masks import of_integer_inputs, with_whole_masks
from graphs.transforms.splitting.sharding import SUM, Sharding, shard


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
