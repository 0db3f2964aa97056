"""Tensors and buffers that are written through views, and tensors that lie in memory in another order, on parts."""

from __future__ import annotations

import pytest
import torch
from parallel.sharded_models import check, check_inference
from torch import nn

from graphs.errors import StrategyError

EVERY = ["dp2", "dp2 zero3", "mb2", "tp2", "pp2 gpipe mb2"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("table", torch.rand(8, 8))


class Assembled(Layers):
    """Fills new memory bit by bit: with every second column, then with those between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = torch.empty_like(x)
        made[:, ::2] = x[:, 1::2].tanh()
        made[:, 1::2] = x[:, ::2] * self.scale[:4]
        return self.last(made)


class Turned(Layers):
    """Writes through a view of as many rows as columns, and reads what the write returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).clone()
        turned = x.t().mul_(self.scale)
        return self.last(turned.tanh()) + x.mean()


class Reshaped(Layers):
    """Reads what an activation in place returns of a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.first(x).view(-1, 2, 4)) + 1
        return self.last(x.clone().transpose(1, 2).mul_(self.scale.view(4, 2)).transpose(1, 2).flatten(1))


class Remembering(Layers):
    """Writes a buffer through views, some of them again, and reads what a write returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.table[:4].mul_(0.9).add_(x[:4].mean())
            self.table[2:6].mul_(1.1)
            turned = self.table.t().mul_(0.5)
        return self.last(x @ turned + x @ self.table)


class Sliced(nn.Module):
    """Writes slices of images cut along the batch, and reads a diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = torch.zeros(4, 5, 8)
        made[:, ::2] = x[:, ::2]
        made[:, 1::2] = x[:, 1::2].tanh()
        return made.mean(1) + x[:, :4, :4].diagonal(dim1=1, dim2=2).sum(1, keepdim=True)


@pytest.mark.parametrize("strategy", EVERY)
def test_circular_padding(strategy: str) -> None:
    padded = nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(padded, nn.ReLU(), nn.Conv1d(6, 2, 1))
    check(model, (torch.randn(4, 4, 8),), strategy)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("case", [Assembled, Turned])
def test_memory_that_is_written_through_views(case: type[nn.Module], strategy: str) -> None:
    check(case(), (torch.randn(8, 8),), strategy)
    check_inference(case(), (torch.randn(8, 8),), strategy.removesuffix(" zero3"))


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "mb2"])
def test_results_of_writes_through_views(strategy: str) -> None:
    check_inference(Reshaped(), (torch.randn(8, 8),), strategy)
    check(Sliced(), (torch.randn(4, 5, 8),), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 zero3"])
def test_buffers_that_are_written_through_views(strategy: str) -> None:
    check(Remembering(), (torch.randn(8, 8),), strategy)


class Columns(nn.Module):
    """With matrices that lie in memory column by column, and ops whose backward pass looks at that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.first, self.second = nn.Linear(8, 9), nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some, others = self.first(x).view(-1, 3, 3), self.second(x).view(-1, 3, 3)
        solved = torch.linalg.solve(some.mT, others).sum((1, 2)) + torch.linalg.det(others.mT)
        strided = torch.as_strided(self.weight, (8, 4), (8, 2))
        return (x @ self.weight @ strided).pow(2).mean() + solved.mean() - torch.linalg.slogdet(self.weight)[1]


@pytest.mark.parametrize("strategy", ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "mb2", "recompute=kind:*"])
def test_matrices_that_lie_by_columns(strategy: str) -> None:
    check(Columns(), (torch.randn(8, 8),), strategy)


class Queue(nn.Module):
    """Compares with a queue of earlier samples, and puts its own into that; by slices, or all of it anew."""

    def __init__(self, by_slices: bool) -> None:
        super().__init__()
        self.body, self.by_slices = nn.Linear(8, 8), by_slices
        self.register_buffer("queue", torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x)
        compared = made @ self.queue.clone().T
        with torch.no_grad():
            if self.by_slices:
                self.queue[4:8] = made
            else:
                self.queue.copy_(torch.cat([made, self.queue[: -len(x)]]))
        return compared


@pytest.mark.parametrize("by_slices", [True, False])
@pytest.mark.parametrize("strategy", ["dp2", "mb2", "tp2", "dp2 zero3", "pp2 gpipe mb2"])
def test_a_queue_is_read_by_all_samples_before_it_is_written(by_slices: bool, strategy: str) -> None:
    check(Queue(by_slices), (torch.randn(4, 8),), strategy)


def test_a_buffer_that_was_written_since_is_not_read_again() -> None:
    with pytest.raises(StrategyError, match="would read what 'copy_' has written into a buffer"):
        check(Queue(True), (torch.randn(4, 8),), "recompute=kind:*")


class OfSamples(nn.Module):
    """A running mean for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("memory", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x)
        result = made * self.memory.clone()
        with torch.no_grad():
            self.memory.mul_(0.9).add_(made, alpha=0.1)
        return result


def test_a_buffer_of_samples_is_written_by_replicas_and_not_by_micro_batches() -> None:
    check(OfSamples(), (torch.randn(4, 8),), "dp2")
    with pytest.raises(StrategyError, match="'mul_' writes entries of the buffer 'memory' for each sample"):
        check(OfSamples(), (torch.randn(4, 8),), "mb2")
