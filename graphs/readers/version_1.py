"""Graphs of files of version 1: they knew kept bytes as one sum, gradients without bytes, and no origin.

All that is missing is worked out once, here, from what `capture` wrote then; a graph of another maker stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import BoolArray, IntArray, sums
from graphs.opgraph import OpGraph, Origin, Phase
from graphs.recipes import OPTIMIZERS, UPDATE_KIND, Optimizer

_NEITHER = {"input", "parameter", "buffer", "constant", "op"}  # kinds of ops that are neither operators nor modules


def upgraded(graph: OpGraph) -> OpGraph:
    """The graph with an origin, parts of its kept bytes, and the sizes of final gradients, as `capture` gives them."""
    optimizer = _optimizer(graph)
    kinds = set(graph.kinds) - _NEITHER
    by_module = any(_is_module(kind) for kind in kinds)
    origin = Origin(
        train=bool((graph.phase == Phase.BACKWARD).any()),
        granularity="module" if by_module else "op" if kinds else None,
        optimizer=None if optimizer is None else optimizer.name,
    )
    if optimizer is None:
        return replace(graph, origin=origin)
    updated = _updated_bytes(graph, optimizer)
    gradient = _by_holder(graph, updated, optimizer)
    if optimizer.kept_copies * int(gradient.sum()) > int(graph.kept_bytes.sum()) or gradient.sum() < updated.sum():
        return replace(graph, origin=replace(origin, optimizer=None))  # of another maker, or changed since
    is_final, size = _final_gradients(graph, updated)
    return replace(
        graph,
        origin=origin,
        parameter_bytes=graph.kept_bytes - (1 + optimizer.states) * gradient,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer.states * gradient,
        tensor_bytes=np.where(is_final, size, graph.tensor_bytes),
        tensor_in_place=is_final,
    )


def _is_module(kind: str) -> bool:
    """Operators have a namespace; modules are called by their class."""
    return "." not in kind.removesuffix(".backward")


def _optimizer(graph: OpGraph) -> Optimizer | None:
    names = {kind.removeprefix(UPDATE_KIND) for kind in graph.kinds if kind.startswith(UPDATE_KIND)}
    return OPTIMIZERS.get(names.pop()) if len(names) == 1 else None


def _updated_bytes(graph: OpGraph, optimizer: Optimizer) -> IntArray:
    """int64 [n]: the parameter that each update op writes, which moves a fixed number of copies of it."""
    is_update = np.array([kind.startswith(UPDATE_KIND) for kind in graph.kinds], dtype=np.bool_)
    return np.where(is_update, graph.bytes_moved / optimizer.moved_bytes(1, 1, 1), 0).astype(np.int64)


def _by_holder(graph: OpGraph, updated: IntArray, optimizer: Optimizer) -> IntArray:
    """int64 [n]: the trained parameters that each op keeps; within a colocation group the first op holds most."""
    found = np.zeros(graph.n_ops, dtype=np.int64)
    alone = graph.colocation.max(initial=-1) + 1 + np.arange(graph.n_ops)
    group = np.where(graph.colocation >= 0, graph.colocation, alone)
    left = sums(group, updated, int(group.max()) + 1)
    for op in np.flatnonzero(graph.kept_bytes).tolist():
        found[op] = min(int(left[group[op]]), int(graph.kept_bytes[op]) // optimizer.kept_copies)
        left[group[op]] -= found[op]
    return found


def _final_gradients(graph: OpGraph, updated: IntArray) -> tuple[BoolArray, IntArray]:
    """bool [m] and int64 [m]: the tensors without bytes that updates of their own group alone read, and their sizes."""
    producer, consumer, tensor = graph.edge_list
    same = (graph.colocation[producer] >= 0) & (graph.colocation[producer] == graph.colocation[consumer])
    is_final = (graph.tensor_bytes == 0) & (np.diff(graph.consumer_ptr) > 0) & np.isnan(graph.tensor_transfer_s)
    is_final[tensor[(updated[consumer] == 0) | ~same]] = False
    size = np.zeros(graph.n_tensors, dtype=np.int64)
    np.maximum.at(size, tensor, updated[consumer])
    return is_final, size
