"""Ops by the states that they use, and by the modules in which they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray, per_graph
from graphs.op_kinds import op_kind
from graphs.records import OWN_FAMILY, Partial, Phase, Shard, SplitRow

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


_Dimension = tuple[int, int]  # of a tensor, by its number among those that an op reads or writes, and the dimension


@dataclass(slots=True)
class _Passage:
    """Fate of the dimensions that an op reads: `summed` there, or `kept` as dimensions of its results.

    Attributes:
        classes: dimensions of its results along which parts give each other sums.
    """

    summed: set[_Dimension] = field(default_factory=set)
    kept: dict[_Dimension, set[_Dimension]] = field(default_factory=dict)
    classes: set[_Dimension] = field(default_factory=set)


@per_graph
def normalised(graph: OpGraph) -> tuple[frozenset[int], ...]:
    """Dimensions of each tensor that are summed up without weights for each sample, as by the mean of an RMSNorm.

    A dimension that reaches such a sum by other ops than products counts, too. Cut along such a dimension, the sum
    would take but a small exchange; but then all up to the next products would be cut, and those by their rows, with
    sums as results. A sum over samples, such as a loss or the gradient of a bias, is none of these, nor is one over
    classes, whose parts give each other sums; and forward and backward pass are looked at apart. A sum of the backward
    pass is of a norm if its forward op is: else it is the gradient of a number a sample, such as an expert's weight.
    """
    phase, first_read = graph.phase.tolist(), graph.inputs[0].tolist()
    read, first_written = graph.inputs[1].tolist(), graph.output_ptr.tolist()
    producer, kinds = graph.tensor_producer.tolist(), graph.kinds
    known: dict[tuple[int, int], _Passage] = {}
    passages: dict[int, _Passage] = {}
    found: list[set[int]] = [set() for _ in range(graph.n_tensors)]
    classes: list[set[int]] = [set() for _ in range(graph.n_tensors)]
    for op in graph.topological_order.tolist():
        if op_kind(kinds[op]).is_product:
            continue
        tensors = read[first_read[op] : first_read[op + 1]]
        key = graph.row_numbers[op], len(tensors)
        if key not in known:
            known[key] = _passage(graph.split_rows[op], len(tensors))
        passage = passages[op] = known[key]
        handed_on = (after for (number, dim), after in passage.kept.items() if dim in classes[tensors[number]])
        for number, dim in passage.classes.union(*handed_on):
            classes[first_written[op] + number].add(dim)
    forward_of = graph.forward_of.tolist()
    for op in (op for each in Phase for op in reversed(passages) if phase[op] == each):
        passage = passages[op]
        tensors, first = read[first_read[op] : first_read[op + 1]], first_written[op]
        carried = (
            before
            for before, after in passage.kept.items()
            if any(dim in found[first + number] for number, dim in after)
        )
        of_norm = forward_of[op] < 0 or any(found[t] for t in _around(graph, forward_of[op]))
        for number, dim in (*(passage.summed if of_norm else ()), *carried):
            if phase[producer[tensors[number]]] == phase[op] and dim not in classes[tensors[number]]:
                found[tensors[number]].add(dim)
    return tuple(map(frozenset, found))


def _around(graph: OpGraph, op: int) -> list[int]:
    """Tensors that an op reads and writes."""
    pointer, read = graph.inputs
    return [*read[pointer[op] : pointer[op + 1]].tolist(), *range(graph.output_ptr[op], graph.output_ptr[op + 1])]


def _passage(rows: tuple[SplitRow, ...], n_read: int) -> _Passage:
    result = _Passage()
    keeps_samples = any(isinstance(part, Shard) for row in rows if row.axis in OWN_FAMILY for part in row.outputs)
    for row in rows:
        if row.axis in OWN_FAMILY:
            continue
        after = {(number, part.dim) for number, part in enumerate(row.outputs) if isinstance(part, Shard)}
        result.classes |= after if row.sums_bytes else set()
        is_sum = keeps_samples and any(isinstance(part, Partial) for part in row.outputs)
        for number, part in enumerate(row.inputs[:n_read]):
            if isinstance(part, Shard) and after:
                result.kept.setdefault((number, part.dim), set()).update(after)
            elif isinstance(part, Shard) and is_sum:
                result.summed.add((number, part.dim))
    result.summed -= result.kept.keys()  # heads of features: each may be summed up by itself
    return result


def reduced_by_readers(graph: OpGraph, size: int) -> BoolArray:
    """bool [n]: forward ops with a much larger output than their forward readers', e.g. logits before a loss."""
    producer, consumer, _ = graph.edge_list
    forward = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.FORWARD)
    pairs = np.unique(producer[forward] * graph.n_ops + consumer[forward])
    written = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.n_ops)
    before, after = np.divmod(pairs, graph.n_ops)
    later = np.bincount(before, written[after], graph.n_ops)
    has_readers = np.bincount(before, minlength=graph.n_ops) > 0
    result: BoolArray = has_readers & (later * size < written)
    return result
