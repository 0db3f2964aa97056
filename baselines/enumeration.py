"""The best placement by trying every one, where they are few."""

from __future__ import annotations

import itertools
import math

import numpy as np

from baselines import prices
from baselines.budget import Budget
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.units import Units

MOST_PLACEMENTS = 4096  # so many take a fraction of a second


def best_of_few(problem: Problem, budget: Budget) -> Plan | None:
    """Score every placement under the default priority; an evaluation each.

    Returns:
        the best that fits; None if none does, or if there are more than `MOST_PLACEMENTS` or than the budget allows.
    """
    choices = [np.flatnonzero(row).tolist() for row in Units.of(problem).allowed]
    if math.prod(map(len, choices)) > min(MOST_PLACEMENTS, budget.evaluations_left()):
        return None
    scorer, best, best_s = Scorer(problem), None, math.inf
    for placed in itertools.product(*choices):
        if budget.over():
            break
        plan = Plan(np.array(placed, dtype=np.int64)[problem.unit_of])
        value_s = scorer.value(plan)
        budget.spend(1, prices.placement_s(problem))
        if value_s < best_s:
            best, best_s = plan, value_s
    return best
