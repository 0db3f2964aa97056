"""Gradients as they are."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.fitting.requests import AllReduce, Request
from placement.fitting.role import Compressor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class Uncompressed:
    """float32, summed by an all-reduce."""

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """One without a state."""
        return _Whole()


class _Whole(Compressor):
    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        total: Tensor
        (total,) = yield AllReduce((values,), group)
        return total / len(group)
