"""Training of the `graph` policy by policy gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from env.problem import Problem
from placement.learning.graph_policy import GraphPolicy
from placement.learning.learner import Learner
from placement.learning.reinforce import Options, Reinforce
from placement.learning.starts import best_starts

_OPTIONS = Options(learning_rate=1e-3, patience=None)


def learner(problems: Sequence[Problem], seed: int, *, preset: str = "default", warm_start: bool = True) -> Learner:
    """A training run of the graph policy from its first parameters; it has one preset."""
    torch.manual_seed(seed)
    starts = best_starts(problems, seed) if warm_start else [None] * len(problems)
    return Reinforce(GraphPolicy(), problems, seed, _OPTIONS, starts)
