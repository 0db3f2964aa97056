"""The sequence-to-sequence model with attention of the papers, and what they say about ops.

Shapes: k samples, G groups, D devices, U units of placement, F features, H hidden units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from env.problem import Problem
from graphs.errors import MismatchError
from placement.learning.networks.placer import draw

MOST_KINDS = 200
MOST_OUTPUTS = MOST_NEIGHBOURS = 6
NOISE = 1.0  # standard deviation added to logits while exploring
TANH_CONSTANT, TEMPERATURE = 5.0, 10.0


class AttentionPlacer(nn.Module):
    """Bidirectional LSTM encoder, LSTM decoder with attention that is fed the device it chose last.

    Source: Mirhoseini et al. 2017 (doi:10.48550/arXiv.1706.04972, section 3.2) and 2018 (ICLR, section 3).
    """

    def __init__(self, features: int, devices: int, hidden: int) -> None:
        super().__init__()
        self.devices = devices
        self.embed = nn.Linear(features, hidden)
        self.encoder = nn.LSTM(hidden, hidden // 2, bidirectional=True, batch_first=True)
        self.device = nn.Embedding(devices + 1, hidden)  # the last one stands for "none yet"
        self.decoder = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden)
        self.to_device = nn.Linear(2 * hidden, devices)

    def encode(self, groups: Tensor) -> Tensor:
        """float32 [G, F] -> [1, G, H]."""
        encoded: Tensor = self.encoder(self.embed(groups).unsqueeze(0))[0]
        return encoded

    def logits(self, encoded: Tensor, state: Tensor) -> Tensor:
        """float32 [k, t, D] from states [k, t, H] of the decoder."""
        energy = self.query(state) @ encoded.transpose(1, 2) / math.sqrt(encoded.shape[2])
        context = functional.softmax(energy, dim=-1) @ encoded
        raw = self.to_device(torch.cat([state, context], dim=-1))
        return TANH_CONSTANT * torch.tanh(raw / TEMPERATURE)

    def given(self, encoded: Tensor, device: Tensor) -> Tensor:
        """Logits [k, G, D] of a decoder that has chosen ``device`` int64 [k, G]."""
        before = functional.pad(device[:, :-1], (1, 0), value=self.devices)
        inputs = torch.cat([encoded.expand(len(device), -1, -1), self.device(before)], dim=-1)
        return self.logits(encoded, self.decoder(inputs)[0])

    @torch.no_grad()
    def decode(self, encoded: Tensor, count: int, generator: torch.Generator, greedy: bool, explore: bool) -> Tensor:
        """Devices int64 [k, G]."""
        n_groups = encoded.shape[1]
        device = torch.empty(count, n_groups, dtype=torch.int64)
        previous, memory = torch.full((count,), self.devices), None
        for g in range(n_groups):
            inputs = torch.cat([encoded[:, g].expand(count, -1), self.device(previous)], dim=-1)
            state, memory = self.decoder(inputs.unsqueeze(1), memory)
            logits = self.logits(encoded, state).squeeze(1)
            if explore:
                logits = logits + NOISE * torch.randn(logits.shape, generator=generator)
            previous = draw(logits, generator, greedy)
            device[:, g] = previous
        return device


def commonest_kinds(problems: Sequence[Problem]) -> list[str]:
    """The kinds of op that get an embedding of their own."""
    counts = Counter(kind for problem in problems for kind in problem.graph.kinds)
    return [kind for kind, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_KINDS]]


def kind_numbers(problem: Problem, kinds: list[str]) -> Tensor:
    """int64 [n]: index into the commonest kinds; one beyond them for all others.

    Raises:
        MismatchError: not one op is of a kind that the policy knows.
    """
    index = {kind: i for i, kind in enumerate(kinds)}
    found = [index.get(kind, len(kinds)) for kind in problem.graph.kinds]
    if min(found) == len(kinds):
        raise MismatchError(
            f"this policy knows ops of kind {', '.join(kinds[:5])}{', ...' if len(kinds) > 5 else ''}, but graph "
            f"{problem.graph.name!r} has none of them ({', '.join(sorted(set(problem.graph.kinds))[:5])}); train a "
            "policy on it."
        )
    return torch.tensor(found)


def output_sizes(problem: Problem) -> Tensor:
    """float32 [n, 6]: orders of magnitude of the bytes of up to six outputs, padded with -1.

    The papers give the shapes of the outputs; an `OpGraph` knows their sizes.
    """
    graph = problem.graph
    result = np.full((graph.n_ops, MOST_OUTPUTS), -1.0)
    place = np.arange(graph.n_tensors) - graph.output_ptr[graph.tensor_producer]
    some = place < MOST_OUTPUTS
    result[graph.tensor_producer[some], place[some]] = np.log10(graph.transfer_bytes[some] + 1.0) / 10
    return torch.tensor(result, dtype=torch.float32)


def neighbours(problem: Problem) -> Tensor:
    """float32 [n, 12]: places in the graph's order of up to six producers and six consumers, padded with -1."""
    graph = problem.graph
    place = graph.topological_position / graph.n_ops
    producer, consumer, _ = graph.edge_list
    return torch.tensor(
        np.column_stack(
            [_first(consumer, place[producer], graph.n_ops), _first(producer, place[consumer], graph.n_ops)]
        ),
        dtype=torch.float32,
    )


def _first(owner: np.ndarray, value: np.ndarray, count: int) -> np.ndarray:
    """float64 [count, 6]: the first values of each owner."""
    order = np.argsort(owner, kind="stable")
    owner, value = owner[order], value[order]
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    result = np.full((count, MOST_NEIGHBOURS), -1.0)
    some = rank < MOST_NEIGHBOURS
    result[owner[some], rank[some]] = value[some]
    return result
