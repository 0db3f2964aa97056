"""Local search, whichever the objective."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.budget import Budget, Found
from baselines.fitting import best_of_few, fitting
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem


def local_search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """Annealed local search from the best of the plans: of the schedule for latency, of the loads for throughput.

    See `baselines.local_search.makespan_search` and `baselines.local_search.load_search`. Where there are few
    placements all are scored first; without a plan it looks for one by `baselines.fitting`.

    Raises:
        NotFoundError: there was no plan, and none was found.
    """
    began = budget.spent
    few = best_of_few(problem, budget)
    plans = [*starts, few] if few is not None else starts or [fitting(problem, seed, budget)]
    found = _search(problem, seed, plans, budget)
    return Found(found.plan, found.lower_bound_s, budget.spent - began)


def _search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    if problem.objective == THROUGHPUT:
        from baselines.local_search.load_search import load_search  # the compiled searches load when first used

        return load_search(problem, seed, starts, budget)
    from baselines.local_search.makespan_search import makespan_search

    return makespan_search(problem, seed, starts, budget)
