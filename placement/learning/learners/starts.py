"""Starts of learning: the best list schedule known for a problem, or a trained policy's placement."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from baselines.budget import Budget
from baselines.portfolio import candidates
from env.gym.batch import ScorerFactory, scorer_of
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import InfeasibleError
from placement.learning.learners.learner import Best
from placement.learning.learners.pretrained import propose_pretrained
from placement.learning.policies.policy import PlacementPolicy
from placement.solving.methods import heuristics_for
from placement.workers.scoring import ScoredByWorkers

if TYPE_CHECKING:
    from placement.learning.learners.registry import Beginning

# Made for a steady state: slow, and never the fastest step.
_NOT_FOR_LATENCY = ("pipedream", "pipedream_hierarchical")
_PRETRAINED = "pretrained"


def starts_of(problems: Sequence[Problem], seed: int, beginning: Beginning) -> list[Best | None]:
    """For each problem the plan to begin with, its time by the scorer that is learned from; None for no plan.

    That is the likeliest placement of the policy that is gone on with, or the best that is found without searching.
    """
    found: list[Best | None] = [None] * len(problems)
    if beginning.trained is not None:
        found = [_likeliest(problem, beginning.trained) for problem in problems]
    elif beginning.warm_start:
        found = best_starts(problems, seed)
    if beginning.scorer == "simulate" or isinstance(beginning.scorer, ScoredByWorkers):
        return found
    return [
        None if best is None else _scored_again(problem, best, beginning.scorer)
        for problem, best in zip(problems, found, strict=True)
    ]


def _likeliest(problem: Problem, trained: PlacementPolicy) -> Best | None:
    trained.check(problem)
    plan = trained.propose(problem, 1, torch.Generator(), greedy=True).plan(0)
    value_s = Scorer(problem).value(plan)
    return Best(plan, value_s, trained.name) if math.isfinite(value_s) else None


def _scored_again(problem: Problem, best: Best, scorer: str | ScorerFactory) -> Best | None:
    plan = dataclasses.replace(best.plan, transfer_order=None)  # a fixed sequence is for the simulator alone
    orders = None if plan.order is None else np.asarray(plan.order)[None]
    scores = scorer_of(scorer)(problem).batch(plan.device[None], orders=orders)
    return Best(plan, float(scores.step_time_s[0]), best.source) if scores.feasible[0] else None


def best_starts(problems: Sequence[Problem], seed: int) -> list[Best | None]:
    """For each problem the best that heuristics and the pretrained list scheduler find without searching.

    None where nothing that they find fits: learning begins from nothing there.
    """
    return [_best_start(problem, seed) for problem in problems]


def _best_start(problem: Problem, seed: int) -> Best | None:
    methods = {name: method for name, method in heuristics_for(problem).items() if name not in _NOT_FOR_LATENCY}
    found: list[Best] = []
    with contextlib.suppress(InfeasibleError):
        first = candidates(problem, seed, methods, Budget())[0]
        found.append(Best(first.plan, first.value_s, first.method))
    with contextlib.suppress(InfeasibleError):
        plan = propose_pretrained(problem, seed, Budget(seconds=0.0))
        found.append(Best(plan, Scorer(problem).value(plan), _PRETRAINED))
    return min(found, key=lambda best: best.value_s, default=None)
