"""Losses of drawn models: of what the body gives, labels below `CLASSES` and the model's weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 8  # features of any sample are at least so many
Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]


def _each(h: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return functional.cross_entropy(h.flatten(1), y, reduction="none")


def _pairs(h: Tensor) -> Tensor:
    a = functional.normalize(h.flatten(1), dim=-1)
    return a @ a.t() / 0.5


def _twins(h: Tensor) -> Tensor:
    """Barlow Twins: correlations of features over the batch."""
    a, b = h.flatten(1)[:, :4], h.flatten(1)[:, 4:8]
    a, b = ((t - t.mean(0)) / (t.std(0) + 0.3) for t in (a, b))
    c = a.t() @ b / len(h)
    return (c.diagonal() - 1).square().sum() + 0.1 * (c - torch.diag(c.diagonal())).square().sum()


def _triplets(h: Tensor, y: Tensor) -> Tensor:
    """The hardest other sample of each."""
    distances = torch.cdist(h.flatten(1), h.flatten(1))
    same = y[:, None] == y[None]
    return (distances.masked_fill(~same, 0).amax(1) - distances.masked_fill(same, 9).amin(1) + 1).relu().mean()


def _variance_and_covariance(h: Tensor) -> Tensor:
    z = h.flatten(1)[:, :8]
    z = z - z.mean(0)
    covariance = z.t() @ z / (len(z) - 1)
    spread = (1 - (z.var(0) + 1e-2).sqrt()).relu().mean()
    return spread + (covariance - torch.diag(covariance.diagonal())).square().sum() / 8


def _correlation(h: Tensor, y: Tensor) -> Tensor:
    a, b = h.flatten(1).mean(1), y.to(h.dtype)
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 0.1)


def _squares_of(model: nn.Module) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total = total + parameter.abs().square().sum()
    return total


def _orthogonality_of(model: nn.Module) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.is_complex():
            total = total + (parameter @ parameter.t() - torch.eye(len(parameter))).square().sum()
    return total


def _balance(h: Tensor) -> Tensor:
    """Of a router: shares of experts, and how many tokens chose each."""
    return (h.softmax(-1).mean(0) * functional.one_hot(h.argmax(-1), 4).to(h.dtype).mean(0)).sum() * 4


def _moments(h: Tensor) -> Tensor:
    mean, square = h.mean(0), (h * h).mean(0)
    return (square - mean * mean).sum() + mean.sum().square()


LOSSES: dict[str, Loss] = {
    "mean_square": lambda h, y, m: h.square().mean(),
    "sum": lambda h, y, m: h.square().sum() / 100,
    "l1": lambda h, y, m: h.abs().mean(),
    "cross_entropy": lambda h, y, m: functional.cross_entropy(h.flatten(1), y),
    "summed_cross_entropy": lambda h, y, m: functional.cross_entropy(h.flatten(1), y, reduction="sum"),
    "label_smoothing": lambda h, y, m: functional.cross_entropy(h.flatten(1), y, label_smoothing=0.1),
    "ignore_index": lambda h, y, m: functional.cross_entropy(h.flatten(1), y.masked_fill(y > 4, -100)),
    "class_weights": lambda h, y, m: functional.cross_entropy(
        h.flatten(1), y, weight=torch.linspace(0.5, 1.5, h[0].numel(), dtype=h.dtype)
    ),
    "soft_labels": lambda h, y, m: functional.cross_entropy(
        h.flatten(1), functional.one_hot(y, h[0].numel()).to(h.dtype) * 0.9 + 0.01
    ),
    "nll": lambda h, y, m: functional.nll_loss(h.flatten(1).log_softmax(-1), y),
    "bce_with_logits": lambda h, y, m: functional.binary_cross_entropy_with_logits(
        h.flatten(1)[:, :8], functional.one_hot(y, 8).to(h.dtype)
    ),
    "bce": lambda h, y, m: functional.binary_cross_entropy(
        h.flatten(1)[:, :8].sigmoid(), functional.one_hot(y, 8).to(h.dtype)
    ),
    "huber": lambda h, y, m: functional.huber_loss(h.flatten(1).mean(1), y.to(h.dtype), delta=0.5),
    "smooth_l1": lambda h, y, m: functional.smooth_l1_loss(h, torch.ones_like(h) * 0.3),
    "mse_of_zeros": lambda h, y, m: functional.mse_loss(h, torch.zeros_like(h)),
    "kl_batchmean": lambda h, y, m: functional.kl_div(
        h.flatten(1).log_softmax(-1), torch.ones_like(h.flatten(1)) / h[0].numel(), reduction="batchmean"
    ),
    "distilled": lambda h, y, m: functional.kl_div(
        h.flatten(1).log_softmax(-1), h.detach().flatten(1).tanh().softmax(-1), reduction="batchmean"
    ),
    "focal": lambda h, y, m: ((1 - (-_each(h, y)).exp()).square() * _each(h, y)).mean(),
    "multi_margin": lambda h, y, m: functional.multi_margin_loss(h.flatten(1), y),
    "poisson": lambda h, y, m: functional.poisson_nll_loss(h.flatten(1).mean(1), y.to(h.dtype)),
    "gaussian": lambda h, y, m: functional.gaussian_nll_loss(
        h.flatten(1)[:, 0], y.to(h.dtype), functional.softplus(h.flatten(1)[:, 1]) + 0.5
    ),
    "cosine_embedding": lambda h, y, m: functional.cosine_embedding_loss(
        h.flatten(1)[:, :4], h.flatten(1)[:, 4:8], (y % 2 * 2 - 1).to(h.dtype)
    ),
    "margin_ranking": lambda h, y, m: functional.margin_ranking_loss(
        h.flatten(1)[:, 0], h.flatten(1)[:, 1], (y % 2 * 2 - 1).to(h.dtype), margin=0.5
    ),
    "triplet_margin": lambda h, y, m: functional.triplet_margin_loss(
        h.flatten(1), h.flatten(1).flip(0), h.flatten(1).roll(1, 0)
    ),
    "mean_of_means": lambda h, y, m: h.flatten(1).mean(1).square().mean(),
    "masked_mean": lambda h, y, m: (_each(h, y) * (y < 5)).sum() / (y < 5).sum().clamp(min=1),
    "weighted_samples": lambda h, y, m: (_each(h, y) * (1.0 + y)).sum() / (1.0 + y).sum(),
    "squared_mean": lambda h, y, m: _each(h, y).mean().square(),
    "mean_times_itself": lambda h, y, m: (mean := _each(h, y).mean()) * mean,
    "product_of_means": lambda h, y, m: _each(h, y).mean() * h.square().mean(),
    "ratio_of_means": lambda h, y, m: _each(h, y).mean() / (h.square().mean() + 1),
    "log_of_mean": lambda h, y, m: (h.square().mean() + 1).log(),
    "exp_of_mean": lambda h, y, m: h.mean().exp(),
    "root_of_mean": lambda h, y, m: (h - 0.3).square().mean().sqrt(),
    "flooded": lambda h, y, m: (_each(h, y).mean() - 0.5).abs() + 0.5,
    "mean_of_squared_means": lambda h, y, m: h.mean(0).square().sum(),
    "means_over_batch_divided": lambda h, y, m: (h.abs().sum(0)[..., 0] / (h.abs().sum(0)[..., 1] + 1)).sum(),
    "variance_of_batch": lambda h, y, m: -h.var(0).mean(),
    "deviation_of_losses": lambda h, y, m: _each(h, y).mean() + _each(h, y).std(),
    "moments": lambda h, y, m: _moments(h),
    "worst_sample": lambda h, y, m: _each(h, y).max(),
    "hard_samples": lambda h, y, m: _each(h, y).topk(3).values.mean(),
    "robust_weights": lambda h, y, m: (_each(h, y).detach().softmax(0) * _each(h, y)).sum(),
    "log_sum_of_losses": lambda h, y, m: _each(h, y).logsumexp(0),
    "contrastive": lambda h, y, m: functional.cross_entropy(_pairs(h), torch.arange(len(h)).flip(0)),
    "supervised_contrastive": lambda h, y, m: -(_pairs(h).log_softmax(1) * (y[:, None] == y[None])).sum(1).mean(),
    "sigmoid_pairs": lambda h, y, m: functional.softplus(-_pairs(h) * (2 * torch.eye(len(h)) - 1)).mean(),
    "twins": lambda h, y, m: _twins(h),
    "triplets": lambda h, y, m: _triplets(h, y),
    "variance_and_covariance": lambda h, y, m: _variance_and_covariance(h),
    "correlation": lambda h, y, m: _correlation(h, y),
    "distances": lambda h, y, m: functional.pdist(h.flatten(1)[:, :3] + torch.arange(len(h))[:, None]).mean(),
    "differences_of_neighbours": lambda h, y, m: h.diff(dim=0).square().mean(),
    "ranking_of_batch": lambda h, y, m: (
        (h.flatten(1)[:, 0].sort().values - torch.linspace(-1, 1, len(h))).square().mean()
    ),
    "entropy_of_mean": lambda h, y, m: -torch.special.entr(h.flatten(1).softmax(-1).mean(0)).sum(),
    "balance": lambda h, y, m: _balance(h.flatten(1)[:, :4]),
    "halves_of_batch": lambda h, y, m: (h[: len(h) // 2] * h[len(h) // 2 :]).mean(),
    "penalty": lambda h, y, m: _each(h, y).mean() + 1e-2 * _squares_of(m),
    "penalty_of_orthogonality": lambda h, y, m: h.square().mean() + 1e-2 * _orthogonality_of(m),
    "norm_of_weights": lambda h, y, m: h.square().mean() + 0.1 * (_squares_of(m) + 1e-3).sqrt(),
    "two_terms": lambda h, y, m: _each(h, y).mean() + 0.1 * h.flatten(1)[:, 1:].diff(dim=1).abs().mean(),
    "energy": lambda h, y, m: -h.flatten(1).logsumexp(-1).mean() + h.mean().square(),
    "maximum_mean_discrepancy": lambda h, y, m: torch.exp(
        -torch.cdist(h[::2].flatten(1), h[1::2].flatten(1)).square() / 8
    ).mean(),
}
