"""PowerSGD: each matrix of a gradient as a product of two thin ones, found by one power iteration."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graphs.errors import FitError
from placement.fitting.compressions.error_feedback import Residual
from placement.fitting.requests import AllReduce, Request
from placement.fitting.role import Compressor

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class PowerSgd:
    """Vogels et al. 2019, with warm start and error feedback. Vectors, and matrices that gain nothing, go as they are.

    Both factors are summed by all-reduces, which other compressions cannot use.

    Attributes:
        rank: columns of the thin matrices.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FitError(f"power_sgd has rank={self.rank}; expected 1 or more.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; all begin with the same factors, as their sums ask for."""
        return _Factors(layout, self.rank)


class _Factors(Compressor):
    """Thin matrices of a parameter as a matrix M: `left`, orthogonal, and `right`, with M ~ left right^T."""

    def __init__(self, layout: WeightLayout, rank: int) -> None:
        self._layout = layout
        self._left_out = Residual()
        same = torch.Generator().manual_seed(0)
        shapes = [(shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel()) for shape in layout.shapes]
        self._is_thin = [rank * (a + b) < a * b for a, b in shapes]
        # The right matrices of the last update, of the thin ones only.
        self._right: list[Tensor] = [
            torch.randn(b, rank, generator=same)
            for (_, b), is_thin in zip(shapes, self._is_thin, strict=True)
            if is_thin
        ]

    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        """As `Compressor.mean`."""
        if len(group) == 1:
            return values
        wanted = self._left_out.added_to(values)
        left: Sequence[Tensor] = yield AllReduce(self._times_right(wanted), group)
        left = self._orthogonal([each / len(group) for each in left])
        if self._right:
            right: Sequence[Tensor] = yield AllReduce(self._times_left(wanted, left), group)
            self._right = [each / len(group) for each in right]
        found = self.decode((*left, *self._right))
        self._left_out.keep(wanted, found)
        return found

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """(left of each parameter, the whole of it where it is not thin; right of each thin one)."""
        wanted = self._left_out.added_to(values)
        left = self._orthogonal(self._times_right(wanted))
        self._right = list(self._times_left(wanted, left))
        message = (*left, *self._right)
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """As `Compressor.decode`."""
        right = iter(tensors[len(self._is_thin) :])
        left = zip(tensors, self._is_thin, strict=False)
        return torch.cat([(each @ next(right).T if is_thin else each).reshape(-1) for each, is_thin in left])

    def _times_right(self, flat: Tensor) -> tuple[Tensor, ...]:
        """M right of each thin parameter; of another one, its values."""
        right = iter(self._right)
        return tuple(
            value.flatten(1) @ next(right).to(flat.device) if is_thin else value.clone()
            for value, is_thin in self._parameters(flat)
        )

    def _times_left(self, flat: Tensor, left: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """M^T left of each thin parameter."""
        parameters = zip(self._parameters(flat), left, strict=True)
        return tuple(value.flatten(1).T @ each for (value, is_thin), each in parameters if is_thin)

    def _orthogonal(self, left: Sequence[Tensor]) -> list[Tensor]:
        thin = zip(left, self._is_thin, strict=True)
        return [torch.linalg.qr(each).Q if is_thin else each for each, is_thin in thin]

    def _parameters(self, flat: Tensor) -> Iterator[tuple[Tensor, bool]]:
        return zip(self._layout.views(flat), self._is_thin, strict=True)
