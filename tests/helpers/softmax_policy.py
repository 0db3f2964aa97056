"""The smallest policy there is, to test training with: a softmax over devices for each unit, learned by REINFORCE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from env.gym.batch import scorer_of
from env.plan import Plan
from env.problem import Problem
from graphs.errors import MismatchError
from placement.learning.learners import registry as learners
from placement.learning.learners.learner import Best, LearnerState, Update
from placement.learning.learners.registry import ReinforceOptions
from placement.learning.policies import registry as policies
from placement.learning.policies.policy import PlacementPolicy, Proposals

BATCH = 8


class SoftmaxPolicy(PlacementPolicy):
    """One logit for each unit and device."""

    name: ClassVar[str] = "hierarchical"  # the tests put it in the place of that one

    def __init__(self, units: int, devices: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(units, devices) * 0.01)

    def config(self) -> dict[str, Any]:
        return {"units": self.logits.shape[0], "devices": self.logits.shape[1]}

    def check(self, problem: Problem) -> None:
        have, want = (problem.n_units, problem.cluster.n_devices), tuple(self.logits.shape)
        if have != want:
            raise MismatchError(f"this policy is for (units, devices) {want}, the problem has {have}; train another.")

    def _masked(self, problem: Problem) -> Tensor:
        allowed = torch.as_tensor(np.array([problem.allowed[members[0]] for members in problem.units]))
        return self.logits.masked_fill(~allowed, -math.inf)

    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        with torch.no_grad():
            logits = self._masked(problem)
            if greedy:
                units = logits.argmax(1).expand(count, -1)
            else:
                units = torch.multinomial(logits.softmax(1), count, replacement=True, generator=generator).T
        return Proposals(units.numpy()[:, problem.unit_of], None, {"units": units})

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        chosen = torch.distributions.Categorical(logits=self._masked(problem), validate_args=False)
        return chosen.log_prob(actions["units"]).sum(1), chosen.entropy().mean().expand(len(actions["units"]))

    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        first = [members[0] for members in problem.units]
        return {"units": torch.as_tensor(np.array([plan.device[first] for plan in plans]))}


class SoftmaxLearner:
    """REINFORCE with the mean of the batch as baseline, on the problems in turn."""

    def __init__(
        self, problems: Sequence[Problem], seed: int, recipe: learners.Recipe, beginning: learners.Beginning
    ) -> None:
        self.problems = problems
        torch.manual_seed(seed)
        assert isinstance(beginning.trained, SoftmaxPolicy | None)
        self.policy = beginning.trained or SoftmaxPolicy(problems[0].n_units, problems[0].cluster.n_devices)
        for problem in problems:
            self.policy.check(problem)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.1)
        self.generator = torch.Generator().manual_seed(seed)
        self.scorers = [scorer_of(beginning.scorer)(problem) for problem in problems]
        self.samples = 0
        self.best: list[Best | None] = [None] * len(problems)

    def update(self) -> Update:
        k = self.samples // BATCH % len(self.problems)
        problem = self.problems[k]
        proposed = self.policy.propose(problem, BATCH, self.generator)
        scores = self.scorers[k].batch(proposed.device)
        value_s = np.where(scores.feasible, scores.step_time_s, np.inf)
        self.samples += BATCH
        first, best = int(value_s.argmin()), self.best[k]
        if value_s[first] < (math.inf if best is None else best.value_s):
            self.best[k] = best = Best(proposed.plan(first), float(value_s[first]), self.policy.name)
        log_prob, entropy = self.policy.evaluate(problem, proposed.actions)
        reward = -torch.as_tensor(np.sqrt(scores.step_time_s), dtype=torch.float32)
        self.optimizer.zero_grad()
        (-((reward - reward.mean()) * log_prob).mean()).backward()
        self.optimizer.step()
        fits = value_s[scores.feasible]
        return Update(
            problem=k,
            samples=self.samples,
            mean_s=float(fits.mean()) if len(fits) else math.nan,
            best_s=math.inf if best is None else best.value_s,
            feasible=float(scores.feasible.mean()),
            entropy=float(entropy.detach().mean()),
        )

    def state(self) -> LearnerState:
        tensors = {"logits": self.policy.logits.detach(), "generator": self.generator.get_state()}
        moments = self.optimizer.state_dict()["state"]
        tensors |= {f"adam.{key}": value for key, value in moments[0].items()} if moments else {}
        found = [None if b is None else {"device": b.plan.device.tolist(), "value_s": b.value_s} for b in self.best]
        return LearnerState(tensors, {"samples": self.samples, "best": found})

    def restore(self, state: LearnerState) -> None:
        with torch.no_grad():
            self.policy.logits.copy_(state.tensors["logits"])
        self.generator.set_state(state.tensors["generator"])
        moments = {key[5:]: value for key, value in state.tensors.items() if key.startswith("adam.")}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {0: moments} if moments else {}, "param_groups": groups})
        self.samples = state.values["samples"]
        self.best = [
            None if b is None else Best(Plan(np.array(b["device"])), b["value_s"], self.policy.name)
            for b in state.values["best"]
        ]


def in_the_place_of_hierarchical(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hierarchical` be this policy until the test ends."""
    monkeypatch.setitem(policies._HOME, "hierarchical", "softmax_policy:SoftmaxPolicy")
    recipe = learners.Recipe("hierarchical", ReinforceOptions(), "softmax_policy:SoftmaxLearner")
    monkeypatch.setitem(learners.RECIPES, "hierarchical", {"default": recipe})
