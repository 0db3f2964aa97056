"""Ops by the states that they use, and by the modules in which they lie."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray
from graphs.records import Phase

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph


def states_of(graph: OpGraph) -> list[list[int]]:
    """Numbers of the states that each op uses."""
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    result: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for s, state in enumerate(graph.states):
        for user in state.users:
            result[index[user]].append(s)
    return result


def from_inputs(graph: OpGraph) -> BoolArray:
    """bool [n]: ops that need the arguments of the step and states that no update changes, and nothing else.

    Without updates all states are taken for weights, and without states what ops keep.
    """
    ptr, tensors = graph.inputs
    producers = graph.tensor_producer[tensors].tolist()
    updates = {name for name, phase in zip(graph.op_names, graph.phase.tolist(), strict=True) if phase == Phase.UPDATE}
    weights = {s for s, state in enumerate(graph.states) if not updates or not updates.isdisjoint(state.users)}
    found = np.zeros(graph.n_ops, dtype=np.bool_)
    states = states_of(graph)
    for op in graph.topological_order.tolist():
        is_alone = weights.isdisjoint(states[op]) and graph.phase[op] != Phase.UPDATE
        is_alone &= bool(graph.states) or not graph.parameter_bytes[op]
        found[op] = is_alone and all(found[before] for before in producers[ptr[op] : ptr[op + 1]])
    return found


def where(graph: OpGraph, patterns: tuple[str, ...]) -> BoolArray:
    """bool [n]: which ops lie in a module that one of the patterns names, or in a module below it."""
    if not patterns:
        return np.ones(graph.n_ops, dtype=np.bool_)
    known: dict[str, bool] = {}
    for module in set(graph.modules):
        known[module] = any(fnmatchcase(module, p) or fnmatchcase(module, f"{p}.*") for p in patterns)
    return np.array([known[module] for module in graph.modules], dtype=np.bool_)
