"""Sorted lists of tokens: each part of a batch has its own, and products by groups read those of several parts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.rows import Shard
from graphs.transforms.splitting.sharding import SUM, WHOLE, is_by_groups
from placement.runtime.parts.layouts import PartLayout

if TYPE_CHECKING:
    from placement.runtime.planning.values import Values

Lists = tuple[tuple[tuple[int, int], ...], ...]


class Trip(NamedTuple):
    """A trip of tokens to their experts, or back.

    Attributes:
        entry, op: of ``graph.inputs`` by which product by groups j reads where the groups end.
        lists: as of `lists_read`.
        low, high: the experts that are here.
    """

    entry: int
    op: int
    lists: Lists
    low: int
    high: int


def trip(values: Values, tensor: int, batch: int, place: int) -> Trip:
    """The trip of a tensor that lies by groups, or is about to.

    Raises:
        StrategyError: no product by groups is beside it.
    """
    graph, ptr = values.split.graph, values.split.graph.inputs[0]
    op = _product_beside(values, tensor)
    for entry in range(int(ptr[op]), int(ptr[op + 1])) if op >= 0 else ():
        ends = int(graph.inputs[1][entry])
        if not are_ends_of_groups(values, ends):
            continue
        lists = lists_read(values, entry, op, batch, place)
        axis = next(a for a, s in enumerate(values.split.mesh) if (r := s.row[op]) is not None and r.is_by_groups)
        n_experts = values.parts.root(values.written(ends)).layout.shape[0]
        part = PartLayout((n_experts,)).cut_by(
            Shard(0, n_experts), values.split.sizes[axis], values.split.coordinates(place)[axis]
        )
        if lists:
            return Trip(entry, op, lists, *part.runs(0)[0])
    name = graph.op_names[int(graph.tensor_producer[tensor])]
    raise StrategyError(
        f"what op {name!r} makes is to go to its experts, and no list of each part says how many tokens each of them "
        "has; leave out ep."
    )


def _product_beside(values: Values, tensor: int) -> int:
    """The nearest product by groups that reads, or makes, a tensor where it lies by groups; -1 for none."""
    graph = values.split.graph
    ptr, tensors = graph.inputs
    queue, met = deque([tensor]), {tensor}
    while queue:
        one = queue.popleft()
        makers = [int(graph.tensor_producer[one])] if one != tensor or _is_made_by_groups(values, tensor) else []
        for op in (*graph.consumers_of(one).tolist(), *makers):
            if not any(row is not None and row.is_by_groups for row in (s.row[op] for s in values.split.mesh)):
                continue
            if op_kind(graph.kinds[op]).is_grouped:
                return int(op)
            near = [*range(int(graph.output_ptr[op]), int(graph.output_ptr[op + 1]))]
            near += [int(tensors[e]) for e in range(int(ptr[op]), int(ptr[op + 1])) if _is_read_by_groups(values, e)]
            queue += [t for t in near if t not in met]
            met.update(near)
    return -1


def _is_made_by_groups(values: Values, tensor: int) -> bool:
    return any(is_by_groups(int(sharding.written[tensor])) for sharding in values.split.mesh)


def _is_read_by_groups(values: Values, entry: int) -> bool:
    return any(is_by_groups(int(sharding.read[entry])) for sharding in values.split.mesh)


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
