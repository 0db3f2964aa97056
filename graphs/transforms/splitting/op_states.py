"""Ops by the states that they use, and by the modules in which they lie."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray, per_graph
from graphs.records import Phase

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph


@per_graph
def states_of(graph: OpGraph) -> tuple[tuple[int, ...], ...]:
    """Numbers of the states that each op uses."""
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    result: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for s, state in enumerate(graph.states):
        for user in state.users:
            result[index[user]].append(s)
    return tuple(map(tuple, result))


@per_graph
def from_inputs(graph: OpGraph) -> BoolArray:
    """bool [n]: ops that need the arguments of the step and states that no update changes, and nothing else.

    Without updates all states are taken for weights, and without states what ops keep.
    """
    ptr, tensors = graph.inputs
    producers = graph.tensor_producer[tensors].tolist()
    updates = {name for name, phase in zip(graph.op_names, graph.phase.tolist(), strict=True) if phase == Phase.UPDATE}
    weights = {s for s, state in enumerate(graph.states) if not updates or not updates.isdisjoint(state.users)}
    found = [False] * graph.n_ops
    may = graph.phase != Phase.UPDATE
    if not graph.states:
        may &= graph.parameter_bytes == 0
    states, starts, is_open = states_of(graph), ptr.tolist(), may.tolist()
    for op in graph.topological_order.tolist():
        is_alone = is_open[op] and weights.isdisjoint(states[op])
        found[op] = is_alone and all(found[before] for before in producers[starts[op] : starts[op + 1]])
    return np.array(found, dtype=np.bool_)


def where(graph: OpGraph, patterns: tuple[str, ...]) -> BoolArray:
    """bool [n]: which ops lie in a module that one of the patterns names, or in a module below it."""
    if not patterns:
        return np.ones(graph.n_ops, dtype=np.bool_)
    known: dict[str, bool] = {}
    for module in set(graph.modules):
        known[module] = any(fnmatchcase(module, p) or fnmatchcase(module, f"{p}.*") for p in patterns)
    return np.array([known[module] for module in graph.modules], dtype=np.bool_)
