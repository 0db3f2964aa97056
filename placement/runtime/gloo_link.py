"""`RankLink`: parcels between processes by gloo, all of them on their way while both ends compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphs.capture.trace import Layout, TensorInfo
from placement.runtime.crew import Crew
from placement.runtime.routines import Parcel


@dataclass(frozen=True)
class Carrier:
    """How a tensor of a layout travels: as one dense piece of memory, its strides kept where they are dense.

    Attributes:
        shape, stride: of that memory; a dimension made by ``expand`` is sent once.
        layout: of the tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout

    @classmethod
    def of(cls, info: TensorInfo) -> Carrier:
        layout = info.layout
        shape = tuple(1 if step == 0 else extent for extent, step in zip(layout.shape, layout.stride, strict=True))
        stride = layout.stride if _is_dense(shape, layout.stride) else _row_major(shape)
        return cls(shape, stride, layout)

    @property
    def n_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory to send, one-dimensional: the tensor's own where it lies as it travels."""
        part = tensor
        for dimension, extent in enumerate(self.shape):
            if extent != part.shape[dimension]:
                part = part.narrow(dimension, 0, 1)
        if part.device.type != "cpu" or not _same_stride(self.shape, self.stride, part.stride()):
            whole, part = part, self.empty()
            self.shaped(part).copy_(whole)
            return part
        return part.as_strided((self.n_elements,), (1,))

    def empty(self) -> torch.Tensor:
        """Memory to receive into, one-dimensional."""
        return torch.empty(self.n_elements, dtype=self.layout.dtype)

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory with the shape that travels."""
        return memory.as_strided(self.shape, self.stride)

    def unpacked(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that was sent, strides and all."""
        layout = self.layout
        if self.stride == layout.stride:
            return memory.as_strided(layout.shape, layout.stride)
        if _overlaps(self.shape, layout.stride):
            return self.shaped(memory).expand(layout.shape)
        made = torch.empty_strided(self.shape, layout.stride, dtype=layout.dtype)
        made.copy_(self.shaped(memory))
        return made.as_strided(layout.shape, layout.stride)


@dataclass(frozen=True)
class Way:
    """How one parcel goes.

    Attributes:
        carrier: what is sent of it.
        source, target: ranks.
        tag: the number it travels under.
        op: name of the op that makes it.
    """

    carrier: Carrier
    source: int
    target: int
    tag: int
    op: str


def ways_of(parcels: Mapping[int, Parcel], op_names: tuple[str, ...]) -> dict[int, Way]:
    """How the parcels of a step go."""
    return {
        tag: Way(Carrier.of(p.info), p.source, p.target, tag, op_names[p.op] if p.op >= 0 else "what goes in")
        for tag, p in parcels.items()
    }


class RankLink:
    """`placement.runtime.routines.Link` of one rank for the parcels of one pass through a model."""

    def __init__(self, crew: Crew, ways: Mapping[int, Way], place: torch.device) -> None:
        self._crew, self._ways, self._place = crew, ways, place
        self._coming: dict[int, tuple[Any, torch.Tensor]] = {}

    def __del__(self) -> None:
        # What was expected and is not wanted any more (a forward pass without its backward pass) comes all the same.
        for tag, (work, memory) in self._coming.items():
            self._crew.keep(work, memory, self._ways[tag].source, self._ways[tag].op)

    def expect(self, tag: int) -> None:
        """Let a parcel come in as soon as it is sent."""
        way = self._ways[tag]
        if way.carrier.n_elements and tag not in self._coming:
            memory = way.carrier.empty()
            self._coming[tag] = self._crew.begin_receive(memory, way.source, way.tag, way.op), memory

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a parcel.

        Raises:
            RankError: it will never come.
        """
        way, layout = self._ways[tag], self._ways[tag].carrier.layout
        if not way.carrier.n_elements:
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._place)
        self.expect(tag)
        work, memory = self._coming[tag]
        self._crew.wait(work, way.source, way.op)
        del self._coming[tag]
        return way.carrier.unpacked(memory).to(self._place)

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a parcel, without waiting for it to arrive; the tensor must stay as it is until it has."""
        way = self._ways[tag]
        if way.carrier.n_elements:
            self._crew.send(way.carrier.packed(tensor), way.target, way.tag, way.op)


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


def _same_stride(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether strides mean the same; that of a dimension of one element means nothing."""
    return all(a == b or extent == 1 for extent, a, b in zip(shape, one, other, strict=True))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
