"""A small model, and tables of which rank stores what of it: by hand and at random."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

from graphs.rows import Shard
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.states.local_tensors import entries
from placement.runtime.states.state_parts import (
    StatePart,
    StateTable,
    completed,
    local_states,
    pieces_of,
    put_together,
    stored,
)

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {"foreach": True},
}
ENTRYWISE = (*OPTIONS, "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop")


class Tied(nn.Module):
    """Tied weights, three blocks side by side, an LSTM with a list of its weights, buffers, a number, a frozen one."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 6)
        self.qkv = nn.Linear(6, 3 * 4)
        self.rnn = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(4, 4))
        self.register_buffer("cache", torch.rand(3), persistent=False)


def part_of(
    model: nn.Module, name: str, part: PartLayout | None = None, flat: tuple[int, int] | None = None
) -> StatePart:
    """What a rank stores of a tensor of a model; all of it unless it says so."""
    tensors = dict(entries(model))
    tensor = tensors[name]
    names = (name, *(other for other, twin in tensors.items() if twin is tensor and other != name))
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return StatePart(names, part or whole(tensor.shape), flat, tensor.dtype, is_trained)


def names_of(model: nn.Module) -> list[str]:
    """Each parameter and buffer, tied ones once."""
    first: dict[int, str] = {}
    for name, tensor in entries(model):
        first.setdefault(id(tensor), name)
    return list(first.values())


def random_table(model: nn.Module, n_ranks: int, seed: int) -> StateTable:
    """Every tensor on some ranks: as replicas, in parts of a dimension, in ZeRO's stretches of these, uneven ones."""
    draw = random.Random(seed)
    rows: list[list[StatePart]] = [[] for _ in range(n_ranks)]
    tensors = dict(entries(model))
    for name in names_of(model):
        if draw.random() < 0.1:
            continue  # nobody reads it
        ranks = draw.sample(range(n_ranks), draw.randint(1, n_ranks))
        n_parts = draw.choice([k for k in range(1, len(ranks) + 1) if len(ranks) % k == 0])
        groups = [ranks[k::n_parts] for k in range(n_parts)]
        for part, group in zip(_cuts(draw, tensors[name], name, n_parts), groups, strict=True):
            ends = _ends(draw, part.n_elements, len(group)) if draw.random() < 0.5 else None
            for k, rank in enumerate(group):
                flat = None if ends is None else (ends[k], ends[k + 1])
                rows[rank].append(part_of(model, name, part, flat))
    return completed(tuple(tuple(row) for row in rows), model)


def _cuts(draw: random.Random, tensor: torch.Tensor, name: str, n_parts: int) -> list[PartLayout]:
    blocks = 3 if name.startswith("qkv") else 1
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] // (blocks if d == 0 else 1) >= n_parts]
    if not dims:
        return [whole(tensor.shape)] * n_parts
    dim = draw.choice(dims)
    blocks = blocks if dim == 0 else 1
    extent = tensor.shape[dim] // blocks
    weights = tuple(draw.randint(1, 3) for _ in range(n_parts)) if draw.random() < 0.5 else ()
    shard = Shard(dim, extent, blocks=blocks)
    return [whole(tensor.shape).cut_by(shard, n_parts, number, weights) for number in range(n_parts)]


def _ends(draw: random.Random, length: int, n_parts: int) -> list[int]:
    return [0, *sorted(draw.randint(0, length) for _ in range(n_parts - 1)), length]


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One of torch's by name."""
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **OPTIONS.get(kind, {}))
    return made


def ranks_of(model: nn.Module, table: StateTable) -> list[nn.Module]:
    """A copy of the model for each rank, with what that stores."""
    made = [copy.deepcopy(model) for _ in table]
    for rank, local in enumerate(made):
        local_states(local, table, rank, CPU)
    return made


def draw_gradients(model: nn.Module, table: StateTable, ranks: list[nn.Module], seed: int) -> None:
    """Random gradients for a model, and the same for what each rank stores of it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    for row, local in zip(table, ranks, strict=True):
        take_gradients(model, row, local)


def take_gradients(model: nn.Module, row: tuple[StatePart, ...], local: nn.Module) -> None:
    """Give a rank its parts of the gradients of a model."""
    for state in row:
        gradient = model.get_parameter(state.name).grad if state.trained else None
        if gradient is not None:
            local.get_parameter(state.name).grad = stored(gradient, state).clone()


def check_same(model: nn.Module, table: StateTable, ranks: list[nn.Module]) -> None:
    """The ranks together have what the model has."""
    have = [dict(entries(local)) for local in ranks]
    for name, pieces in pieces_of(table).items():
        found = put_together([(state, have[rank][name].detach()) for rank, state in pieces])
        torch.testing.assert_close(found, dict(entries(model))[name].detach())
