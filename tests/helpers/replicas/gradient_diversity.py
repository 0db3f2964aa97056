"""Gradient diversity by its definition, of the gradients of all samples."""

from __future__ import annotations

import torch
from torch import Tensor

from placement.fitting.task import FitTask


def gradient_diversity(gradients: Tensor) -> float:
    """Of gradients, float32 [n, entries]: 1 / n if all are equal, 1 if all are orthogonal, infinite if the sum is 0."""
    wide = gradients.double()
    return float(wide.square().sum() / wide.sum(0).square().sum())


def sample_gradients(task: FitTask, weights: Tensor, samples: Tensor) -> Tensor:
    """float32 [n, entries]: the gradient of each sample alone, by number, all in one pass (torch.func.vmap)."""

    def loss(flat: Tensor, *sample: Tensor) -> Tensor:
        return task.loss_at(flat, tuple(each[None] for each in sample))

    chosen = [each[samples] for each in task.data]
    in_dims = (None, *(0 for _ in chosen))
    found: Tensor = torch.func.vmap(torch.func.grad(loss), in_dims, randomness="different")(weights, *chosen)
    return found
