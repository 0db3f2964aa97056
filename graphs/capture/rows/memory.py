"""Place of a view's dimension in the memory of the tensor that it is a view of.

The memory of a tensor is a number system: each of its dimensions is a digit, or several. An index of a view's dimension
counts with a stretch of these digits: of ``[B * S, H]`` read from ``[B, S, H]``, first those of S, then those of B.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from graphs.capture.trace import TensorInfo

REPEATED = -1  # a dimension made by ``expand``: it lies nowhere


class Digit(NamedTuple):
    """``length`` indices of a view, each of them ``unit`` entries further along a dimension of the memory."""

    dim: int
    unit: int
    length: int


class Elsewhere(Exception):
    """The dimension of the view lies across those of its memory."""


def digits(view: TensorInfo, dims: tuple[int, ...], memory: TensorInfo) -> tuple[Digit, ...]:
    """The digits of some dimensions of a view that count as one, from the innermost.

    Raises:
        Elsewhere: they are no digits of the memory.
    """
    if view is memory or (view.layout == memory.layout and view.offset == memory.offset):  # itself, as most are
        shape = memory.layout.shape
        strides = memory.layout.stride
        return tuple(Digit(d if strides[d] else REPEATED, 1, shape[d]) for d in reversed(dims) if shape[d] > 1)
    found: list[Digit] = []
    for dim in reversed(dims):
        size = view.layout.shape[dim]
        step = view.layout.stride[dim] * view.layout.dtype.itemsize
        if size > 1:
            found += [Digit(REPEATED, 1, size)] if step == 0 else _digits(view, size, step, memory)
    return tuple(found)


def _digits(view: TensorInfo, size: int, step: int, memory: TensorInfo) -> list[Digit]:
    """Digits of one dimension of ``size`` indices that lie ``step`` bytes apart."""
    item = memory.layout.dtype.itemsize
    offset = view.offset * view.layout.dtype.itemsize - memory.offset * item
    found = []
    while size > 1:
        dim, length, stride = _dimension_at(memory, step)
        unit = step // stride
        if length % unit:
            raise Elsewhere
        count = min(size, length // unit)
        # A slice must be one of equal blocks; a dimension that goes on in the next one must take all of this one.
        is_block = (length // unit) % count == 0 and (offset // stride) % (unit * count) < unit
        if size % count or not is_block:
            raise Elsewhere
        found.append(Digit(dim, unit, count))
        size //= count
        step = stride * length
    return found


def _dimension_at(memory: TensorInfo, step: int) -> tuple[int, int, int]:
    """The dimension along which entries ``step`` bytes apart lie, its length and its stride in bytes."""
    layout = memory.layout
    for dim, (length, stride) in enumerate(zip(layout.shape, layout.stride, strict=True)):
        stride_bytes = stride * layout.dtype.itemsize
        if length > 1 and stride and stride_bytes <= step < stride_bytes * length and step % stride_bytes == 0:
            return dim, length, stride_bytes
    raise Elsewhere


def insert(chain: list[int], mark: int) -> bool:
    """Enter a mark into a list in which each number divides the next; False if it is there, or does not fit."""
    place = bisect_left(chain, mark)
    if place == len(chain) or chain[place] == mark or mark % chain[place - 1] or chain[place] % mark:
        return False
    chain.insert(place, mark)
    return True
