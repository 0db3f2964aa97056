"""1-bit SGD: of each entry only its sign is sent, and for each row what the signs stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from placement.fitting.compressions.quantizer import Quantizer, packed, unpacked

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Compressor
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class OneBit:
    """Seide et al. 2014, with error feedback, without which it does not converge.

    The means of a row's entries above and below 0 stand for their signs. A row is what leads to one output unit (a
    column in the paper, whose weights are transposed): weight[k] of a matrix or convolution; a vector is one row.
    """

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; nothing in it is random."""
        return _Signs(layout, number)


class _Signs(Quantizer):
    def __init__(self, layout: WeightLayout, number: int) -> None:
        super().__init__(layout.size, number, has_error_feedback=True)
        rows = [shape[0] if len(shape) > 1 else 1 for shape in layout.shapes]
        lengths = [shape.numel() // max(count, 1) for shape, count in zip(layout.shapes, rows, strict=True)]
        lengths_of_rows = torch.tensor(lengths).repeat_interleave(torch.tensor(rows))
        self._row = torch.arange(len(lengths_of_rows)).repeat_interleave(lengths_of_rows)  # of each entry

    def quantised(self, values: Tensor, part: slice) -> tuple[Tensor, ...]:
        """(means float32 [rows x 2], of entries below 0 and of the others; signs packed)."""
        is_up = (values >= 0).long()
        side = self._sides(is_up, part)
        n_sides = 2 * int(side[-1] // 2 + 1) if len(side) else 0
        sums = torch.zeros(n_sides, device=values.device).index_add_(0, side, values)
        means = sums / torch.bincount(side, minlength=n_sides).clamp(min=1)
        return means, packed(is_up, 1)

    def restored(self, tensors: tuple[Tensor, ...], part: slice) -> Tensor:
        """As `Quantizer.restored`."""
        means, signs = tensors
        return means[self._sides(unpacked(signs, 1, part.stop - part.start), part)]

    def _sides(self, is_up: Tensor, part: slice) -> Tensor:
        """int64 [n]: of each entry, 2 x its row within the part, and 1 more where it is up."""
        row = self._row[part].to(is_up.device)
        return 2 * (row - row[:1]) + is_up
