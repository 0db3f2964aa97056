"""`cut`: a graph along one axis of several, or in a sentence why it cannot be cut so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from graphs.arrays import per_graph
from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph, Phase
from graphs.records import OWN_FAMILY
from graphs.transforms.expert_load import expert_choices
from graphs.transforms.splitting.cuts import EXPERTS, HEADS, SUM, Axis, Sharding, shares
from graphs.transforms.splitting.op_states import states_of, where
from graphs.transforms.splitting.ring_rows import turned
from graphs.transforms.splitting.sharding import shard

_STACK = "; stack the weights of a layer's experts in one parameter and multiply them at once, by bmm or grouped_mm"


def cut(graph: OpGraph, axis: Axis, others: Sequence[Axis]) -> Sharding:
    """How a graph is cut along one axis of several.

    Args:
        others: that may cut the same dimensions: for a named axis those before it, else all other ones.

    Raises:
        StrategyError: as `split`.
    """
    return _cut(graph, axis, tuple(others))


@per_graph
def _cut(graph: OpGraph, axis: Axis, others: tuple[Axis, ...]) -> Sharding:
    """Rows are chosen once: strategies with the same mesh differ in storage, order, buckets or stages."""
    parts = check_parts(graph, axis, others)
    spread = (other for other in others if EXPERTS in other.words or other.has_experts)
    experts = [other.size for other in spread if other is not axis]
    sharding = shard(graph, replace(axis, parts=parts, expert_parts=axis.size * math.prod(experts)))
    if not _is_cut_as_named(graph, sharding):
        what = EXPERTS if axis.has_experts else "weights" if axis.cuts_weights else axis.words[0]
        parts = parts if len(axis.words) == 1 and not axis.cuts_weights else axis.size
        modules = axis.tensor_modules or axis.modules
        place = f" in {', '.join(modules)}" if modules else ""
        known = sorted({row.axis for rows in graph.split_rows for row in rows if row.axis})
        is_one = graph.origin.batch_size == 1 and what == "batch"
        why = "the batch has one sample" if is_one else f"its ops have rows for {', '.join(known)}"
        why += "" if what != EXPERTS or EXPERTS in known else _STACK
        raise StrategyError(
            f"no op of graph {graph.name!r} can be cut into {parts} parts by {what}{place}, as axis {axis.name!r} "
            f"wants; {why}."
        )
    if axis.once_a_host and expert_choices(graph) == 1.0:
        raise StrategyError(
            f"axis {axis.name}{axis.size} has 'once', and no token of graph {graph.name!r} is known to ask several "
            "experts; leave the word out."
        )
    _check_shared(graph, sharding)
    _check_heads(graph, sharding, others)
    _check_ring(graph, sharding)
    return sharding


def check_parts(graph: OpGraph, axis: Axis, others: Sequence[Axis]) -> int:
    """Parts of all axes together that cut what this axis cuts.

    Raises:
        StrategyError: more than an input has units.
    """
    parts = axis.size
    for other in others:
        if set(other.words) & set(axis.words) or (not axis.words and other is not axis):
            parts *= other.size
    _check_extents(graph, axis, parts, others)
    return parts


def _is_cut_as_named(graph: OpGraph, sharding: Sharding) -> bool:
    """Whether any op is cut by what its axis is named after; else one of experts would quietly be one of dp."""
    axis = sharding.axis
    cut_rows = [(row, op) for op, row in enumerate(sharding.row) if row is not None and row.extent > 1]
    if axis.tensor_modules:
        inside = where(graph, axis.tensor_modules)
        return any(inside[op] and row.axis not in OWN_FAMILY for row, op in cut_rows)
    if axis.has_experts:
        return any(row.axis == EXPERTS for row, _ in cut_rows)
    return any(len(axis.words) < 2 or row.axis == axis.words[0] for row, _ in cut_rows)


def _check_shared(graph: OpGraph, sharding: Sharding) -> None:
    """Weights that are cut in some modules are not used elsewhere, where they would have to be gathered."""
    axis = sharding.axis
    modules = axis.tensor_modules or axis.modules
    is_cut = sharding.state > SUM
    if not modules or not is_cut.any():
        return
    inside = where(graph, modules)
    for op, used in enumerate(states_of(graph)):
        if inside[op] or graph.phase[op] == Phase.UPDATE or sharding.row[op] is not None:
            continue
        state = next((graph.states[s].name for s in used if is_cut[s]), None)
        if state is not None:
            raise StrategyError(
                f"axis {axis.name!r} cuts {state!r} in {', '.join(modules)}, and op {graph.op_names[op]!r} uses all of "
                f"it in module {graph.modules[op]!r}; name that module too."
            )


def _check_heads(graph: OpGraph, sharding: Sharding, others: Sequence[Axis]) -> None:
    """Attention that an axis cuts by heads has so many, and no tensor axis cuts them as well."""
    axis = sharding.axis
    has_heads = any(
        row is not None and row.axis == HEADS and op_kind(kind).attention_core
        for row, kind in zip(sharding.row, graph.kinds, strict=True)
    )
    if axis.by_heads and not has_heads:
        raise StrategyError(
            f"axis {axis.name!r} cuts attention by heads ('ulysses') into {axis.size} parts, and graph {graph.name!r} "
            "has no attention with so many heads; take fewer parts, or leave out 'ulysses'."
        )
    other = next((each for each in others if each.by_heads), None)
    if other is not None and axis.cuts_weights and has_heads:
        # An all-to-all makes blocks of the blocks that a tensor axis has made, and not the other way round.
        raise StrategyError(
            f"axes {other.name!r} ('ulysses') and {axis.name!r} both cut attention by heads; leave out 'ulysses', or "
            f"cut other weights by 'on' after {axis.name}{axis.size}."
        )


def _check_ring(graph: OpGraph, sharding: Sharding) -> None:
    """Keys and values of some attention go round, where an axis is said to be a ring."""
    axis = sharding.axis
    if not axis.is_ring or any(turned(graph, op, row) is not None for op, row in enumerate(sharding.row)):
        return
    raise StrategyError(
        f"axis {axis.name!r} sends keys and values round a ring ('ring') of {axis.size}, and graph {graph.name!r} has "
        "no attention that can take them block by block: one call in a training step, without mask and dropout, of a "
        f"length that {axis.size} divides; leave out 'ring', which gathers them, or say 'ulysses', which cuts heads, "
        "and takes masks as well."
    )


def _check_extents(graph: OpGraph, axis: Axis, parts: int, others: Sequence[Axis]) -> None:
    """Inputs must have as many units as there are parts: what reads them could not be cut either."""
    for word in axis.words:
        extents = [
            row.extent
            for i, rows in enumerate(graph.split_rows)
            if graph.kinds[i] == "input"
            for row in rows
            if row.axis == word
        ]
        if extents and max(extents) < parts:
            raise StrategyError(
                f"axis {axis.name!r} wants {parts} parts of the {word}, which has {max(extents)}; take at most "
                f"{max(extents)} parts, those of all axes and micro-batches together."
            )
        for other in others if extents else ():
            if other.shares and word in other.words:
                least = round(max(extents) * float(shares(max(extents), other.size, other.shares).min()))
                if least * other.size < parts:
                    raise StrategyError(
                        f"a replica has {least} of {max(extents)} samples, and axis {axis.name!r} wants "
                        f"{parts // other.size} parts of them; give it a larger share, or take fewer parts."
                    )
