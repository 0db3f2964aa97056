"""`island_search`: local search on islands that exchange their best, each a task for a worker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baselines import prices
from baselines.budget import Budget, Found, Search, WallLimit
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from placement.workers.runner import Runner, Shared

ISLANDS = 8  # whatever the number of workers: the answer must not depend on them
_EVENTS = 5_000_000  # ops and edges that an island simulates in the first round, at most: about a quarter of a second
_GROWTH = 1.25  # of the evaluations from one round to the next
_ALL_FROM_BEST = 3  # every third round all islands begin with the best
_BEHIND = 1.02  # an island this much slower than the best begins with the best


@dataclass(frozen=True, eq=False)
class IslandRound:
    """Work of one island in one round.

    Attributes:
        seed: of its own, of island and round.
        start: what it begins with.
        evaluations, seconds: what it may spend, in seconds of work.
        limit_s: seconds by the clock, on top.
        target_s: an objective that is proven optimal.
    """

    objective: str
    seed: int
    start: Plan
    evaluations: int
    seconds: float
    limit_s: float
    target_s: float


@dataclass(frozen=True, eq=False)
class Landed:
    """State of an island at the end of a round: its best plan, its objective in seconds, evaluations and work."""

    plan: Plan
    value_s: float
    evaluations: int
    worked_s: float = 0.0


def island_search(runner: Runner) -> Search:
    """Local search on `ISLANDS` islands, rounds of which a runner does; a stage such as `baselines.local_search` is.

    In a round each island anneals once from its own best, with a seed of its own, for equally many evaluations; then
    those that are behind go on from the best plan. So the answer depends on seed and evaluations, not on the number of
    workers. Source of the idea: R. Tanese, "Distributed genetic algorithms", ICGA 1989.
    """

    def search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
        began = budget.spent
        if not starts or problem.cluster.n_devices == 1:
            from baselines.local_search.local_search import local_search  # which looks for a first plan

            return local_search(problem, seed, starts, budget)
        scorer = Scorer(problem)
        islands = [
            Landed(start, scorer.value(start), 0) for start in itertools.islice(itertools.cycle(starts), ISLANDS)
        ]
        for number in itertools.count():
            best = min(islands, key=lambda island: island.value_s)
            if budget.over() or budget.reached(best.value_s):
                return Found(best.plan, evaluations=budget.spent - began)
            tasks = _round(problem, seed, number, islands, budget)
            try:
                islands = runner.run(anneal_island, tasks)
            except KeyboardInterrupt:
                budget.interrupted = True
            else:
                worked_s = sum(island.worked_s for island in islands) / prices.CORES
                budget.spend(sum(island.evaluations for island in islands), worked_s)
        raise AssertionError  # rounds end with the budget

    return search


def _round(problem: Problem, seed: int, number: int, islands: Sequence[Landed], budget: Budget) -> list[IslandRound]:
    """The tasks of a round; of evaluations that do not go round, the first islands have one more."""
    graph = problem.graph
    first = max(1, _EVENTS // (graph.n_ops + len(graph.consumers)))
    own = int(min(2**62, first * _GROWTH**number))
    left = budget.evaluations_left()
    shares = [own] * ISLANDS
    if left < own * ISLANDS:
        each, odd = divmod(int(left), ISLANDS)
        shares = [each + (island < odd) for island in range(ISLANDS)]
    best = min(islands, key=lambda island: island.value_s)
    is_common = number % _ALL_FROM_BEST == _ALL_FROM_BEST - 1
    seeds = np.random.SeedSequence((seed, number)).generate_state(ISLANDS, np.uint32).tolist()
    starts = [best if is_common or island.value_s > _BEHIND * best.value_s else island for island in islands]
    left_s, limit_s = budget.left_s() * prices.CORES / ISLANDS, budget.limit.left_s()
    return [
        IslandRound(problem.objective, own_seed, start.plan, evaluations, left_s, limit_s, budget.target_s)
        for start, own_seed, evaluations in zip(starts, seeds, shares, strict=True)
    ]


def anneal_island(shared: Shared, task: IslandRound) -> Landed:
    """One round of one island, in one thread."""
    problem = shared.problem(task.objective)
    budget = Budget(task.seconds, task.evaluations, task.target_s, limit=WallLimit(task.limit_s))
    found = _search(problem, task, budget)
    return Landed(found.plan, Scorer(problem).value(found.plan), budget.spent, budget.worked_s)


def _search(problem: Problem, task: IslandRound, budget: Budget) -> Found:
    if not task.evaluations:
        return Found(task.start)
    if problem.objective == THROUGHPUT:
        from baselines.local_search.load_search import load_search

        return load_search(problem, task.seed, [task.start], budget, chains=1)
    from baselines.local_search.makespan_search import makespan_search

    return makespan_search(problem, task.seed, [task.start], budget, chains=1, cycle=task.evaluations)
