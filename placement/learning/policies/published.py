"""Policies as published: the sequence-to-sequence model of 2017, and the hierarchical model of 2018."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.errors import MismatchError
from placement.learning.networks.placer import draw, log_prob_entropy
from placement.learning.networks.units import check_devices, coarse_groups, majority, on_devices, within_pins
from placement.learning.policies.policy import PlacementPolicy, Proposals

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


_KIND_WIDTH = 20


class _OfKinds(PlacementPolicy):
    """A policy that has an embedding for each of the commonest kinds of op, and places groups of ops."""

    def __init__(self, kinds: list[str], devices: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.kinds, self.devices, self.groups, self.hidden = list(kinds), devices, groups, hidden
        self.kind = nn.Embedding(len(kinds) + 1, _KIND_WIDTH)

    def config(self) -> dict[str, Any]:
        return {"kinds": self.kinds, "devices": self.devices, "groups": self.groups, "hidden": self.hidden}

    def check(self, problem: Problem) -> None:
        check_devices(problem, self.devices)
        kind_numbers(problem, self.kinds)


class Seq2Seq(_OfKinds):
    """Attention over colocation groups.

    Source: A. Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017, section 3
    (doi:10.48550/arXiv.1706.04972). The paper's authors grouped the ops by hand; here the colocation groups of the
    graph are joined along heavy edges to at most `groups`. A group is described by the kinds of its ops (mean of their
    embeddings), the sizes of its outputs, and its adjacency.
    """

    name: ClassVar[str] = "seq2seq"

    def __init__(self, kinds: list[str], devices: int, groups: int = 128, hidden: int = 128) -> None:
        super().__init__(kinds, devices, groups, hidden)
        self.placer = AttentionPlacer(_KIND_WIDTH + MOST_OUTPUTS + groups, devices, hidden)
        self._known: dict[str, tuple[np.ndarray, Tensor, Tensor, Tensor]] = {}

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> Seq2Seq:
        return cls(commonest_kinds(problems), problems[0].cluster.n_devices)

    def decisions(self, problem: Problem) -> int:
        return int(self._features(problem)[0].max()) + 1

    @torch.no_grad()
    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        encoded = self.placer.encode(self._describe(problem))
        device = self.placer.decode(encoded, count, generator, greedy, self.explore)
        placed = within_pins(problem, device.numpy()[:, self._features(problem)[0][problem.unit_of]])
        return Proposals(placed, on_devices(problem, placed), {"device": device})

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.placer.given(self.placer.encode(self._describe(problem)), actions["device"])
        log_prob, entropy = log_prob_entropy(logits, actions["device"])
        return log_prob.sum(dim=1), entropy.mean(dim=1)

    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        group, count = self._features(problem)[0], self.decisions(problem)
        device = [majority(problem, group, plan.device, count) for plan in plans]
        return {"device": torch.from_numpy(np.stack(device))}

    def _describe(self, problem: Problem) -> Tensor:
        """float32 [G, F], the groups in the graph's order."""
        group, kind, sizes, adjacency = self._features(problem)
        of_op = torch.from_numpy(group[problem.unit_of])
        count = int(group.max()) + 1
        summed = torch.zeros(count, _KIND_WIDTH).index_add_(0, of_op, self.kind(kind))
        ops = torch.bincount(of_op, minlength=count).unsqueeze(1)
        return torch.cat([summed / ops, sizes, adjacency], dim=1)

    def _features(self, problem: Problem) -> tuple[np.ndarray, Tensor, Tensor, Tensor]:
        """Groups int64 [U], numbered in the graph's order; kinds [n]; outputs [G, 6]; adjacency [G, groups]."""
        key = problem.graph.hash
        if key not in self._known:
            graph = problem.graph
            rough = coarse_groups(problem, self.groups)
            count = int(rough.max()) + 1
            mean = np.bincount(rough[problem.unit_of], graph.topological_position, count) / np.bincount(
                rough[problem.unit_of], minlength=count
            )
            rank = np.empty(count, dtype=np.int64)
            rank[np.argsort(mean, kind="stable")] = np.arange(count)
            group = rank[rough]
            of_op = torch.from_numpy(group[problem.unit_of])
            sizes = torch.zeros(count, MOST_OUTPUTS).index_add_(0, of_op, output_sizes(problem).clamp_min(0))
            producer, consumer, _ = graph.edge_list
            adjacency = torch.zeros(count, self.groups).index_put_(
                (of_op[torch.tensor(producer)], of_op[torch.tensor(consumer)]), torch.tensor(1.0), accumulate=True
            )
            self._known[key] = group, kind_numbers(problem, self.kinds), torch.log1p(sizes), torch.log1p(adjacency)
        return self._known[key]


_GROUPER_HIDDEN = 64


class PaperHierarchical(_OfKinds):
    """Grouper and Placer of Mirhoseini et al., "A Hierarchical Model for Device Placement", ICLR 2018, section 3.

    Grouper: one hidden layer of 64, softmax over 256 groups for every op (here: for every colocation group, which must
    stay together), from the kind of op, its outputs and up to six producers and six consumers. Placer: sequence to
    sequence over the groups, described by counts of kinds, summed outputs and adjacency.
    Where the released code differs from the paper, the paper counts; its known faults are not repeated: adjacency keeps
    fan-in, outputs are beside the counts of kinds and not added to them, the Grouper has its nonlinearity, and the
    logits are bounded by 5 (not by 1, which caps the probability of a device). Outputs are sizes instead of shapes.
    """

    name: ClassVar[str] = "hierarchical_paper"

    def __init__(self, kinds: list[str], devices: int, groups: int = 256, hidden: int = 256) -> None:
        super().__init__(kinds, devices, groups, hidden)
        width = _KIND_WIDTH + MOST_OUTPUTS + 2 * MOST_NEIGHBOURS
        self.grouper = nn.Sequential(nn.Linear(width, _GROUPER_HIDDEN), nn.ReLU(), nn.Linear(_GROUPER_HIDDEN, groups))
        self.placer = AttentionPlacer(len(kinds) + 1 + MOST_OUTPUTS + groups, devices, hidden)
        self._known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> PaperHierarchical:
        groups = min(256, max(problem.n_units for problem in problems))
        return cls(commonest_kinds(problems), problems[0].cluster.n_devices, groups)

    def decisions(self, problem: Problem) -> int:
        return self.groups

    @torch.no_grad()
    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        logits = self._group_logits(problem)
        if self.explore:
            logits = logits + torch.randn(logits.shape, generator=generator)
        group = draw(logits, generator, greedy)
        encoded = self.placer.encode(self._describe(problem, group))
        device = self.placer.decode(encoded, count, generator, greedy, self.explore)
        placed = within_pins(problem, device.numpy()[:, group.numpy()[problem.unit_of]])
        actions = {"group": group.expand(count, -1), "device": device}
        return Proposals(placed, on_devices(problem, placed), actions)

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        group, which = torch.unique(actions["group"], dim=0, return_inverse=True)
        of_group, _ = log_prob_entropy(self._group_logits(problem).expand(len(group), -1, -1), group)
        log_prob, entropy = torch.zeros(len(which)), torch.zeros(len(which))
        for number, row in enumerate(group):
            mine = which == number
            device = actions["device"][mine]
            logits = self.placer.given(self.placer.encode(self._describe(problem, row)), device)
            of_device, spread = log_prob_entropy(logits, device)
            log_prob = log_prob.masked_scatter(mine, of_device.sum(dim=1) + of_group[number].sum())
            entropy = entropy.masked_scatter(mine, spread.mean(dim=1))
        return log_prob, entropy

    @torch.no_grad()
    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        group = self._group_logits(problem).argmax(dim=-1)
        device = np.stack([majority(problem, group.numpy(), plan.device, self.groups) for plan in plans])
        return {"group": group.expand(len(plans), -1), "device": torch.from_numpy(device)}

    def _group_logits(self, problem: Problem) -> Tensor:
        """float32 [U, groups], from the first op of each unit."""
        kind, sizes, adjacent = self._features(problem)
        first = torch.from_numpy(Units.of(problem).first_op)
        logits: Tensor = self.grouper(torch.cat([self.kind(kind[first]), sizes[first], adjacent[first]], dim=1))
        return logits

    def _describe(self, problem: Problem, group: Tensor) -> Tensor:
        """float32 [G, F]: counts of kinds, summed outputs and adjacency of groups, orders of magnitude."""
        kind, sizes, _ = self._features(problem)
        of_op = group[torch.tensor(problem.unit_of)]
        counts = torch.zeros(self.groups, len(self.kinds) + 1).index_put_(
            (of_op, kind), torch.tensor(1.0), accumulate=True
        )
        summed = torch.zeros(self.groups, MOST_OUTPUTS).index_add_(0, of_op, sizes.clamp_min(0))
        producer, consumer, _ = problem.graph.edge_list
        adjacency = torch.zeros(self.groups, self.groups).index_put_(
            (of_op[torch.tensor(producer)], of_op[torch.tensor(consumer)]), torch.tensor(1.0), accumulate=True
        )
        return torch.log1p(torch.cat([counts, summed, adjacency + adjacency.T], dim=1))

    def _features(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        key = problem.graph.hash
        if key not in self._known:
            self._known[key] = kind_numbers(problem, self.kinds), output_sizes(problem), neighbours(problem)
        return self._known[key]
