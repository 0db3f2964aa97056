"""Functions that the code of a rank calls between the ops of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import Layout, row_major, value_of
from placement.runtime.parts.layouts import PartLayout, compact, join, take_from


def begin(collectives: Any, number: int, *tensors: torch.Tensor) -> Any:
    """Begin an exchange; does not wait."""
    return collectives.start(number, tensors)


def finish(collectives: Any, handle: Any) -> Any:
    """Wait for an exchange: the tensors it gives."""
    return collectives.finish(handle)


def added(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The sum, in the memory of the first."""
    return total.add_(more)


@dataclass(frozen=True)
class TakePart:
    """Takes a part of a part."""

    have: PartLayout
    want: PartLayout
    __name__ = "take_part"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return compact(take_from(tensor, self.have, self.want))


@dataclass(frozen=True)
class Join:
    """Puts parts together."""

    parts: tuple[PartLayout, ...]
    want: PartLayout
    __name__ = "join_parts"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return join(self.want, list(zip(self.parts, tensors, strict=True)))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def edge_of(tensor: torch.Tensor, dim: int, start: int, count: int) -> torch.Tensor:
    """Some entries of a dimension, without gaps, for a neighbour."""
    return tensor.narrow(dim, start, count).contiguous()


def nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


# Their backward pass is another one for matrices that lie row by row: it was captured for one of the two.
_BY_ORDER = {
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
    torch.ops.aten._linalg_solve_ex.default,
}


@dataclass(frozen=True)
class AsCaptured:
    """Calls an operator that looks at how its first argument lies in memory, with one that lies as the captured one.

    A tensor that was gathered, received or cut may lie otherwise.
    """

    target: Callable[..., Any]
    by_rows: bool
    __name__ = "as_captured"

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.by_rows:
            tensor = tensor.contiguous()
        elif tensor.is_contiguous():
            tensor = tensor.mT.contiguous().mT
        return self.target(tensor, *args, **kwargs)


@dataclass(frozen=True)
class StridedAsCaptured:
    """A view by strides, which say how the captured argument lay in memory and where that began."""

    layout: Layout
    offset: int
    __name__ = "strided_as_captured"

    def __call__(self, tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
        if tensor.stride() != self.layout.stride:
            laid = tensor.new_empty_strided(self.layout.shape, self.layout.stride)
            tensor = laid.copy_(tensor)
        first = tensor.storage_offset()
        return tensor.as_strided(size, stride, first if offset is None else first + offset - self.offset)


def as_captured(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
    """Function to call for a node: its target, heeding how the captured argument lay in memory if that matters."""
    if node.target in _BY_ORDER:
        layout = value_of(node.all_input_nodes[0]).layout
        return AsCaptured(target, layout.stride == row_major(layout.shape))
    if target is torch.ops.aten.as_strided.default:
        info = value_of(node.all_input_nodes[0])
        return StridedAsCaptured(info.layout, info.offset)
    return target
