"""Ranks of one process: tensors that hold the part of each, and what torch calls a mesh of them.

All that torch keeps to itself of this is used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def ranks_of_this_process(size: int) -> Iterator[DeviceMesh]:
    """A mesh of so many ranks, all of which compute here; this process must be of no process group."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with as_ranks(size):
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()


def as_ranks(size: int) -> AbstractContextManager[object]:
    """A block whose ops all ranks compute; tensors that it makes are of all ranks."""
    return LocalTensorMode(size)


def in_blocks(dim: int, blocks: int) -> Placement:
    """Each rank has a stretch of every one of equal blocks of a dimension."""
    return _StridedShard(dim, split_factor=blocks)


def of_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the parts of all ranks, which must be alike but for their values."""
    return LocalTensor(dict(enumerate(parts)))  # type: ignore[no-untyped-call]


def of_first(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the first rank."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    found: torch.Tensor = tensor._local_tensors[0] if isinstance(tensor, LocalTensor) else tensor
    return found
