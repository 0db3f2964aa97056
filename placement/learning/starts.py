"""Where learning begins: the best plan that the heuristics find for a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

import baselines
from baselines.portfolio import candidates
from baselines.search import Budget
from env.problem import LATENCY, Problem
from placement.learning.learner import Best

# Made for a steady state: slow, and never the fastest step.
_NOT_FOR_LATENCY = ("dp_contiguous", "pipedream", "pipedream_hierarchical")


def best_starts(problems: Sequence[Problem], seed: int) -> list[Best]:
    """For each problem the best of the heuristics.

    Raises:
        InfeasibleError: none of them fits.
    """
    found = []
    for problem in problems:
        methods = {
            name: method
            for name, method in baselines.METHODS.items()
            if LATENCY in baselines.OBJECTIVES_OF.get(name, (LATENCY,))
            and problem.graph.n_ops <= baselines.MOST_OPS.get(name, math.inf)
            and name not in _NOT_FOR_LATENCY
        }
        best = candidates(problem, seed, methods, Budget())[0]
        found.append(Best(best.plan, best.value_s, best.method))
    return found
