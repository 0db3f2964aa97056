"""`Packing`: the one dense piece of memory as which a tensor travels between processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from graphs.capture.trace import Layout, TensorInfo, row_major, same_stride

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packing:
    """How a tensor of a layout travels: as one dense piece of memory, its strides kept where they are dense.

    Attributes:
        shape, stride: of that memory; a dimension made by ``expand`` is sent once.
        layout: of the tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout

    @classmethod
    def of(cls, info: TensorInfo) -> Packing:
        layout = info.layout
        shape = tuple(1 if step == 0 else extent for extent, step in zip(layout.shape, layout.stride, strict=True))
        stride = layout.stride if _is_dense(shape, layout.stride) else row_major(shape)
        return cls(shape, stride, layout)

    @classmethod
    def flat(cls, n_elements: int, dtype: torch.dtype) -> Packing:
        """Packing of a one-dimensional tensor without gaps."""
        return cls((n_elements,), (1,), Layout((n_elements,), (1,), dtype))

    @cached_property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def n_bytes(self) -> int:
        return self.n_elements * self.layout.dtype.itemsize

    def packed(self, tensor: torch.Tensor, place: torch.device = _CPU) -> torch.Tensor:
        """The memory to send, one-dimensional, on that device: the tensor's own where it lies there as it travels."""
        part = self._once(tensor).resolve_conj().resolve_neg()
        if part.device != place or not same_stride(self.shape, self.stride, part.stride()):
            whole, part = part, self.empty(place)
            self.shaped(part).copy_(whole)
            return part
        return part.as_strided((self.n_elements,), (1,))

    def fill(self, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor to memory of at least `n_bytes`, as it travels."""
        self.shaped(memory[: self.n_bytes].view(self.layout.dtype)).copy_(self._once(tensor))

    def empty(self, place: torch.device = _CPU) -> torch.Tensor:
        """Memory to receive into, one-dimensional."""
        return torch.empty(self.n_elements, dtype=self.layout.dtype, device=place)

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory with the shape that travels."""
        return memory.as_strided(self.shape, self.stride)

    def unpacked(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that was sent, strides and all, where the memory is."""
        layout = self.layout
        if self.stride == layout.stride:
            return memory.as_strided(layout.shape, layout.stride)
        if _overlaps(self.shape, layout.stride):
            return self.shaped(memory).expand(layout.shape)
        made = torch.empty_strided(self.shape, layout.stride, dtype=layout.dtype, device=memory.device)
        made.copy_(self.shaped(memory))
        return made.as_strided(layout.shape, layout.stride)

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without the dimensions that ``expand`` made."""
        for dimension, extent in enumerate(self.shape):
            if extent != tensor.shape[dimension]:
                tensor = tensor.narrow(dimension, 0, 1)
        return tensor


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill a piece of memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for step, extent in sorted((step, extent) for extent, step in zip(shape, stride, strict=True) if extent != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share memory."""
    reach = 0
    for step, extent in sorted((step, extent) for extent, step in zip(shape, stride, strict=True) if extent != 1):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False
