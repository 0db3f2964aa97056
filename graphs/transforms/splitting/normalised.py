"""Dimensions that a norm reads in full: along these a tensor axis cuts nothing that the norm reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphs.arrays import per_graph
from graphs.op_kinds import op_kind
from graphs.records import Phase
from graphs.rows import OWN_FAMILY, Partial, Shard, SplitRow

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

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
