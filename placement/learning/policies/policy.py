"""`PlacementPolicy`: a network that proposes placements, and `Proposals`, what it proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Proposals:
    """k placements of one problem (n ops).

    Attributes:
        device: int64 [k, n], allowed by pins and colocation.
        order: float64 or int64 [k, n], explicit orders, lower first; None leaves the default priority.
        actions: what the policy chose, as `PlacementPolicy.evaluate` wants it: tensors with leading axis [k].
    """

    device: IntArray
    order: FloatArray | IntArray | None
    actions: Mapping[str, Tensor]

    def plan(self, index: int) -> Plan:
        """One of the placements."""
        return Plan(self.device[index], None if self.order is None else self.order[index])


class PlacementPolicy(nn.Module, ABC):
    """A distribution over the placements of any problem it is fit for.

    Attributes:
        name: what a policy file says it holds, of `placement.learning.policies.registry.policy_kind`.
    """

    name: ClassVar[str]
    explore = False  # draw with more noise than the probabilities say, where the policy knows how

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> Self:
        """An untrained policy of the usual size for these problems; drawn from torch's own generator.

        Unless a policy says otherwise, one that is made without arguments.
        """
        return cls()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-ready arguments of its constructor: ``type(policy)(**policy.config())`` has the same parameters."""

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Refuse what this policy cannot place.

        Raises:
            MismatchError: other op kinds or another number of devices than it was made for.
        """

    @abstractmethod
    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        """Draw placements, without gradients; ``greedy`` takes the likeliest choice everywhere."""

    @abstractmethod
    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of actions, float32 [k] each, with gradients."""

    @abstractmethod
    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        """The actions that come nearest to plans: what imitation makes likelier."""

    def decisions(self, problem: Problem) -> int:
        """How many choices a placement is made of."""
        return problem.n_units

    def refocus(self, problem: Problem, plan: Plan | None, stage: int, rng: np.random.Generator) -> bool:
        """Look at a problem anew when learning stands still; whether actions mean something else now.

        Args:
            plan: the best so far; None before the first.
            stage: how often this problem was looked at anew before.
        """
        return False
