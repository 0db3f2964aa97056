"""Where learning begins: the best list schedule known for a problem."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from baselines.portfolio import candidates
from baselines.search import Budget
from env.problem import Problem
from env.scoring import Scorer
from graphs.errors import InfeasibleError
from placement.learning.learner import Best
from placement.learning.pretrained import propose_pretrained
from placement.methods import heuristics_for

# Made for a steady state: slow, and never the fastest step.
_NOT_FOR_LATENCY = ("dp_contiguous", "pipedream", "pipedream_hierarchical")
_PRETRAINED = "pretrained"


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
        found.append(Best(plan, Scorer(problem).value(plan.device, plan.order), _PRETRAINED))
    return min(found, key=lambda best: best.value_s, default=None)
