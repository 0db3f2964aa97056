"""What capture knows about a traced value: shape, layout and storage, but never data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class UnknownSizeError(Exception):
    """A symbolic size whose value depends on data; carries its symbol."""


class Layout(NamedTuple):
    """Enough to make an equal tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def n_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        return self.n_elements * self.dtype.itemsize

    @property
    def distinct_bytes(self) -> int:
        """Bytes of memory behind the elements: a dimension made by ``expand`` (stride 0) is read once."""
        count = 1
        for extent, step in zip(self.shape, self.stride, strict=True):
            count *= extent if step or extent == 0 else 1
        return count * self.dtype.itemsize


class TensorInfo(NamedTuple):
    """A tensor of the trace: its layout and the storage it lives in (equal ``storage``: the tensors share memory)."""

    layout: Layout
    storage: int
    offset: int  # elements

    @property
    def memory(self) -> range:
        """The bytes of its storage from its first element to its last."""
        layout = self.layout
        last = sum((extent - 1) * step for extent, step in zip(layout.shape, layout.stride, strict=True))
        n_elements = last + 1 if layout.n_elements else 0
        return range(self.offset * layout.dtype.itemsize, (self.offset + n_elements) * layout.dtype.itemsize)


def describe(value: Any) -> Any:
    """`TensorInfo` for a tensor, the same nesting of tuples for a sequence, a number for a symbolic one, else None."""
    if isinstance(value, torch.Tensor):
        return tensor_info(value)
    if isinstance(value, (list, tuple)):
        return tuple(describe(item) for item in value)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return None


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Raises: UnknownSizeError."""
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return TensorInfo(
            Layout(_numbers(shape), _row_major(_numbers(shape)), tensor.dtype, str(tensor.device)), -id(tensor), 0
        )
    storage = tensor.untyped_storage()
    layout = Layout(_numbers(shape), _numbers(tensor.stride()), tensor.dtype, str(tensor.device))
    return TensorInfo(layout, storage._cdata, _number(tensor.storage_offset()))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides[: len(shape)]))


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    # Almost every size is a plain int: check the types once instead of converting one by one.
    if all(type(size) is int for size in sizes):
        return sizes
    return tuple(_number(size) for size in sizes)


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise UnknownSizeError(str(size))
    return int(hint)
