"""`Seq2Seq`: the sequence-to-sequence model of 2017 over groups of ops that stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from placement.learning.networks.attention_placer import (
    MOST_OUTPUTS,
    AttentionPlacer,
    commonest_kinds,
    kind_numbers,
    output_sizes,
)
from placement.learning.networks.orders import check_devices, majority, on_devices, within_pins
from placement.learning.networks.partition import coarse_groups
from placement.learning.networks.placer import log_prob_entropy
from placement.learning.policies.policy import PlacementPolicy, Proposals

_KIND_WIDTH = 20


class Seq2Seq(PlacementPolicy):
    """Attention over colocation groups.

    Source: A. Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017, section 3
    (doi:10.48550/arXiv.1706.04972). The paper's authors grouped the ops by hand; here the colocation groups of the
    graph are joined along heavy edges to at most `groups`. A group is described by the kinds of its ops (mean of their
    embeddings), the sizes of its outputs, and its adjacency.
    """

    name: ClassVar[str] = "seq2seq"

    def __init__(self, kinds: list[str], devices: int, groups: int = 128, hidden: int = 128) -> None:
        super().__init__()
        self.kinds, self.devices, self.groups, self.hidden = list(kinds), devices, groups, hidden
        self.kind = nn.Embedding(len(kinds) + 1, _KIND_WIDTH)
        self.placer = AttentionPlacer(_KIND_WIDTH + MOST_OUTPUTS + groups, devices, hidden)
        self._known: dict[str, tuple[np.ndarray, Tensor, Tensor, Tensor]] = {}

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> Seq2Seq:
        return cls(commonest_kinds(problems), problems[0].cluster.n_devices)

    def config(self) -> dict[str, Any]:
        return {"kinds": self.kinds, "devices": self.devices, "groups": self.groups, "hidden": self.hidden}

    def check(self, problem: Problem) -> None:
        check_devices(problem, self.devices)
        kind_numbers(problem, self.kinds)

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
