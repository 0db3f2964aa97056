"""What the processes of test_evaluation.py do: a strategy trains, and the model is evaluated in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import placement
from placement.runtime.ranks.process_group import ProcessGroup


class Model(nn.Module):
    """Has what evaluation does otherwise: dropout, and perhaps a norm with statistics of the batch."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8) if of_batch else nn.LayerNorm(8)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.last(torch.tanh(self.second(self.drop(torch.relu(self.norm(self.first(inputs)))))))
        return {"loss": ((y - labels) ** 2).mean(), "outputs": y * scale}


def model(of_batch: bool) -> Model:
    torch.manual_seed(0)
    return Model(of_batch)


def loss(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return found["loss"]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def evaluated(described: list[tuple[str, bool]], group: ProcessGroup) -> list[list[list[float]]]:
    """For each file with a strategy what evaluation finds after each of two steps, and what the norm has at the end."""
    torch.set_num_threads(1)
    found = []
    for file, of_batch in described:
        placed: Any = placement.apply(model(of_batch), file, batch(0), loss=loss)
        outputs = _evaluated(placed, placed.step, placement.shard_of)
        found.append([*outputs, placed.whole(_kept(of_batch)).tolist()])
    return found


def plain(of_batch: bool) -> list[list[float]]:
    """The same in one process."""
    whole = model(of_batch)
    outputs = _evaluated(whole, lambda *given: loss(whole(*given)).backward(), lambda given: given)
    return [*outputs, whole.state_dict()[_kept(of_batch)].tolist()]


def _kept(of_batch: bool) -> str:
    return "norm.running_mean" if of_batch else "norm.weight"


def _evaluated(trained: Any, step: Callable[..., Any], shard: Callable[..., Any]) -> list[list[float]]:
    sgd = torch.optim.SGD(list(trained.parameters()), lr=0.1)
    found = []
    for turn in range(2):
        torch.manual_seed(turn)
        step(*batch(turn))
        sgd.step()
        sgd.zero_grad()
        trained.eval()
        for scale in (1.0, 2.0, 1.0):
            outputs = trained(*shard(batch(10 + turn)), scale=scale)
            found.append([*outputs["outputs"].detach().flatten().tolist(), float(outputs["loss"].detach())])
        trained.train()
    return found
