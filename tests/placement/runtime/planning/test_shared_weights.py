"""Parameters that several ops read, of which some need all of them and others could do with a part."""

from __future__ import annotations

import pytest
import torch
from parallel.sharded_models import check
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm


class Queries(nn.Module):
    """Attention of a few queries of its own: its projection of queries and that of keys and values are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.first, self.last = nn.Parameter(torch.randn(3, 8)), nn.Linear(6, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.attention(self.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0])


class Penalised(nn.Module):
    """A weight whose determinant, and one whose products with itself, are in the loss; a third is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.third, self.last = spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.last(self.third(self.second(self.first(x).relu()).relu())).square().mean()
        turned = self.last.weight @ self.last.weight.t() - torch.eye(4)
        return loss - 0.1 * torch.linalg.slogdet(self.second.weight)[1] + turned.square().sum()


class Skipping(nn.Module):
    """Decay rates that steps read by themselves, and a gate of each feature of which the backward pass reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rate, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.decay, self.skip = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        rate = functional.softplus(self.rate(x))
        state, made = torch.zeros(len(x), 8), []
        for step in range(x.shape[1]):
            state = state * torch.exp(-rate[:, step] * self.decay) + x[:, step]
            made.append(state + self.skip * x[:, step])
        return self.last(torch.stack(made, 1))


class Generated(nn.Module):
    """One layer reads its own weight and, of another, the weight as if it were data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.maker, self.last = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.maker(self.weight.t()).t()
        return self.last(functional.linear(x, made).relu() + functional.linear(x, self.weight))


@pytest.mark.parametrize("strategy", ["tp2", "tp2 sp", "dp2 | tp2", "pp2 gpipe mb2 | tp2", "dp2 zero3"])
@pytest.mark.parametrize("case", [Queries, Penalised, Skipping, Generated])
def test_weights_that_some_ops_need_all_of(case: type[nn.Module], strategy: str) -> None:
    given = torch.randn(4, 5, 6) if case in (Queries, Skipping) else torch.randn(4, 6)
    check(case(), (given,), strategy)
