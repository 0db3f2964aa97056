"""Where micro-batches meet: a loss over all pairs of samples waits for the forward pass of all of them."""

from __future__ import annotations

import numpy as np

from graphs.arrays import BoolArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.sharding import SUM, Sharding


def meeting(graph: OpGraph, chunks: Sharding | None) -> BoolArray:
    """bool [n]: ops whose forward pass waits for other micro-batches, and those of the backward pass others wait for.

    They have no place among the blocks of a pipeline, each of which is of one micro-batch. O(n e) at most.
    """
    found = np.zeros(graph.n_ops, dtype=np.bool_)
    if chunks is None:
        return found
    ptr, tensors = graph.inputs
    consumer = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
    producer = graph.tensor_producer[tensors]
    written, read = chunks.written[tensors], chunks.read
    is_exchanged = ((written == SUM) & (read != SUM)) | ((written > SUM) & (read != written))
    is_chunked = np.array([row is not None for row in chunks.row], dtype=np.bool_)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        inside = (graph.phase[producer] == phase) & (graph.phase[consumer] == phase)
        # What is done once, between two ops of micro-batches.
        between = np.zeros(graph.n_ops, dtype=np.bool_)
        between[producer[inside & is_chunked[consumer] & ~is_chunked[producer]]] = True
        once = inside & ~is_chunked[producer] & ~is_chunked[consumer]
        _spread(between, consumer[once], producer[once])
        meets = inside & is_chunked[producer] & np.where(is_chunked[consumer], is_exchanged, between[consumer])
        if phase == Phase.FORWARD:
            found[consumer[meets]] = True
            _spread(found, producer[inside], consumer[inside])
        else:
            found[producer[meets]] = True
            _spread(found, consumer[inside], producer[inside])
    return found


def _spread(found: BoolArray, start: IntArray, end: IntArray) -> None:
    """Mark the ends of edges whose starts are marked, and so on."""
    while (new := found[start] & ~found[end]).any():
        found[end[new]] = True
