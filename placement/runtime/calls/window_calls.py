"""Convolution and pooling on parts: of samples, of channels, and of a stretch of an image beside its neighbours'.

A part of an image is extended by entries of its neighbours, as many as its windows reach beyond it, and by padding at
the edges of the image alone; on that, the operator runs without padding along the dimension that is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import value_of
from placement.runtime.calls.part_calls import (
    Extras,
    Handlers,
    LocalCall,
    PartCall,
    ReadTensor,
    aten,
    part_call,
)
from placement.runtime.parts.layouts import PartLayout

WINDOWS = Handlers()
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "convolution_overrideable")
_MAXIMA = ("max_pool1d", "max_pool2d", "max_pool3d")
_MEANS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")
_BACKWARD = ("convolution_backward",)


# -- windows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """How windows lie along one dimension.

    Attributes:
        reach: entries from the first to the last of a window.
        stride: entries from one window to the next.
        before: padding before the first entry, and as many entries of the neighbour before does a stretch need.
        after: entries of the neighbour after that it needs; negative where it does not need all of its own.
    """

    reach: int
    stride: int
    before: int
    after: int


def _window(call: PartCall, dim: int) -> _Window:
    i = dim - 2
    is_pool = call.name in (*_MAXIMA, *_MEANS)
    size = _entry(call["kernel_size"], i) if is_pool else call["weight"].layout.shape[dim]
    reach = _entry(call["dilation"] or 1, i) * (size - 1) + 1
    stride, padding = _entry(call["stride"] or call["kernel_size"], i), call["padding"]
    if padding == "same":
        return _Window(reach, stride, (reach - 1) // 2, reach // 2)
    before = 0 if isinstance(padding, str) else _entry(padding, i)
    return _Window(reach, stride, before, reach - stride - before)


def _entry(value: Any, i: int) -> int:
    """Entry i of a setting that may be one number for all."""
    if isinstance(value, (tuple, list)):
        return int(value[i] if len(value) > 1 else value[0])
    return int(value)


def borders_needed(node: fx.Node, argument: fx.Node, dim: int) -> tuple[int, int]:
    """How many of its neighbours' entries a call needs of an argument that is cut along ``dim``.

    Returns:
        Those before and those after its own. At the edge of the image, and near it, fewer are there.
    """
    inputs = {
        one: PartLayout(info.layout.shape) for one in node.all_input_nodes if hasattr(info := value_of(one), "layout")
    }
    call = part_call(node, inputs, (), Extras())
    if dim < 2 or call.name not in (*_CONVOLUTIONS, *_MAXIMA, *_MEANS, *_BACKWARD):
        return 0, 0
    window = _window(call, dim)
    before, after = max(window.before, 0), max(window.after, 0)
    if call.name not in _BACKWARD:
        return (before, after) if argument is call.first.node else (0, 0)
    if argument is call["input"].node:
        return before, after
    return (after, before) if argument is call["grad_output"].node else (0, 0)


# -- numbers -----------------------------------------------------------------------------------------------------------


def extended(
    x: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    dim: int,
    counts: tuple[int, int],
    padding: float,
) -> torch.Tensor:
    """A stretch of a tensor with entries of its neighbours beside it.

    Args:
        before, after: the neighbours' entries; None at the edges.
        counts: how many are needed; a negative number cuts off entries of the stretch itself.
        padding: what stands for those that are not there.
    """
    if counts[1] < 0:
        x = x.narrow(dim, 0, x.shape[dim] + counts[1])
    pieces = [x]
    for side, (border, count) in enumerate(zip((before, after), counts, strict=True)):
        missing = count - (0 if border is None else border.shape[dim])
        given = [] if border is None else [border]
        if missing > 0:
            size = [missing if d == dim else n for d, n in enumerate(x.shape)]
            given.insert(0 if side == 0 else len(given), x.new_full(size, padding))
        pieces = [*given, *pieces] if side == 0 else [*pieces, *given]
    return torch.cat(pieces, dim) if len(pieces) > 1 else x


@dataclass(frozen=True)
class Windowed:
    """Calls an operator on an extended stretch.

    Attributes:
        factors: of each entry of the result along the dimension, where means are of fewer entries at the edges.
    """

    target: Callable[..., torch.Tensor]
    dim: int
    counts: tuple[int, int]
    padding: float = 0.0
    factors: tuple[float, ...] = ()
    __name__ = "windowed"

    def __call__(
        self, before: torch.Tensor | None, after: torch.Tensor | None, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        result = self.target(extended(x, before, after, self.dim, self.counts, self.padding), *args, **kwargs)
        if self.factors:
            factors = result.new_tensor(self.factors)
            result.mul_(factors.view(-1, *(1,) * (result.ndim - self.dim - 1)))
        return result


@dataclass(frozen=True)
class WindowedBackward:
    """The backward pass of a convolution of stride 1 on a stretch of an image.

    The gradient of its input is that of its own entries, for which it needs the neighbours' gradients; to the gradient
    of the weights its own entries of the result contribute, for which it needs the neighbours' inputs.
    """

    target: Callable[..., Any]
    dim: int
    counts: tuple[int, int]
    reach: int
    __name__ = "windowed_backward"

    def __call__(
        self,
        gradient_borders: tuple[torch.Tensor | None, torch.Tensor | None],
        input_borders: tuple[torch.Tensor | None, torch.Tensor | None],
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Any,
        *settings: Any,
    ) -> Any:
        stride, padding, *rest, output_mask = settings
        of_input, of_weight, of_bias = None, None, None
        if output_mask[0]:
            wide = extended(gradient, *gradient_borders, self.dim, self.counts[::-1], 0.0)
            around = _with_entry(padding, self.dim - 2, self.reach - 1)
            mask = [True, False, False]
            of_input = self.target(wide, x, weight, None, stride, around, *rest, mask)[0]
        if output_mask[1] or output_mask[2]:
            wide = extended(x, *input_borders, self.dim, self.counts, 0.0)
            none = _with_entry(padding, self.dim - 2, 0)
            mask = [False, *output_mask[1:]]
            _, of_weight, of_bias = self.target(gradient, wide, weight, bias_sizes, stride, none, *rest, mask)
        return of_input, of_weight, of_bias


def _with_entry(values: Any, i: int, value: int) -> list[int]:
    return [value if k == i else one for k, one in enumerate(values)]


# -- calls -------------------------------------------------------------------------------------------------------------


def _local_groups(call: PartCall) -> int:
    """Number of the groups of channels that are here."""
    groups: int = call["groups"]
    channels = call["input"].part
    return groups * channels.local_shape[1] // channels.shape[1] if groups > 1 else groups


def _cut_dim(call: PartCall) -> int:
    """The dimension of the image that is cut; 0 for none."""
    dims = {cut.dim for part in (call.first.part, call.output) for cut in part.coarse_cuts if cut.dim > 1}
    if len(dims) > 1:
        raise call.refused("its images are cut along several dimensions")
    return dims.pop() if dims else 0


def _borders(call: PartCall, operand: ReadTensor, dim: int, counts: tuple[int, int]) -> tuple[Any, Any]:
    """The nodes of the neighbours' entries.

    Raises:
        StrategyError: entries that are needed are not given.
    """
    before, after = call.extras.borders.get(operand.node, (None, None))
    ((start, stop),) = operand.part.runs(dim)
    for needed, border, is_inside in zip(
        counts, (before, after), (start > 0, stop < operand.part.shape[dim]), strict=True
    ):
        if needed > 0 and is_inside and border is None:
            raise call.refused("it lacks entries of its neighbours")
    return before, after


def _stretch(call: PartCall, part: PartLayout, dim: int) -> tuple[int, int]:
    runs = part.runs(dim)
    if len(runs) != 1:
        raise call.refused("the entries of its images that are here do not lie side by side")
    return runs[0]


def _check_aligned(call: PartCall, dim: int, stride: int) -> None:
    start, stop = _stretch(call, call.first.part, dim)
    first, last = _stretch(call, call.output, dim)
    if (start, stop) != (first * stride, last * stride):
        raise call.refused("its windows do not lie beside the entries that are here")


def _paddings(call: PartCall, dim: int) -> list[int]:
    """Padding of each dimension of the image, none of the one that is cut."""
    found = [_window(call, d) for d in range(2, len(call.first.layout.shape))]
    is_even = any(window.reach % 2 == 0 for d, window in enumerate(found, start=2) if d != dim)
    if call["padding"] == "same" and is_even:
        raise call.refused("padding 'same' with a kernel of even size has unequal sides")
    return _with_entry([window.before for window in found], dim - 2, 0)


@WINDOWS.on(*_CONVOLUTIONS)
def _convolution(call: PartCall) -> LocalCall:
    dim = _cut_dim(call)
    if not dim:
        return call.plain(groups=_local_groups(call))
    window = _window(call, dim)
    counts = window.before, window.after
    _check_aligned(call, dim, window.stride)
    borders = _borders(call, call.first, dim, counts)
    target = call.target
    if isinstance(call["padding"], str):
        target = getattr(aten, call.name).default
    local = call.plain(Windowed(target, dim, counts), padding=_paddings(call, dim), groups=_local_groups(call))
    return LocalCall(local.target, (*borders, *local.args), local.kwargs)


@WINDOWS.on("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(call: PartCall) -> LocalCall:
    return call.plain(groups=_local_groups(call))


@WINDOWS.on(*_MAXIMA, *_MEANS)
def _pool(call: PartCall) -> LocalCall:
    dim = _cut_dim(call) if len(call.first.layout.shape) > int(call.name[-2]) + 1 else 0
    if not dim:
        return call.plain()
    window = _window(call, dim)
    counts = window.before, window.after
    _check_aligned(call, dim, window.stride)
    borders = _borders(call, call.first, dim, counts)
    if call.name in _MAXIMA:
        target = Windowed(call.target, dim, counts, float("-inf"))
    else:
        target = Windowed(call.target, dim, counts, 0.0, _factors(call, window, dim))
    local = call.plain(target, padding=_paddings(call, dim))
    return LocalCall(target, (*borders, *local.args), local.kwargs)


def _factors(call: PartCall, window: _Window, dim: int) -> tuple[float, ...]:
    """Factors that correct means over windows that reach beyond the image; empty where none do."""
    if call["divisor_override"]:
        return ()
    margin = window.before if call["count_include_pad"] else 0
    length = call.first.part.shape[dim]
    factors = []
    for i in range(*_stretch(call, call.output, dim)):
        start = i * window.stride - window.before
        factors.append(window.reach / (min(start + window.reach, length + margin) - max(start, -margin)))
    return tuple(factors) if set(factors) != {1.0} else ()


@WINDOWS.on(*_BACKWARD)
def _convolution_backward(call: PartCall) -> LocalCall:
    changes: dict[str, Any] = {"groups": _local_groups(call)}
    if call["bias_sizes"] is not None:
        changes["bias_sizes"] = [call["grad_output"].part.local_shape[1]]
    dims = {cut.dim for name in ("grad_output", "input") for cut in call[name].part.coarse_cuts if cut.dim > 1}
    if not dims:
        return call.plain(None, **changes)
    if len(dims) > 1:
        raise call.refused("its images are cut along several dimensions")
    dim = dims.pop()
    window = _window(call, dim)
    x, gradient = call["input"], call["grad_output"]
    if call["transposed"] or window.stride != 1 or _stretch(call, x.part, dim) != _stretch(call, gradient.part, dim):
        raise call.refused("its windows leap")
    counts = window.before, window.after
    borders = [_borders(call, one, dim, side) for one, side in ((gradient, counts[::-1]), (x, counts))]
    local = call.plain(WindowedBackward(call.target, dim, counts, window.reach), **changes)
    return LocalCall(local.target, (*borders, *local.args), local.kwargs)
