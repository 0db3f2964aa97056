"""A model whose parts a placement puts beside each other: recurrent cells, and layers at their side."""

from __future__ import annotations

import torch
from torch import nn

STEPS, WIDTH = 3, 16


class Towers(nn.Module):
    """Two LSTM cells over a short sequence, and a few linear layers over its mean."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.side = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros_like(x[:, 0])
        states = [(nothing, nothing) for _ in self.cells]
        for t in range(STEPS):
            given = x[:, t]
            for number, cell in enumerate(self.cells):
                states[number] = cell(given, states[number])
                given = states[number][0]
        result: torch.Tensor = self.head(states[-1][0] + self.side(x.mean(1)))
        return result


def towers(width: int = WIDTH, batch: int = 8) -> tuple[Towers, tuple[torch.Tensor]]:
    """The model and a batch for it."""
    torch.manual_seed(0)
    return Towers(width), (torch.randn(batch, STEPS, width),)
