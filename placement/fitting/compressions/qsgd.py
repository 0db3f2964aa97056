"""QSGD: each entry rounded at random to one of a few levels between 0 and the norm of its bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.compressions.quantizer import Quantizer, packed, unpacked

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Compressor
    from placement.fitting.task import WeightLayout

_MOST_LEVELS = 2**15 - 1


@dataclass(frozen=True)
class Qsgd:
    """Alistarh et al. 2017, sections 3.1 and 4. Right in the mean, so error feedback is off unless asked for.

    An entry takes the bits that 2 s + 1 signed levels need: 4 with s = 7, 6 with s = 16. A bucket's variance is at most
    min(n / s^2, sqrt(n) / s) of its squared norm, with n = `bucket` entries.

    Attributes:
        s: levels above 0.
        bucket: entries that share a norm.
        feedback: 1 for error feedback.
    """

    s: int = 16
    bucket: int = 512
    feedback: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.s <= _MOST_LEVELS:
            raise FitError(f"qsgd has s={self.s} levels; expected 1 to {_MOST_LEVELS}.")
        if self.bucket < 1:
            raise FitError(f"qsgd has buckets of {self.bucket} entries; expected 1 or more.")
        if self.feedback not in (0, 1):
            raise FitError(f"qsgd has feedback={self.feedback}; expected 0 or 1.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender that draws its rounding from `generator`."""
        return _Rounding(self, layout.size, generator, number)


class _Rounding(Quantizer):
    def __init__(self, options: Qsgd, size: int, generator: torch.Generator, number: int) -> None:
        super().__init__(size, number, bool(options.feedback))
        self._levels, self._bucket, self._generator = options.s, options.bucket, generator
        self._bits = (2 * options.s).bit_length()

    def quantised(self, values: Tensor, part: slice) -> tuple[Tensor, ...]:
        """(norms float32 [buckets], levels packed)."""
        buckets = self._in_buckets(values)
        norms = buckets.norm(dim=1)
        scaled = self._levels * (buckets / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).reshape(-1)
        up = torch.rand(values.shape, generator=self._generator).to(values.device)
        # A level's floor, and one more with the probability of what is left: right in the mean.
        signed = torch.floor(scaled[: len(values)] + up).clamp(-self._levels, self._levels)
        return norms, packed(signed.long() + self._levels, self._bits)

    def restored(self, tensors: tuple[Tensor, ...], part: slice) -> Tensor:
        """As `Quantizer.restored`."""
        norms, codes = tensors
        n = part.stop - part.start
        levels = unpacked(codes, self._bits, n) - self._levels
        scaled = norms.repeat_interleave(self._bucket)[:n] / self._levels
        return levels * scaled

    def _in_buckets(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, -len(values) % self._bucket)).view(-1, self._bucket)
