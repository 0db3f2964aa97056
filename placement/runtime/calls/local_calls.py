"""`local_call`: what a call of a captured program becomes where only parts of its tensors are.

Most calls are the same operator on local tensors, with the sizes among its arguments made local. Where that does not
do, functions of this room stand in. The results of a call are worked out without data beforehand, so that a call that
cannot run on parts is refused when a program is written, never while it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from graphs.capture.rows.assembly import letters_of
from graphs.capture.rows.letters import Letter
from graphs.capture.trace import Layout, flat, layouts, row_major, value_of
from graphs.op_kinds import op_kind
from placement.runtime.calls.attention_calls import ATTENTION
from placement.runtime.calls.class_calls import CLASSES, class_sums_call
from placement.runtime.calls.dispatch_calls import DISPATCHES
from placement.runtime.calls.group_calls import GROUPS
from placement.runtime.calls.loss_calls import LOSSES, label_weight, label_weight_call
from placement.runtime.calls.norm_calls import NORMS, bn_sums_call
from placement.runtime.calls.part_calls import (
    Extras,
    LocalCall,
    PartCall,
    ReadTensor,
    part_call,
    with_takes,
)
from placement.runtime.calls.shape_calls import SHAPES, local_stride, sized
from placement.runtime.calls.table_calls import TABLES
from placement.runtime.calls.view_calls import VIEWS
from placement.runtime.calls.window_calls import WINDOWS, borders_needed
from placement.runtime.parts.layouts import PartCut, PartLayout
from placement.runtime.program.functional import after, uninitialised

__all__ = [
    "Extras",
    "LocalCall",
    "bn_sums_call",
    "borders_needed",
    "class_sums_call",
    "label_weight",
    "label_weight_call",
    "local_call",
]

_TABLES = (VIEWS, SHAPES, LOSSES, CLASSES, TABLES, DISPATCHES, GROUPS, NORMS, WINDOWS, ATTENTION)
_HANDLERS = {name: handler for table in _TABLES for name, handler in table.by_name.items()}
_BAGS = {"_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"}
# Operators whose input may be places in a list of which each part has its own (`graphs.capture.rows.dispatch`).
_BY_PLACES = {"sort", "argsort", "histc", "bincount", "index", "index_put", "index_put_", "_index_put_impl_"}
_BY_PLACES |= {"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward", *_BAGS}
_BY_PLACES |= {"_embedding_bag_backward"}
# Operators whose rule for tensors without data is another device's, with other number formats or shapes.
_WITH_DATA = {"_grouped_mm", *_BAGS}
_NOTHING = Extras()


def local_call(
    node: fx.Node,
    inputs: Mapping[fx.Node, PartLayout],
    outputs: Sequence[PartLayout | None],
    extras: Extras = _NOTHING,
) -> LocalCall:
    """The call on local tensors.

    Args:
        node: a call of a captured program.
        inputs: the part of each tensor argument that is here.
        outputs: the part of each flat result to be made; None for what is no tensor. A summand has all of its shape.
        extras: what it needs beside its arguments.

    Raises:
        StrategyError: the call cannot make these parts of these parts.
    """
    call = part_call(node, inputs, outputs, extras)
    if not isinstance(node.target, OpOverload):
        return _other(call)
    if call.is_whole and extras == _NOTHING and call.name not in VIEWS.by_name:
        return LocalCall(node.target, tuple(node.args), dict(node.kwargs))
    if call.operands and _draws(call):
        raise call.refused("it draws random numbers while it computes, and parts would draw others")
    if call.operands and not op_kind(call.name).reads_shape_only and call.name not in VIEWS.by_name:
        call = _with_wanted(call)
    handler = _HANDLERS.get(call.name)
    local = sized(call) if handler is None else handler(call)
    return with_takes(_checked(call, local))


def _other(call: PartCall) -> LocalCall:
    """A call of what is no operator."""
    node = call.node
    if node.target is uninitialised:
        _, stride, *rest = node.args
        size = call.output.local_shape
        return LocalCall(uninitialised, (size, local_stride(size, tuple(stride)), *rest), dict(node.kwargs))  # type: ignore[arg-type]
    if not call.is_whole and node.target not in (operator.getitem, after):
        raise call.refused("it is no operator whose rows are known")
    return LocalCall(node.target, tuple(node.args), dict(node.kwargs))  # type: ignore[arg-type]


def _draws(call: PartCall) -> bool:
    """Whether a call draws random numbers, and not with dropout that is off."""
    is_off = call["train"] is False or call["training"] is False or 0 in (call["p"], call["dropout_p"], call["dropout"])
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()) and not is_off


# -- arguments as they are read ----------------------------------------------------------------------------------------


def _with_wanted(call: PartCall) -> PartCall:
    """The call with operands that are cut as the other tensors with the same letters are, where more is here."""
    outputs = tuple(one.layout if hasattr(one, "layout") else None for one in flat(value_of(call.node)))
    _, letters = letters_of(call.node.target, layouts(call.node.args), layouts(dict(call.node.kwargs)), outputs)
    given = call.operands
    if len(call.outputs) != len(outputs):
        raise call.refused(f"it has {len(outputs)} results, not {len(call.outputs)}")
    # No part is asked for of a result that nobody reads.
    results = [part or PartLayout(()) for part, one in zip(call.outputs, outputs, strict=True) if one is not None]
    parts = [*(operand.have for operand in given), *results]
    wanted, left = parts[: len(given)], {(slot, cut) for slot, part in enumerate(parts) for cut in part.coarse_cuts}
    for letter in letters:
        if all(len(cut.dims) == 1 for cut in letter.cuts):
            _want(call, letter, parts, wanted, left)
    if left and call.name not in _BY_PLACES:
        slot, cut = min(left)
        what = f"argument {slot + 1}" if slot < len(given) else f"result {slot - len(given) + 1}"
        raise call.refused(f"it takes dimension {cut.dim} of its {what} together, which is cut")
    if all(want is operand.have for want, operand in zip(wanted, given, strict=True)):
        return call
    args, kwargs = _replaced((call.args, call.kwargs), iter(wanted))
    return replace(call, args=args, kwargs=kwargs)


def _want(
    call: PartCall, letter: Letter, parts: list[PartLayout], wanted: list[PartLayout], left: set[tuple[int, PartCut]]
) -> None:
    """Enter into ``wanted`` the stretches of a letter that are cut anywhere, for each operand that has it.

    They are taken out of ``left``, the cuts that no letter explains.

    Raises:
        StrategyError: of one letter, tensors have different stretches.
    """
    stretches: dict[int, PartCut] = {}  # by their period
    for slot, (dim,), unit, _ in letter.cuts:
        for cut in parts[slot].coarse_cuts:
            if cut.dim == dim and cut.unit % unit == 0 and cut.period <= unit * letter.size:
                left.discard((slot, cut))
                stretch = cut._replace(dim=0, unit=cut.unit // unit)
                inner = _inner(stretches.get(stretch.period, stretch), stretch)
                if inner is None:
                    raise call.refused("its tensors are cut at different places")
                stretches[stretch.period] = inner
    for slot, (dim,), unit, halo in letter.cuts:
        for stretch in stretches.values() if slot < len(wanted) and not halo else ():
            new = stretch._replace(dim=dim, unit=stretch.unit * unit)
            wanted[slot] = _cut_to(wanted[slot], new)


def _inner(a: PartCut, b: PartCut) -> PartCut | None:
    """The one of two cuts of a stretch that lies in the other; None where neither does."""
    stretches = [[(low * cut.unit, high * cut.unit) for low, high in cut.stretches] for cut in (a, b)]
    for cut, (inner, outer) in zip((a, b), (stretches, stretches[::-1]), strict=True):
        if all(any(low <= start and stop <= high for low, high in outer) for start, stop in inner):
            return cut
    return None


def _cut_to(part: PartLayout, new: PartCut) -> PartLayout:
    """A part cut further, along a stretch that it has all of or more of; the part itself where that is not so."""
    along = part.along(new.dim)
    same = next((cut for cut in along if cut.period == new.period), None)
    if same is not None and (same.coarse == new.coarse or _inner(same, new) != new):
        return part
    rest = [cut for cut in along if cut is not same]
    if any(cut.meets(new.coarse.unit, new.period) for cut in rest):
        return part
    return PartLayout(part.shape, (*(cut for cut in part.cuts if cut is not same), new))


def _replaced(value: Any, parts: Any) -> Any:
    if isinstance(value, ReadTensor):
        part = next(parts)
        return value if part is value.have else replace(value, part=part)
    if isinstance(value, dict):
        return {name: _replaced(item, parts) for name, item in value.items()}
    return tuple(_replaced(item, parts) for item in value) if isinstance(value, tuple) else value


# -- what a call would make --------------------------------------------------------------------------------------------


def _checked(call: PartCall, local: LocalCall) -> LocalCall:
    """The local call if it makes what is asked for, else all of it with parts taken.

    Raises:
        StrategyError: it makes neither.
    """
    if not isinstance(local.target, OpOverload) or call.name in _WITH_DATA:
        return local
    try:
        made = _made(local)
    except NotImplementedError:  # an operator that only runs with data
        return local
    except (RuntimeError, IndexError, ValueError) as error:
        raise call.refused(str(error).partition("\n")[0].rstrip(".")) from None
    asked = [(shape, part) for shape, part in zip(made, call.outputs, strict=True) if part is not None]
    if all(shape == part.local_shape for shape, part in asked):
        return local
    if all(shape == part.shape for shape, part in asked):
        return call.made_whole()
    shapes = [part.local_shape for _, part in asked]
    raise call.refused(f"of these parts it makes {_text([shape for shape, _ in asked])}, not {_text(shapes)}")


def _made(local: LocalCall) -> list[tuple[int, ...] | None]:
    """The shape of each result of a call on tensors without data."""
    args, kwargs = _described((local.args, tuple(local.kwargs.items())))
    try:
        return _shapes_made(local.target, args, kwargs)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        found: list[tuple[int, ...] | None] = _shapes_made.__wrapped__(local.target, args, kwargs)
        return found


def _described(value: Any) -> Any:
    if isinstance(value, ReadTensor):
        shape = value.part.local_shape
        return Layout(shape, row_major(shape), value.layout.dtype)
    if isinstance(value, fx.Node):
        return layouts(value)
    return tuple(_described(item) for item in value) if isinstance(value, (tuple, list)) else value


@lru_cache(maxsize=8192)
def _shapes_made(target: Any, args: Any, kwargs: Any) -> list[tuple[int, ...] | None]:
    result = target(*(_without_data(value) for value in args), **{name: _without_data(value) for name, value in kwargs})
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in flat(result)]


def _without_data(value: Any) -> Any:
    if type(value) is Layout:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return [_without_data(item) for item in value] if isinstance(value, tuple) else value


def _text(shapes: Sequence[tuple[int, ...] | None]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" if shape is not None else "none" for shape in shapes)
