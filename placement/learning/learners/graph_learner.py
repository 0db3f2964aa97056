"""Training of the `graph` policy by policy gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from env.gym.batch import ScorerFactory
from env.problem import Problem
from placement.learning.learners.learner import Learner
from placement.learning.learners.reinforce import Options, Reinforce
from placement.learning.learners.starts import starts_of
from placement.learning.networks.graph_policy import GraphPolicy

_OPTIONS = Options(learning_rate=1e-3, patience=None)


def learner(
    problems: Sequence[Problem],
    seed: int,
    *,
    preset: str = "default",
    warm_start: bool = True,
    scorer: str | ScorerFactory = "simulate",
    trained: GraphPolicy | None = None,
) -> Learner:
    """A training run of the graph policy; it has one preset."""
    torch.manual_seed(seed)
    starts = starts_of(problems, seed, warm_start=warm_start, scorer=scorer, trained=trained)
    policy, is_trained = trained or GraphPolicy(), trained is not None
    return Reinforce(policy, problems, seed, _OPTIONS, starts, scorer=scorer, is_trained=is_trained)
