"""`search_strategies`: the best strategies of a graph on a cluster."""

from __future__ import annotations

from collections.abc import Callable

from baselines.budget import Budget
from baselines.strategies.searching.estimator import Estimator
from baselines.strategies.searching.families import family_of
from baselines.strategies.searching.grid import hand_grid
from baselines.strategies.searching.records import Estimate, Scored, StrategyOutcome
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph

Progress = Callable[[str, int, int], None]  # what is done, how many are, of how many


def search_strategies(
    graph: OpGraph, cluster: Cluster, seed: int, budget: Budget, progress: Progress | None = None
) -> StrategyOutcome:
    """Find the best strategies; with evaluations alone for a limit the outcome depends on the seed only.

    Args:
        seed: of everything random.
        budget: strategies scored by the simulator count as evaluations.
        progress: called before each step of the search.
    """
    estimator = Estimator(graph, cluster)
    estimates: list[Estimate] = []
    for number, strategy in enumerate(hand_grid(graph, cluster)):
        if budget.over() or number >= 24:
            break
        if progress is not None:
            progress(f"estimating {strategy}", number, 24)
        try:
            estimates.append(estimator.estimate(strategy))
        except StrategyError:
            continue
    estimates.sort(key=lambda estimate: (not estimate.fits, estimate.step_time_s))
    found = [scored(graph, cluster, estimate.strategy) for estimate in estimates[:8]]
    fitting = sorted((s for s in found if s.fits), key=lambda s: s.step_time_s)
    best_of: dict[str, Scored] = {}
    for one in fitting:
        best_of.setdefault(family_of(one.strategy), one)
    return StrategyOutcome(
        best=fitting[0] if fitting else None,
        best_of=best_of,
        front=tuple(fitting[:1]),
        frugal=min(estimates, key=lambda e: e.missing_bytes, default=None),
        estimated=len(estimates),
        scored=len(found),
    )
