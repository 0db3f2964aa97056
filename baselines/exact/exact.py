"""Exact solvers, whichever the objective."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.budget import Budget, Found
from baselines.fitting import best_of_few
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem


def exact(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """Search with a proof: constraint programming for latency, mixed-integer programming for throughput.

    Ends with the optimum proven, or with the best plan and the best lower bound known when the budget is over. See
    `baselines.exact.cp_sat` and `baselines.exact.milp`. For latency, where there are few placements, all are scored
    first: a schedule that waits for memory ends constraint programming early, as no order of ops can say it.
    """
    if problem.objective == THROUGHPUT:
        from baselines.exact.milp import milp

        return milp(problem, seed, starts, budget)
    from baselines.exact.cp_sat import cp_sat

    few = best_of_few(problem, budget)
    return cp_sat(problem, seed, starts if few is None else [*starts, few], budget)


def exact_is_tractable(problem: Problem) -> bool:
    """True if the whole problem is small enough for `exact` to be worth its time."""
    if problem.objective == THROUGHPUT:
        from baselines.exact.milp import tractable as milp_is_tractable

        return milp_is_tractable(problem)
    from baselines.exact.cp_sat import tractable as cp_sat_is_tractable

    return cp_sat_is_tractable(problem)
