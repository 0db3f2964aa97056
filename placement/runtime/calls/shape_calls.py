"""Calls with sizes, numbers of channels or of groups among their arguments, and those that make tensors of nothing."""

from __future__ import annotations

import math
from typing import Any

from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall, aten

SHAPES = Handlers()


def local_stride(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a smaller tensor whose dimensions lie in the same order."""
    result, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda d: (stride[d], -d)):
        result[dim] = step
        step *= max(size[dim], 1)
    return tuple(result)


def _scaled(number: int, local: int, whole: int) -> int:
    """A number of groups or channels, where ``local`` of ``whole`` entries are here."""
    return number * local // whole


# Names of arguments that are the shape of the result, where they are equal to it.
_SIZES = ("size", "input_sizes", "input_size")


def sized(call: PartCall) -> LocalCall:
    """The call with the local shape of its result wherever it is told that of the whole."""
    shape = call.output.shape if any(call.outputs) else None
    changes: dict[str, Any] = {
        name: call.output.local_shape for name in _SIZES if shape is not None and call[name] == shape
    }
    return call.plain(None, **changes)


@SHAPES.on("empty_strided", "new_empty_strided")
def _strided(call: PartCall) -> LocalCall:
    size = call.output.local_shape
    return call.plain(size=size, stride=local_stride(size, tuple(call["stride"])))


_NEW: dict[str, Any] = {"zeros_like": aten.new_zeros.default, "ones_like": aten.new_ones.default}
_NEW |= {"full_like": aten.new_full.default, "empty_like": aten.new_empty.default}


@SHAPES.on(*_NEW)
def _like(call: PartCall) -> LocalCall:
    """Call on an argument that may be cut in another way."""
    size = call.output.local_shape
    if call.first.have.local_shape == size:
        return call.plain()
    kwargs = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
    return LocalCall(_NEW[call.name], (call.first, size, *call.args[1:]), kwargs)


@SHAPES.on(
    "arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices", "randperm", "rand", "randn", "randint"
)
def _by_position(call: PartCall) -> LocalCall:
    """Values that depend on the place in the whole tensor, or are drawn for all of it."""
    return call.made_whole()


@SHAPES.on("select_backward", "slice_backward")
def _slice_backward(call: PartCall) -> LocalCall:
    """Zeros of the size of the forward call's argument, but for a slice along a dimension that is not cut."""
    if call.output.along(call["dim"] % len(call.output.shape)):
        raise call.refused("the dimension that it writes a slice of is cut")
    return call.plain(input_sizes=call.output.local_shape)


@SHAPES.on("affine_grid_generator", "affine_grid_generator_backward")
def _grid(call: PartCall) -> LocalCall:
    return call.plain(size=[call.output.local_shape[0], *call["size"][1:]])


@SHAPES.on("native_group_norm", "native_group_norm_backward")
def _native_group_norm(call: PartCall) -> LocalCall:
    part = call["input"].part
    n, c = part.local_shape[:2]
    return call.plain(N=n, C=c, HxW=math.prod(part.local_shape[2:]), group=_scaled(call["group"], c, part.shape[1]))


@SHAPES.on("group_norm")
def _group_norm(call: PartCall) -> LocalCall:
    part = call["input"].part
    return call.plain(num_groups=_scaled(call["num_groups"], part.local_shape[1], part.shape[1]))
