"""What the processes of test_compiled_runs.py do: a step, and evaluation, with the ops between exchanges compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import placement


class Model(nn.Module):
    """Has what runs stop at: dropout, statistics of the batch, and what is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.first(inputs))))
        return self.last(nn.functional.gelu(self.second(hidden)) * 2).square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def compiled(file: str) -> tuple[list[float], dict[str, list[float]]]:
    """Losses of a step and of evaluation of a placement, and this rank's gradients.

    Runs are cut out and called, and torch.compile, which takes seconds for each, leaves them as they are.
    """
    torch.set_num_threads(1)
    torch.compile = lambda run, **_: run  # type: ignore[assignment]
    return _steps(placement.apply(model(), file, (batch(),), stack="compiled"))


def plain() -> tuple[list[float], dict[str, list[float]]]:
    """The same in one process, eager."""
    return _steps(model())


def _steps(trained: Any) -> tuple[list[float], dict[str, list[float]]]:
    torch.manual_seed(2)
    if hasattr(trained, "step"):
        loss = trained.step(batch())
    else:
        loss = trained(batch())
        loss.backward()
    gathered = getattr(trained, "gathered_gradients", None)
    own = gathered() if gathered else {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    gradients = {name: gradient.flatten().tolist() for name, gradient in own.items()}
    trained.eval()
    return [float(loss.detach()), float(trained(batch()).detach())], gradients
