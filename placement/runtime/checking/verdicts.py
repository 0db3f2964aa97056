"""A use computed with real numbers, whole and in parts: what parts make, put together, is what the whole call makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import Layout, TensorInfo, flat, row_major, value_of
from placement.runtime.calls.local_calls import (
    Extras,
    LocalCall,
    bn_sums_call,
    borders_needed,
    class_sums_call,
    label_weight,
    label_weight_call,
    local_call,
)
from placement.runtime.checking.smaller_calls import Smaller, candidates, shapes_of
from placement.runtime.checking.uses import ReadPart, Use, UsePart
from placement.runtime.parts.layouts import PartCut, PartLayout, compact, take
from placement.runtime.planning.forms import info_of
from placement.runtime.writing.glue import as_captured

_DOUBLE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
_DOUBLE |= {torch.complex64: torch.complex128}
_CLOSE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3}
_ROUGHLY = 5e-2  # of narrower formats
_TRUSTING = "backward", "_unsafe"  # in names of kernels that write where indices say, even where there is no memory
_CONVERTS = torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default
_MOST_DRAWS = 6  # ranges of integers that are tried

SAME, DIFFERS, NOT_COMPUTED = "same", "differs", "not computed"  # verdicts


class _NotComputedError(Exception):
    """A call cannot be made with the numbers at hand."""


def verdict(use: Use) -> str:
    """Whether a use is `SAME` as the whole call, or `DIFFERS`; `NOT_COMPUTED` where that could not be tried."""
    if use.is_of_lists or _number_anew(use) or _adds_up_counts(use):
        return NOT_COMPUTED
    found = NOT_COMPUTED
    for smaller in candidates(use):
        for dtypes in (_DOUBLE, {}):
            try:
                found = _Trial(use, smaller, dtypes).verdict()
            except Exception:  # numbers or sizes that this operator does not take
                continue
            if found == SAME:
                return SAME
            break
    return found


class _Trial:
    """A use at some sizes, in some formats of numbers."""

    def __init__(self, use: Use, smaller: Smaller, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        self._use, self._smaller, self._dtypes = use, smaller, dtypes
        self._random = torch.Generator().manual_seed(0)
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}
        for argument in use.node.all_input_nodes:
            info = info_of(argument)
            if info is None:
                raise _NotComputedError
            node = self._nodes[argument] = self._graph.placeholder("x")
            layout, shape = info.layout, smaller.shape(info.layout.shape)
            same_order = Layout(shape, _strides(shape, layout.stride), self._dtype(layout.dtype))
            node.meta["info"] = TensorInfo(same_order, 0, info.offset)
        args, kwargs = self._argument(use.node.args), self._argument(dict(use.node.kwargs))
        self._node = self._graph.call_function(use.node.target, args, kwargs)  # type: ignore[arg-type]
        self._node.meta.update({"module": use.node.meta.get("module")})
        self._given, self._made = self._drawn()
        self._shapes = {node: tuple(tensor.shape) for node, tensor in self._given.items()}
        self._summands: dict[fx.Node, dict[tuple[int, ...], torch.Tensor]] = {}

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtypes.get(dtype, dtype)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._nodes[value]
        if isinstance(value, dict):
            return {name: self._argument(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, torch.dtype):
            return self._dtype(value)
        return torch.device("cpu") if isinstance(value, torch.device) else self._smaller.argument(value)

    # -- the whole call -----------------------------------------------------------------------------------------

    def _drawn(self) -> tuple[dict[fx.Node, torch.Tensor], list[Any]]:
        """Numbers for all arguments, integers as large as the call takes, and what it makes of them.

        They are finite where they can be: counts are divisors, and of what is divided by none no parts can be told.
        """
        found: tuple[dict[fx.Node, torch.Tensor], list[Any]] | None = None
        for low, high in self._ranges():
            given = {node: self._numbers(value_of(node).layout, low, high) for node in self._nodes.values()}
            try:
                self._determine(given)
                made = self._run(LocalCall(self._node.target, self._node.args, self._node.kwargs), given)  # type: ignore[arg-type]
            except (IndexError, RuntimeError):
                continue
            is_finite = all(bool(one.isfinite().all()) for one in made if isinstance(one, torch.Tensor))
            found = (given, made) if is_finite or found is None else found
            if is_finite:
                break
        if found is None:
            raise _NotComputedError
        given, made = found
        outputs = [_info(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else None for one in made]
        is_one = type(value_of(self._use.node)) is TensorInfo
        self._node.meta["info"] = outputs[0] if is_one else tuple(outputs)
        return {node: given[node] for node in self._node.all_input_nodes}, made

    def _ranges(self) -> list[tuple[int, int]]:
        """The least integer, and what integers stay below."""
        layouts = [value_of(node).layout for node in self._nodes.values()]
        if all(_is_of_numbers(layout.dtype) for layout in layouts):
            return [(0, 2)]
        if any(word in str(self._node.target) for word in _TRUSTING):
            sizes = [size for shape in shapes_of(self._use) for size in self._smaller.shape(shape)]
            return [(0, max(1, min(sizes, default=1)))]
        numbers = {size for layout in layouts for size in layout.shape}
        numbers |= {one for one in flat((self._node.args, self._node.kwargs)) if type(one) is int and one > 0}
        highs = [*sorted((n for n in numbers if n < 1 << 31), reverse=True)[:_MOST_DRAWS], 1]
        return [(0, high) for high in highs] + [(1, high + 1) for high in highs]

    def _numbers(self, layout: Layout, low: int, high: int) -> torch.Tensor:
        """Away from zero, so that logarithms and quotients are tame."""
        shape, stride, dtype = layout
        if not _is_of_numbers(dtype):
            found = torch.randint(low, high, shape, generator=self._random).to(dtype)
        else:
            found = torch.rand(shape, generator=self._random, dtype=torch.float64) + 0.5
            found = (torch.complex(found, found.flip(0) if shape else found) if dtype.is_complex else found).to(dtype)
        return torch.empty_strided(shape, stride, dtype=dtype).copy_(found)

    def _determine(self, given: dict[fx.Node, torch.Tensor]) -> None:
        """Give arguments that others determine the values that they have in a model."""
        name = str(self._node.target)
        args = self._node.args
        if "nll_loss" in name and "backward" in name:
            weight = given[args[3]] if isinstance(args[3], fx.Node) else None
            total = label_weight(given[args[2]], weight, int(args[5]))  # type: ignore[index,arg-type]
            given[args[-1]] = total.to(given[args[-1]].dtype)  # type: ignore[index]
        if "native_batch_norm_backward" in name:
            x = given[args[1]]  # type: ignore[index]
            variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
            values = mean, (variance + float(args[8])).rsqrt()  # type: ignore[arg-type]
            for node, value in zip(args[5:7], values, strict=True):
                if isinstance(node, fx.Node):
                    given[node] = value.to(given[node].dtype)
        if "grouped_mm" in name:  # groups end one after the other, the last one with the tokens
            ends = next(node for node, each in given.items() if not _is_of_numbers(each.dtype))
            x, y = (given[arg] for arg in args[:2])  # type: ignore[index]
            n_tokens = x.shape[0] if y.ndim == 3 else y.shape[0]
            given[ends] = (given[ends] % (n_tokens + 1)).sort().values
            given[ends][-1] = n_tokens
        if "max_pool" in name and "backward" in name:  # else it would write where there is no memory
            forward = getattr(torch.ops.aten, name.split(".")[1].removesuffix("_backward")).default
            given[args[-1]] = forward(given[args[1]], *args[2:-1])[1]  # type: ignore[index]

    # -- parts --------------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """Whether the parts, put together, are what the call makes."""
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in self._made]
        sums: list[dict[Any, torch.Tensor]] = [{} for _ in self._made]
        for each in self._use.places:
            place = self._smaller.place(each, self._nodes, self._shapes, shapes)
            for slot, one in enumerate(self._part(place)):
                part = place.outputs[slot]
                if part is not None and isinstance(one, torch.Tensor):
                    key = place.groups[slot], part
                    sums[slot][key] = sums[slot][key] + one if key in sums[slot] else one
        of_parts = zip(self._made, sums, strict=True)
        compared = ((one, take(whole, part)) for whole, found in of_parts for (_, part), one in found.items())
        return SAME if all(_is_close(one, expected) for one, expected in compared) else DIFFERS

    def _part(self, place: UsePart) -> list[Any]:
        """Results of one part."""
        given = {node: self._operand(node, operand) for node, operand in place.operands.items()}
        parts = {node: operand.part for node, operand in place.operands.items()}
        extras = self._extras(place, parts, given)
        local = local_call(self._node, parts, place.outputs, extras)
        return self._run(local, given)

    def _run(self, call: LocalCall, given: Mapping[fx.Node, torch.Tensor]) -> list[Any]:
        """Flat results of the call itself or of what stands in for it."""
        return _run(as_captured(self._node, call.target), call.args, call.kwargs, given)

    def _operand(self, node: fx.Node, operand: ReadPart) -> torch.Tensor:
        whole = self._given[node]
        if operand.is_zero:
            whole = torch.zeros_like(whole)
        elif operand.summand:
            whole = self._summand(node, operand.summand)
        if operand.part.is_whole:
            return whole.contiguous() if operand.is_dense else whole
        return compact(take(whole, operand.part))

    def _summand(self, node: fx.Node, number: tuple[int, ...]) -> torch.Tensor:
        """One of the summands, which are drawn, and the last of which is what is missing."""
        if node not in self._summands:
            old = next(old for old, new in self._nodes.items() if new is node)
            every = sorted({place.operands[old].summand for place in self._use.places})
            whole = self._given[node]
            if whole.dtype is torch.bool:
                raise _NotComputedError
            drawn = [self._like(whole) for _ in every[1:]]
            first = whole - sum(drawn) if drawn else whole
            self._summands[node] = dict(zip(every, [first, *drawn], strict=True))
        return self._summands[node][number]

    def _like(self, whole: torch.Tensor) -> torch.Tensor:
        if not _is_of_numbers(whole.dtype):
            return torch.zeros_like(whole)
        return whole * (torch.rand(whole.shape, generator=self._random, dtype=torch.float64) - 0.5).to(whole.dtype)

    def _extras(
        self, place: UsePart, parts: Mapping[fx.Node, PartLayout], given: dict[fx.Node, torch.Tensor]
    ) -> Extras:
        """Extras of a part beside its arguments, entered into ``given`` under nodes of its own."""
        found: dict[str, fx.Node] = {}
        weight = label_weight_call(self._node, parts)
        if weight is not None:
            found["label_weight"] = self._graph.placeholder("labels")
            given[found["label_weight"]] = _call(weight, self._given)
        sums = bn_sums_call(self._node, parts) if self._use.puts_together else None
        if sums is not None:
            of_channels = {node: PartLayout(part.shape, _of_channels(part)) for node, part in parts.items()}
            found["sums"] = self._graph.placeholder("sums")
            given[found["sums"]] = _call(sums, {n: take(self._given[n], part) for n, part in of_channels.items()})
        of_classes = class_sums_call(self._node, parts)
        if of_classes is not None:  # as of one part that has them all
            node, dim = of_classes.args
            others = PartLayout(parts[node].shape, tuple(cut for cut in parts[node].cuts if cut.dim != dim))
            found["class_sums"] = self._graph.placeholder("class_sums")
            given[found["class_sums"]] = _call(of_classes, {node: take(self._given[node], others)})
        borders: dict[fx.Node, list[fx.Node | None]] = {}
        for node, dim in place.halo:
            sides = borders.setdefault(node, [None, None])
            for side, piece in enumerate(self._beside(node, parts[node], dim)):
                if piece is not None:
                    sides[side] = self._graph.placeholder("border")
                    given[sides[side]] = piece  # type: ignore[index]
        return Extras(**found, borders={node: (a, b) for node, (a, b) in borders.items()})  # type: ignore[arg-type]

    def _beside(self, node: fx.Node, part: PartLayout, dim: int) -> Iterator[torch.Tensor | None]:
        """The entries before and after a part, that the call reads."""
        (start, stop), size = part.runs(dim)[0], part.shape[dim]
        before, after = borders_needed(self._node, node, dim)
        others = tuple(cut for cut in part.cuts if cut.dim != dim)
        for low, high in ((max(start - before, 0), start), (stop, min(stop + after, size))):
            border = PartLayout(part.shape, (*others, PartCut(dim, 1, size, low, high)))
            yield compact(take(self._given[node], border)).contiguous() if high > low else None


def _number_anew(use: Use) -> bool:
    """Whether parts number what they have from 0 on: bags, tokens sorted by their experts and those of each, and
    entries that are looked up by counting them out.
    """
    name = str(use.node.target)
    sorts = name.startswith(("aten.sort.", "aten.argsort.")) and not _is_of_numbers(
        value_of(use.node.all_input_nodes[0]).layout.dtype
    )
    own_groups = "grouped_mm" in name and any(part.summand for part in use.places[0].operands.values())
    return (
        "embedding_bag" in name
        or sorts
        or own_groups
        or ("index" in name and any(map(_is_counted_out, use.node.all_input_nodes)))
    )


def _adds_up_counts(use: Use) -> bool:
    """Whether it makes integers of summands of another format, which are whole numbers in a model, and not here."""
    made = [info for info in flat(value_of(use.node)) if isinstance(info, TensorInfo)]
    read = [node for node, part in use.places[0].operands.items() if part.summand]
    is_of_integers = all(not _is_of_numbers(info.layout.dtype) for info in made)
    return is_of_integers and any(_is_of_numbers(value_of(node).layout.dtype) for node in read)


def _is_counted_out(node: fx.Node) -> bool:
    while node.target in _CONVERTS:
        node = node.all_input_nodes[0]
    return str(node.target).startswith("aten.arange.")


def _of_channels(part: PartLayout) -> tuple[PartCut, ...]:
    return part.cuts if len(part.shape) == 1 else tuple(cut for cut in part.cuts if cut.dim == 1)


def _call(call: LocalCall, given: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = _run(call.target, call.args, call.kwargs, given)[0]
    return result


def _run(target: Any, args: Any, kwargs: Any, given: Mapping[fx.Node, torch.Tensor]) -> list[Any]:
    """Flat results of a call, which may overwrite copies of its arguments."""
    copies: dict[fx.Node, torch.Tensor] = {}

    def value(node: fx.Node) -> torch.Tensor:
        if node not in copies:
            copies[node] = given[node].clone()
        return copies[node]

    args, kwargs = fx.map_arg((args, kwargs), value)
    with torch.no_grad():
        return flat(target(*args, **kwargs))


def _is_of_numbers(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not _is_of_numbers(expected.dtype):
        return bool(torch.equal(found.to(expected.dtype), expected))
    relative = max(_CLOSE.get(one.dtype, _ROUGHLY) for one in (found, expected))
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    finite = expected.abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    return bool(torch.allclose(found, expected, rtol=relative, atol=relative * scale, equal_nan=True))


def _strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, the dimensions in the order of other strides."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        found[dim], step = step, step * max(shape[dim], 1)
    return tuple(found)


def _info(shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    shape = tuple(shape)
    return TensorInfo(Layout(shape, row_major(shape), dtype), 0, 0)
