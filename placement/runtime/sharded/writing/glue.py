"""What the code of a rank calls between the ops of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from placement.runtime.sharded.layouts import PartLayout, compact, join, take_from


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
