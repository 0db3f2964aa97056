"""Views and copies in another shape on parts of their tensors."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import fx

from graphs.capture.costs import signature
from graphs.capture.trace import row_major
from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall, aten
from placement.runtime.parts.layouts import PartLayout

VIEWS = Handlers()


@VIEWS.on(
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "_reshape_alias", "view_copy", "_reshape_copy"),
    *("_reshape_alias_copy", "view_as", "reshape_as"),
)
def _reshaped(call: PartCall) -> LocalCall:
    """Other dimensions of the same elements in the same order; a part may lie in memory as no view allows."""
    if "dtype" in str(call.node.target):
        return call.plain()
    have, want = (_in_order(part) for part in (call.first.part, call.output))
    if have != want:
        if call.first.have.is_whole:
            return call.made_whole()
        raise call.refused("its argument and its result are cut along different stretches")
    target = aten.view.default if _is_written(call.node) else aten.reshape.default
    return LocalCall(target, (call.first, list(call.output.local_shape)), {})


def _in_order(part: PartLayout) -> frozenset[tuple[int, ...]]:
    """The cuts of a part as stretches of its elements in row-major order."""
    strides = [1, *accumulate(part.shape[:0:-1], int.__mul__)][::-1]
    return frozenset((cut.unit * strides[cut.dim], *cut[2:]) for cut in part.coarse_cuts)


def _is_written(node: fx.Node) -> bool:
    """Whether a later call writes into a view, itself or through another view."""
    for user in node.users:
        if user.op != "call_function":
            continue
        facts = signature(user.target)
        if node in facts.written_by(user) or (facts.may_alias and _is_written(user)):
            return True
    return False


@VIEWS.on(
    *("transpose", "t", "permute", "unsqueeze", "detach", "detach_", "alias", "contiguous", "lift_fresh", "movedim"),
    *("swapaxes", "swapdims", "numpy_T", "mT", "matrix_H", "mH", "adjoint", "view_as_real", "view_as_complex"),
    *("real", "imag", "conj", "_conj", "_neg_view", "resolve_conj", "resolve_neg"),
)
def _same(call: PartCall) -> LocalCall:
    """Each dimension of the argument is one of the result."""
    return call.plain()


@VIEWS.on("expand", "expand_as")
def _expanded(call: PartCall) -> LocalCall:
    if call.is_cut_later:
        return call.made_whole()
    return LocalCall(aten.expand.default, (call.first, list(call.output.local_shape)), {})


@VIEWS.on("repeat")
def _repeated(call: PartCall) -> LocalCall:
    if call.is_cut_later:
        return call.made_whole()
    size, wanted = call.first.part.local_shape, call.output.local_shape
    size = (1,) * (len(wanted) - len(size)) + size
    return call.plain(repeats=[made // max(count, 1) for made, count in zip(wanted, size, strict=True)])


@VIEWS.on("squeeze", "squeeze_")
def _squeezed(call: PartCall) -> LocalCall:
    """Without the dimensions of one entry; those of which one entry is here stay."""
    shape = call.first.part.shape
    given = call["dim"]
    dims = range(len(shape)) if given is None else given if isinstance(given, (tuple, list)) else (given,)
    return LocalCall(aten.squeeze.dims, (call.first, [d for d in dims if shape[d] == 1]), {})


@VIEWS.on("slice", "narrow")
def _sliced(call: PartCall) -> LocalCall:
    part = call.first.part
    dim = call["dim"] % len(part.shape)
    if not part.along(dim) and not call.output.along(dim):
        return call.plain()
    length = part.shape[dim]
    if call.name == "narrow":
        start, step = call["start"] % max(length, 1), 1
    else:
        start, _, step = slice(call["start"], call["end"], call["step"]).indices(length)
    wanted = [start + step * i for low, high in call.output.runs(dim) for i in range(low, high)]
    here = [i for low, high in part.runs(dim) for i in range(low, high)]
    place = {position: i for i, position in enumerate(here)}
    found = [place.get(position, -1) for position in wanted]
    if -1 in found or not found:
        raise call.refused("its slice is not here")
    leap = found[1] - found[0] if len(found) > 1 else 1
    if leap > 0 and found == list(range(found[0], found[-1] + 1, leap)):
        return LocalCall(aten.slice.Tensor, (call.first, dim, found[0], found[-1] + 1, leap), {})
    if part.along(dim):
        raise call.refused("its slice and its part are no stretch")
    return call.made_whole()


@VIEWS.on("select")
def _selected(call: PartCall) -> LocalCall:
    part = call.first.part
    dim = call["dim"] % len(part.shape)
    index = call["index"] % part.shape[dim]
    before = 0
    for start, stop in part.runs(dim):
        if start <= index < stop:
            return call.plain(index=before + index - start)
        before += stop - start
    raise call.refused(f"entry {index} of a dimension that is cut is not here")


@VIEWS.on(
    "split",
    "split_with_sizes",
    "chunk",
    "split_with_sizes_copy",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsafe_chunk",
)
def _split(call: PartCall) -> LocalCall:
    """Blocks along a dimension, of each of which a part is here."""
    part = call.first.part
    dim = call["dim"] % len(part.shape)
    made = [out for out in call.outputs if out is not None]
    if not any(one.along(dim) for one in (part, *made)):
        return call.plain()
    ends = [0, *accumulate(out.shape[dim] for out in made)]
    for out, low, high in zip(made, ends, ends[1:], strict=False):
        inside = [(max(a, low), min(b, high)) for a, b in part.runs(dim) if a < high and b > low]
        if sum(b - a for a, b in inside) != out.local_shape[dim]:
            if part.is_whole:
                return call.made_whole()
            raise call.refused("its blocks are not cut as its argument is")
    sizes = [out.local_shape[dim] for out in made]
    return LocalCall(aten.split_with_sizes.default, (call.first, sizes, dim), {})


@VIEWS.on("diagonal")
def _diagonal(call: PartCall) -> LocalCall:
    part = call.first.part
    if any(part.along(call[name] % len(part.shape)) for name in ("dim1", "dim2")):
        raise call.refused("it takes a diagonal across a dimension that is cut")
    return call.plain()


@VIEWS.on("unbind")
def _unbound(call: PartCall) -> LocalCall:
    part = call.first.part
    if part.along(call["dim"] % len(part.shape)):
        raise call.refused("each entry of a dimension that is cut becomes a tensor")
    return call.plain()


@VIEWS.on("unfold", "diagonal")
def _windows(call: PartCall) -> LocalCall:
    """Windows of one dimension, or the diagonal of two; the others stay as they are."""
    names = ("dimension",) if call.name == "unfold" else ("dim1", "dim2")
    for dim in (call[name] % len(call.first.part.shape) for name in names):
        if call.first.part.along(dim):
            raise call.refused(f"it takes dimension {dim} together, which is cut")
    return call.plain()


@VIEWS.on("as_strided")
def _strided(call: PartCall) -> LocalCall:
    """Entries at places in memory: a stretch of the outermost dimension, which both have, lies as the whole does."""
    part, made = call.first.part, call.output
    if part.is_whole:
        return call.plain() if made.is_whole else call.made_whole()
    if math.prod(part.shape) == math.prod(made.shape) and tuple(call["stride"]) == row_major(made.shape):
        return _reshaped(call)
    strides, stride = row_major(part.shape), call["stride"]
    have = {(cut.unit * strides[cut.dim], *cut[2:]) for cut in part.coarse_cuts}
    want = {(cut.unit * stride[cut.dim], *cut[2:]) for cut in made.coarse_cuts}
    outer = max(range(len(stride)), key=stride.__getitem__)
    rest = sum((n - 1) * step for d, (n, step) in enumerate(zip(made.shape, stride, strict=True)) if d != outer)
    is_outermost = stride[outer] * made.shape[outer] == math.prod(part.shape) and rest < stride[outer]
    is_outermost &= all(cut.dim == outer for cut in made.coarse_cuts)
    if have != want or not is_outermost or call.first.layout.stride != strides or call["storage_offset"]:
        raise call.refused("it takes entries by their places in memory")
    return LocalCall(strided, (call.first, list(made.local_shape), list(stride)), {})


def strided(x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """Entries of a tensor at places in its memory, as if it had no gaps."""
    whole = x.contiguous()
    return whole.as_strided(size, stride, whole.storage_offset())


@VIEWS.on("_assert_tensor_metadata")
def _assertion(call: PartCall) -> LocalCall:
    """It holds of the whole tensor; a part has other sizes."""
    return call.plain(size=None, stride=None)
