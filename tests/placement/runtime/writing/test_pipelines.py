"""Pipelines of models whose loss counts over all samples, or adds what weights alone make."""

from __future__ import annotations

import pytest
import torch
from parallel.sharded_models import check
from torch import nn
from torch.nn import functional

from graphs.errors import StrategyError


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 5)
        self.register_buffer("weight", torch.rand(5) + 0.5)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits: torch.Tensor = self.head(x)
        return logits


class Smoothed(Layers):
    """Divides by the weight of all labels."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), y, weight=self.weight, label_smoothing=0.1)


class Masked(Layers):
    """Divides by the number of samples that count, which the arguments say."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = (x.sum(1) > 0).float() + (y >= 0).float()
        return (self.logits(x).square().mean(1) * kept).sum() / kept.sum().clamp(min=1.0)


class Penalised(Layers):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = self.layers[1].weight
        turned = (weight @ weight.t() - torch.eye(6)).square().mean()
        return functional.cross_entropy(self.logits(x), y) + turned + self.head.weight.abs().sum()


class Standardised(Layers):
    """Reads the mean of all samples, of arguments and of what layers make."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.logits((x - x.mean(0)) / x.std(0))
        return functional.cross_entropy(logits - logits.mean(0), y) + logits.std(0).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 5, (4,))
    labels[0] = -100
    return torch.randn(4, 6), labels


@pytest.mark.parametrize("strategy", ["pp2 gpipe mb2", "pp2 1f1b mb2", "pp2 zb-h1 mb4", "dp2 | pp2 1f1b mb2"])
@pytest.mark.parametrize("case", [Smoothed, Masked, Penalised])
def test_what_arguments_or_weights_alone_say_keeps_no_micro_batch_waiting(case: type[nn.Module], strategy: str) -> None:
    check(case(), batch(), strategy)


@pytest.mark.parametrize("strategy", ["pp2 gpipe mb2", "dp2 | pp2 gpipe mb2", "pp2 gpipe mb2 | recompute=layers.*"])
def test_means_of_all_samples_wait_for_all_forward_passes(strategy: str) -> None:
    check(Standardised(), batch(), strategy)


def test_means_of_all_samples_are_refused_where_backward_passes_begin_before() -> None:
    with pytest.raises(StrategyError, match=r"op 'sub_1' reads what 'mean_1' makes of all samples .* order gpipe"):
        check(Standardised(), batch(), "pp2 1f1b mb2")


class Derived(nn.Module):
    """A physics-informed network, whose loss reads derivatives of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda point: self.body(point).squeeze(-1)))(x)
        return (slope[:, 1] + self.body(x)[:, 0] * slope[:, 0]).pow(2).mean()


def test_a_forward_pass_that_waits_for_a_backward_pass_is_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"op 'mul' of the forward pass reads what .* in a backward pass; leave out"
    ):
        check(Derived(), (torch.rand(8, 2),), "pp2 gpipe mb2")
