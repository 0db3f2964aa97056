"""`Learner`: one training run, an update at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from env.plan import Plan
from env.problem import Problem
from placement.learning.policies.policy import PlacementPolicy


@dataclass(frozen=True, eq=False)
class Best:
    """The best placement of a problem so far: the plan, its step time, and what found it."""

    plan: Plan
    value_s: float
    source: str


@dataclass(frozen=True)
class Update:
    """The outcome of one update of a policy.

    Attributes:
        problem: index of the problem that was sampled.
        samples: placements scored since the beginning of the run.
        mean_s: mean step time of the feasible placements of this update; NaN without any.
        best_s: best step time of this problem so far.
        feasible: share of the placements that fit.
        entropy: of the policy, in nats a decision.
        metrics: more for the log, by name.
    """

    problem: int
    samples: int
    mean_s: float
    best_s: float
    feasible: float
    entropy: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LearnerState:
    """Everything that the future of a run depends on.

    Attributes:
        tensors: parameters, optimizer moments, states of random generators, ...
        values: JSON-ready.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix`` and a dot, by what follows."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def adam_tensors(adam: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of an optimizer, as ``adam.NUMBER.NAME``."""
    each = adam.state_dict()["state"].items()
    return {f"adam.{i}.{name}": tensor.clone() for i, moments in each for name, tensor in moments.items()}


def restore_adam(adam: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `adam_tensors`."""
    known = adam.state_dict()
    numbers = range(len(known["param_groups"][0]["params"]))
    moments = {i: tensors_under(f"adam.{i}", tensors) for i in numbers}
    known["state"] = {i: {name: tensor.clone() for name, tensor in of.items()} for i, of in moments.items() if of}
    adam.load_state_dict(known)


class Learner(Protocol):
    """One run that learns placements. Two with the same problems, options and seed make the same updates."""

    @property
    def policy(self) -> PlacementPolicy:
        """The policy being trained."""

    @property
    def problems(self) -> Sequence[Problem]:
        """The problems it is trained on."""

    @property
    def samples(self) -> int:
        """Placements scored so far."""

    @property
    def best(self) -> Sequence[Best | None]:
        """The best placement of each problem so far; None before the first that fits."""

    def update(self) -> Update:
        """Sample one batch of placements of one problem, learn from it."""

    def state(self) -> LearnerState:
        """The run as it stands between two updates."""

    def restore(self, state: LearnerState) -> None:
        """Go on from there: the next updates are those that the run which gave the state would have made."""
