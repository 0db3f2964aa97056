"""A policy of a user's own, the smallest that `Reinforce` trains: a logit for each device, and no orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from placement.learning.policies.policy import PlacementPolicy, Proposals


class OwnPolicy(PlacementPolicy):
    """Units go to devices with one chance for all of them."""

    name: ClassVar[str] = "own"

    def __init__(self, devices: int = 2) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(devices))

    def config(self) -> dict[str, Any]:
        return {"devices": len(self.logits)}

    def check(self, problem: Problem) -> None:
        pass

    @torch.no_grad()
    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        chances = self.logits.softmax(0).expand(count, -1)
        units = torch.multinomial(chances, problem.n_units, replacement=True, generator=generator)
        if greedy:
            units = self.logits.argmax().expand(count, problem.n_units)
        return Proposals(units.numpy()[:, problem.unit_of], None, {"units": units})

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        chosen = torch.distributions.Categorical(logits=self.logits)
        return chosen.log_prob(actions["units"]).sum(1), chosen.entropy().expand(len(actions["units"]))

    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        first = [members[0] for members in problem.units]
        return {"units": torch.stack([torch.as_tensor(plan.device[first]) for plan in plans])}
