"""What every captured training step keeps to."""

from __future__ import annotations

import torch
from torch import nn

from graphs.opgraph import OpGraph, Phase


def phase_names(graph: OpGraph, phase: Phase) -> list[str]:
    return [name for name, p in zip(graph.op_names, graph.phase, strict=True) if p == phase]


def check_training_rules(graph: OpGraph) -> None:
    """What holds in every training graph."""
    producer, consumer, _ = graph.edge_list
    assert (graph.phase[producer] <= graph.phase[consumer]).all()
    backward = graph.phase == Phase.BACKWARD
    assert (graph.forward_of[backward] >= 0).all()
    assert (graph.forward_of[~backward] == -1).all()
    assert (graph.phase[graph.forward_of[backward]] == Phase.FORWARD).all()
    readers = set(consumer.tolist())
    updates = [i for i in range(graph.n_ops) if graph.phase[i] == Phase.UPDATE]
    assert all(i in readers and graph.colocation[i] >= 0 for i in updates)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.conv(x)).flatten(2).transpose(1, 2)
        y = self.norm(y)
        y = y + self.attention(y, y, y)[0]
        return self.rnn(y)[0].pow(2).mean()
