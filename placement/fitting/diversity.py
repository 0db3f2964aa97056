"""How different the gradients of samples are, and with it the largest batch that still helps.

Yin et al. 2018, "Gradient diversity: a key ingredient for scalable distributed learning": with n gradients g_i,

    diversity = sum |g_i|^2 / |sum g_i|^2

and mini-batch SGD needs no more samples than SGD on single ones as long as a batch is below about n x diversity. That
is n where all are orthogonal, and 1 where all are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class DiversityMeter:
    """The largest useful batch, estimated from what workers compute anyway: mini-batch gradients at equal weights.

    With the mean gradient m and the variance v of one sample's, a gradient over b samples has |m|^2 + v / b as its
    mean square, and n x diversity is 1 + v / |m|^2 for large n. Two or more gradients at the same weights give both
    without bias (McCandlish et al. 2018, appendix A.1); they are summed over all updates before they are divided.
    """

    _weights: Tensor | None = None
    _gradients: list[Tensor] = field(default_factory=list)
    _samples: int = 0
    _variance: float = 0.0
    _mean_square: float = 0.0

    def add(self, weights: Tensor, gradient: Tensor, samples: int) -> None:
        """A worker's mean gradient over so many samples, float32 [entries], at these weights."""
        if self._weights is None or samples != self._samples or not torch.equal(weights, self._weights):
            self._close()
            self._weights, self._samples = weights.clone(), samples
        self._gradients.append(gradient)

    def add_together(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Mean gradients of several workers at equal weights, over so many samples each."""
        self._close()
        self._weights, self._gradients, self._samples = None, list(gradients), samples
        self._close()

    def largest_batch(self) -> float | None:
        """Samples beyond which a larger batch no longer helps.

        None where it is not known: no two workers were at equal weights, or the mean gradient is lost in the noise.
        """
        self._close()
        return 1.0 + self._variance / self._mean_square if self._mean_square > 0.0 else None

    def _close(self) -> None:
        """Take the gradients at the last weights into account."""
        count = len(self._gradients)
        if count > 1:
            gradients = torch.stack(self._gradients).double()
            mean = gradients.mean(0)
            variance = float((gradients - mean).square().sum()) / (count - 1)  # of a mini-batch's gradient
            self._variance += variance * self._samples
            self._mean_square += float(mean.square().sum()) - variance / count
        self._gradients = []
