"""`PaperHierarchical`: the hierarchical model as published, without the faults of the code that was released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from env.units import Units
from placement.learning.networks.attention_placer import (
    MOST_NEIGHBOURS,
    MOST_OUTPUTS,
    AttentionPlacer,
    commonest_kinds,
    kind_numbers,
    neighbours,
    output_sizes,
)
from placement.learning.networks.orders import check_devices, majority, on_devices, within_pins
from placement.learning.networks.placer import draw, log_prob_entropy
from placement.learning.policies.policy import PlacementPolicy, Proposals

_KIND_WIDTH = 20
_GROUPER_HIDDEN = 64


class PaperHierarchical(PlacementPolicy):
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
        super().__init__()
        self.kinds, self.devices, self.groups, self.hidden = list(kinds), devices, groups, hidden
        self.kind = nn.Embedding(len(kinds) + 1, _KIND_WIDTH)
        width = _KIND_WIDTH + MOST_OUTPUTS + 2 * MOST_NEIGHBOURS
        self.grouper = nn.Sequential(nn.Linear(width, _GROUPER_HIDDEN), nn.ReLU(), nn.Linear(_GROUPER_HIDDEN, groups))
        self.placer = AttentionPlacer(len(kinds) + 1 + MOST_OUTPUTS + groups, devices, hidden)
        self._known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> PaperHierarchical:
        groups = min(256, max(problem.n_units for problem in problems))
        return cls(commonest_kinds(problems), problems[0].cluster.n_devices, groups)

    def config(self) -> dict[str, Any]:
        return {"kinds": self.kinds, "devices": self.devices, "groups": self.groups, "hidden": self.hidden}

    def check(self, problem: Problem) -> None:
        check_devices(problem, self.devices)
        kind_numbers(problem, self.kinds)

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
