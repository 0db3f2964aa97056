"""Top-k: only the largest entries are sent, the others when they have grown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.compressions.error_feedback import Residual
from placement.fitting.role import Compressor

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class TopK:
    """Aji and Heafield 2017; with the memory of Stich et al. 2018. A sent entry takes 8 bytes: its value and its place.

    Attributes:
        fraction: of all entries that is sent, at least one.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise FitError(f"top_k has fraction={self.fraction:g}; expected one above 0, at most 1.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; nothing in it is random."""
        return _Largest(layout.size, math.ceil(self.fraction * layout.size))


class _Largest(Compressor):
    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._left_out = Residual()

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """(values float32 [k], places int32 [k])."""
        wanted = self._left_out.added_to(values)
        places = wanted.abs().topk(self._count, sorted=False).indices
        message = (wanted[places], places.int())
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """As `Compressor.decode`."""
        values, places = tensors
        return torch.zeros(self._size, device=values.device).index_add_(0, places, values)
