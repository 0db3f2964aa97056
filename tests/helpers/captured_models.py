"""Small models that tests of the capture share, and what they ask of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphs.opgraph import OpGraph, Phase

FLOAT = 4  # bytes


def ops_of(graph: OpGraph) -> dict[str, Any]:
    return {op.name: op for op in graph.records()[0]}


def edges_of(graph: OpGraph) -> set[tuple[str, str, int]]:
    """(producer, consumer, bytes)."""
    producer, consumer, tensor = graph.edge_list
    return {
        (graph.op_names[p], graph.op_names[c], int(graph.tensor_bytes[t]))
        for p, c, t in zip(producer, consumer, tensor, strict=True)
    }


def state_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storages[tensor.untyped_storage()._cdata] = tensor.numel() * tensor.itemsize
    return sum(storages.values())


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.LSTMCell(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [(x.new_zeros(2, 4), x.new_zeros(2, 4)) for _ in self.cells]
        for step in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(step, states[i])
                step = states[i][0]
        return step


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Perceptron(), nn.Sequential(Choosing())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line
            return x
        return -x


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
