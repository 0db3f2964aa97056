"""Sorted lists of tokens: each part of a batch has its own, and products by groups read those of several parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.op_kinds import op_kind
from graphs.transforms.splitting.sharding import SUM, WHOLE

if TYPE_CHECKING:
    from placement.runtime.planning.values import Values

Lists = tuple[tuple[tuple[int, int], ...], ...]


def are_ends_of_groups(values: Values, tensor: int) -> bool:
    """Whether a tensor says where the groups of a product end: each part of the batch has such numbers of its own."""
    graph = values.split.graph
    dtype = values.step.program.tensor_infos[values.nodes.captured(tensor)].layout.dtype
    return not dtype.is_floating_point and any(
        op_kind(graph.kinds[op]).is_grouped for op in graph.consumers_of(tensor).tolist()
    )


def lists_read(values: Values, entry: int, op: int, batch: int, place: int) -> Lists:
    """The lists of the parts whose tokens a product by groups reads together, as a place has them.

    Args:
        entry: of ``graph.inputs``, by which op j reads where the groups end.

    Returns:
        Stretches of each part's tokens among those that are here, as ``(start, stop)``; empty where the tokens
        are of one list.
    """
    tensor = int(values.split.graph.inputs[1][entry])
    mesh = enumerate(values.split.mesh)
    axes = [a for a, one in mesh if int(one.written[tensor]) == SUM and int(one.read[entry]) == WHOLE]
    if not axes:
        return ()
    counted, counter = _entry_counted(values, tensor, axes)
    form = values.wanted_by_edge(counted, counter, batch).want
    parts = [values.parts.layout(form, one).runs(0) for one in values.split.places_along(place, axes)]
    # Tokens that are put together lie in the order of the whole list.
    starts, count = {}, 0
    for start, stop in sorted(run for runs in parts for run in runs):
        starts[start] = count
        count += stop - start
    return tuple(tuple((starts[start], starts[start] + stop - start) for start, stop in runs) for runs in parts)


def _entry_counted(values: Values, tensor: int, axes: list[int]) -> tuple[int, int]:
    """The entry by which a sorted list is read to count the tokens of each group, and the op j that counts."""
    ptr, tensors = values.split.graph.inputs
    while True:
        op = int(values.split.graph.tensor_producer[tensor])
        entries = range(int(ptr[op]), int(ptr[op + 1]))
        for entry in entries:
            if all(int(values.split.mesh[a].read[entry]) > SUM for a in axes):
                return entry, op
        tensor = int(tensors[next(e for e in entries if all(int(values.split.mesh[a].read[e]) == SUM for a in axes))])
