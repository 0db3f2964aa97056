"""Masks and positions of all samples: made of integer arguments alone, so each micro-batch may read those of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import BoolArray
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph
from graphs.transforms.per_graph import per_graph
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.splitting.sharding import SUM, WHOLE, Sharding

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
