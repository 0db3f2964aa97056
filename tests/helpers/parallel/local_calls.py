"""Captured calls run on parts of their tensors, in one process, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from parallel.row_numbers import RecordedCall
from torch import fx

from graphs.capture.rows.letters import Letter
from graphs.capture.trace import Layout, TensorInfo, flat
from placement.runtime.calls.local_calls import (
    Extras,
    LocalCall,
    bn_sums_call,
    borders_needed,
    class_sums_call,
    label_weight_call,
    local_call,
)
from placement.runtime.parts.layouts import PartCut, PartLayout, join, take


def node_of(call: RecordedCall) -> fx.Node:
    """The call as a node of a graph of its own, in double precision."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if type(value) is Layout:
            node = graph.placeholder("x")
            node.meta["info"] = _info(value)
            return node
        return [placed(item) for item in value] if isinstance(value, tuple) else _double(value)

    args = tuple(placed(value) for value in call.args)
    node = graph.call_function(call.target, args, {name: placed(value) for name, value in call.kwargs})
    made = [one if one is None else _info(one) for one in call.outputs]
    returns = call.target._schema.returns
    is_list = len(made) != 1 or "[]" in str(returns[0].type) or len(returns) != 1
    node.meta["info"] = tuple(made) if is_list else made[0]
    return node


def run(local: LocalCall, tensors: dict[fx.Node, torch.Tensor]) -> list[Any]:
    """Flat results of a local call."""
    args, kwargs = fx.map_arg((local.args, local.kwargs), lambda node: tensors[node])
    return flat(local.target(*args, **kwargs))


def parts_along(letter: Letter, shapes: Sequence[tuple[int, ...]], n_parts: int, n_blocks: int = 1) -> list[Any]:
    """For each part along a letter the `PartLayout` of every tensor.

    Args:
        shapes: of the tensors of the call, arguments before results.
        n_blocks: equal blocks of the letter, each of which is cut.
    """
    extent = letter.size // n_blocks
    bounds = [extent * i // n_parts for i in range(n_parts + 1)]
    if n_parts == 2 and extent > 3:  # uneven
        bounds[1] += 1
    found = []
    for low, high in pairwise(bounds):
        parts = [PartLayout(shape) for shape in shapes]
        for slot, (dim,), unit, _ in letter.cuts:
            parts[slot] = PartLayout(shapes[slot], (PartCut(dim, unit, extent, low, high),))
        found.append(parts)
    return found


def differing(
    node: fx.Node, tensors: list[torch.Tensor], letter: Letter, n_parts: int, n_blocks: int = 1
) -> str | None:
    """What differs between a call and its parts along a letter; None where nothing does."""
    nodes = node.all_input_nodes
    whole = run(LocalCall(node.target, node.args, dict(node.kwargs)), _copied(nodes, tensors))  # type: ignore[arg-type]
    shapes = [tuple(one.shape) for one in (*tensors, *(one for one in whole if isinstance(one, torch.Tensor)))]
    layouts = parts_along(letter, shapes, n_parts, n_blocks)
    inputs = [dict(zip(nodes, parts, strict=False)) for parts in layouts]
    given: list[dict[fx.Node, torch.Tensor]] = []
    for number, parts in enumerate(inputs):
        given.append({one: take(tensor, parts[one]).clone() for one, tensor in zip(nodes, tensors, strict=True)})
        for slot in letter.partial:
            if slot < len(nodes) and number:
                given[-1][nodes[slot]].zero_()
    if any(cut.halo for cut in letter.cuts):
        of_node = dict(zip(nodes, tensors, strict=True))
        extras = [_borders(node, *each, of_node) for each in zip(inputs, given, strict=True)]
    else:
        extras = [_extras(node, inputs, given)] * n_parts
    pieces = []
    for number, of_all in enumerate(layouts):
        following = iter(of_all[len(nodes) :])
        outputs = [next(following) if isinstance(one, torch.Tensor) else None for one in whole]
        local = local_call(node, inputs[number], outputs, extras[number])
        pieces.append((outputs, run(local, given[number])))
    slots = iter(range(len(nodes), len(shapes)))
    cut = {cut.slot for cut in letter.cuts}
    for i, result in enumerate(whole):
        if not isinstance(result, torch.Tensor):
            continue
        slot = next(slots)
        made = [results[i] for _, results in pieces]
        if slot in cut:
            joined = join(PartLayout(tuple(result.shape)), [(outputs[i], one[i]) for outputs, one in pieces])
        elif slot in letter.partial and not (i in (1, 2) and "batch_norm." in str(node.target)):
            joined = torch.stack(made).sum(0)
        else:
            joined = made[-1]
        if joined.shape != result.shape or not torch.allclose(joined.double(), result.double(), atol=1e-9):
            return f"{node.target} {letter} in {n_parts} parts, {n_blocks} blocks: result {i} differs"
    return None


def _extras(node: fx.Node, inputs: list[dict[fx.Node, PartLayout]], given: list[dict[fx.Node, torch.Tensor]]) -> Extras:
    """What parts put together, entered into ``given`` under nodes of its own."""
    found: dict[str, fx.Node] = {}
    for name, asked in (("label_weight", label_weight_call), ("sums", bn_sums_call)):
        calls = [asked(node, parts) for parts in inputs]
        if calls[0] is not None:
            total = sum(run(call, tensors)[0] for call, tensors in zip(calls, given, strict=True) if call is not None)
            found[name] = node.graph.placeholder(name)
            for tensors in given:
                tensors[found[name]] = total
    of_classes = [class_sums_call(node, parts) for parts in inputs]
    if of_classes[0] is not None:
        rows = [run(call, tensors)[0] for call, tensors in zip(of_classes, given, strict=True) if call is not None]
        found["class_sums"] = node.graph.placeholder("class_sums")
        for tensors in given:
            tensors[found["class_sums"]] = torch.cat(rows)
    return Extras(**found)  # type: ignore[arg-type]


def _borders(
    node: fx.Node,
    parts: dict[fx.Node, PartLayout],
    given: dict[fx.Node, torch.Tensor],
    tensors: dict[fx.Node, torch.Tensor],
) -> Extras:
    """The neighbours' entries that a part needs, entered into ``given`` under nodes of their own."""
    found: dict[fx.Node, tuple[fx.Node | None, fx.Node | None]] = {}
    for argument, part in parts.items():
        for dim in {cut.dim for cut in part.coarse_cuts}:
            ((start, stop),) = part.runs(dim)
            before, after = borders_needed(node, argument, dim)
            sides = [(max(start - before, 0), start), (stop, min(stop + after, part.shape[dim]))]
            nodes = []
            for low, high in sides:
                nodes.append(node.graph.placeholder("border") if high > low else None)
                if nodes[-1] is not None:
                    given[nodes[-1]] = tensors[argument].narrow(dim, low, high - low).clone()
            found[argument] = nodes[0], nodes[1]
    return Extras(borders=found)


def _copied(nodes: list[fx.Node], tensors: list[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    return {node: tensor.clone() for node, tensor in zip(nodes, tensors, strict=True)}


def _info(layout: Layout) -> TensorInfo:
    return TensorInfo(layout._replace(dtype=_double(layout.dtype)), 0, 0)


def _double(value: Any) -> Any:
    return {torch.float32: torch.float64}.get(value, value) if isinstance(value, torch.dtype) else value


# -- views -------------------------------------------------------------------------------------------------------------


def viewed(root: torch.Tensor, view: TensorInfo, base: TensorInfo) -> torch.Tensor:
    """A view of a tensor that stands for ``base``."""
    return root.as_strided(view.layout.shape, view.layout.stride, view.offset - base.offset)


def stretches(size: int) -> Iterator[tuple[int, int]]:
    """Extents and blocks of a dimension: all of it, and inner and outer stretches of it."""
    for blocks in range(1, size):
        if size % blocks == 0:
            for extent in {size // blocks, *(e for e in range(2, size // blocks) if size // blocks % e == 0)}:
                if extent > 1:
                    yield extent, blocks
