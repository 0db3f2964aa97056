"""`best_of_all`: the fastest of one device, the placements of a graph as it is, and all strategies."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from baselines.budget import NO_LIMITS, Budget, Limits
from baselines.strategies.searching.records import Rival
from baselines.strategies.searching.settings import DEFAULTS
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Priority
from env.resizing import part_of
from env.routes import TABLE_DEVICES
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.results.result import Result
from placement.solving.choosing import NO_AIDS, SearchAids, fastest
from placement.solving.compiling import compile_for, compile_for_strategies
from placement.solving.interruption import on_interrupt
from placement.solving.methods import AUTO, DEFAULT_BUDGET_S, SINGLE
from placement.solving.solver import Solver
from placement.solving.strategy_row import without_answer

if TYPE_CHECKING:
    from baselines.strategies.searching.outcome import StrategyOutcome

Progress = Callable[[str, int, int], None]  # what is done, how many are, of how many

PLACED_DEVICES = 64  # of very many, a graph as it is may be placed on the first ones
FIRST_S = 3.0  # of search before the first advice
_S_PER_OP, MOST_DEFAULT_S = 0.01, 45.0  # so that all ends within a minute


def default_budget_s(graph: OpGraph) -> float:
    """Seconds for a search over strategies; more for a large graph, whose strategies take longer to score."""
    return max(DEFAULT_BUDGET_S, min(MOST_DEFAULT_S, _S_PER_OP * graph.n_ops // 1))


def first_advice(graph: OpGraph) -> str:
    """A remark about an answer that is the first advice."""
    return (
        f"First advice, after {FIRST_S:g} s of search and unchecked; without --first the search has up to "
        f"{default_budget_s(graph):.0f} s, and its answer is checked."
    )


def best_of_all(
    graph: OpGraph,
    cluster: Cluster,
    seed: int = 0,
    limits: Limits = NO_LIMITS,
    progress: Progress | None = None,
    aids: SearchAids = NO_AIDS,
) -> Result:
    """The fastest of one device, the placements that `AUTO` finds, and all strategies, within one budget.

    Checks of the strategies that would be the answer come on top of it.

    Returns:
        The result, with `Result.alternatives`; without an answer where nothing fits, and why.
    """
    began_s = time.perf_counter()
    few = cluster if cluster.n_devices <= TABLE_DEVICES else part_of(cluster, cluster.compute_devices[:PLACED_DEVICES])
    solver = solver_or_reason(graph, few, seed)
    compile_for_strategies(places=not aids.tool.name)  # no tool runs placements
    if isinstance(solver, Solver):
        compile_for(solver.problem, [SINGLE if aids.tool.name else AUTO])
    # It begins here: compiling takes longer than it, once.
    budget = limits.budget(FIRST_S if aids.first else default_budget_s(graph))

    searched = functools.partial(find_strategies, graph, cluster, budget, progress=progress, aids=aids)
    placed: Result | None
    if isinstance(solver, Solver) and aids.tool.name:
        placed, single = None, solver.solve(SINGLE)
        outcome = searched(rival=Rival(single.objective_s or math.inf))
        budget.spend(outcome.scored)
    elif isinstance(solver, str):
        placed = single = without_answer(graph, few, seed, AUTO, solver)
        outcome = searched(rival=Rival(share=DEFAULTS.placing_share))
        budget.spend(outcome.scored)
    else:
        own = PlacedBeside(solver, budget)
        outcome = searched(rival=own.rival())
        if progress is not None:
            progress("placing the graph as it is", 0, 0)
        placed = own.best(math.inf if outcome.best is None else outcome.best.step_time_s)
        single = solver.solve(SINGLE)
    best = fastest(graph, cluster, seed, placed, single, outcome, aids)
    if aids.first:
        best = dataclasses.replace(best, note=" ".join(filter(None, (first_advice(graph), best.note))))
    return _within(budget, best, began_s)


def beside_placements(
    graph: OpGraph,
    cluster: Cluster,
    seed: int,
    placed: Result,
    single: Result,
    limits: Limits = NO_LIMITS,
    aids: SearchAids = NO_AIDS,
) -> Result:
    """`best_of_all` with placements that are known, and the whole budget for strategies."""
    began_s = time.perf_counter()
    compile_for_strategies()
    budget = limits.budget(default_budget_s(graph))
    outcome = find_strategies(graph, cluster, budget, aids=SearchAids(tool=aids.tool))
    budget.spend(outcome.scored)
    return _within(budget, fastest(graph, cluster, seed, placed, single, outcome, aids), began_s)


def _within(budget: Budget, result: Result, began_s: float) -> Result:
    """A result of a search that has had a budget."""
    return dataclasses.replace(
        result,
        budget_s=None if math.isinf(budget.seconds) else budget.seconds,
        evaluations=budget.spent,
        interrupted=budget.was_cut(),
        limit_s=None if math.isinf(budget.limit.seconds) else budget.limit.seconds,
        solve_time_s=time.perf_counter() - began_s,
    )


def find_strategies(
    graph: OpGraph,
    cluster: Cluster,
    budget: Budget,
    *,
    progress: Progress | None = None,
    aids: SearchAids = NO_AIDS,
    rival: Rival | None = None,
) -> StrategyOutcome:
    """Outcome of the search over strategies in its share of what a budget has left; Ctrl-C ends it with its best."""
    from baselines.strategies.searching.search import search_strategies  # loads transforms and simulator

    begin = tuple(starts(graph, cluster))
    rival = dataclasses.replace(rival or Rival(), own=aids.own)
    seconds = math.inf if math.isinf(budget.seconds) else DEFAULTS.scoring_share * budget.left_s()
    each = budget.evaluations_left() / DEFAULTS.placements_each
    most = each if math.isinf(each) else max(1, math.ceil(each))
    own = Budget(max(DEFAULTS.quick_s, seconds), most, interrupted=budget.interrupted, limit=budget.limit)

    def stop() -> None:
        own.interrupted = True

    with on_interrupt(stop):
        outcome = search_strategies(graph, cluster, own, progress, begin, aids.score_many, rival, aids.tool)
    budget.spend(0, own.worked_s)
    budget.interrupted |= own.interrupted or outcome.interrupted
    return outcome


def starts(graph: OpGraph, cluster: Cluster) -> Iterator[Strategy]:
    """The first strategies of a search: all devices of the cluster, of each host, and of each kind, along one axis."""
    from baselines.strategies.devices import natural_groups
    from baselines.strategies.searching.space import Space

    space = Space(graph, cluster)
    for n, names in natural_groups(cluster):
        for zero in range(4) if graph.is_training else (0,):
            yield space.strategy({"dp": n}, zero=zero, device_names=names)
        yield space.strategy({"tp": n}, device_names=names)


def solver_or_reason(graph: OpGraph, cluster: Cluster, seed: int) -> Solver | str:
    """A solver for the graph as it is, or why it fits nowhere."""
    try:
        return Solver(graph, cluster, seed, LATENCY, Priority.LONGEST_PATH.value)
    except InfeasibleError as error:
        return str(error)


class PlacedBeside:
    """First a little, and once strategies have been searched with what is left; with all evaluations in any case.

    Strategies count by themselves, and the same seed takes the same way again and further, so that with as many
    evaluations the answer is never worse than what `AUTO` finds alone.
    """

    def __init__(self, solver: Solver, budget: Budget) -> None:
        """
        Args:
            budget: of both; what is spent here is counted there.
        """
        self._solver, self._budget = solver, budget
        share = DEFAULTS.placing_quick_share
        quick_s = min(share * budget.seconds, DEFAULTS.most_placing_quick_s)
        self._quick = self._placed(math.inf if math.isinf(budget.seconds) else quick_s, share * budget.evaluations)

    def rival(self) -> Rival:
        """The answer to beat, found in a small part of the budget."""
        return Rival(_value_s(self._quick), DEFAULTS.placing_share, self._solver.lower_bound_s)

    def best(self, best_s: float) -> Result:
        """The best placement, not looked for any longer where none can beat a strategy's step time. Called once."""
        budget, quick_s = self._budget, _value_s(self._quick)
        if self._is_beaten(quick_s, best_s) or budget.interrupted or budget.limit.is_over():
            return self._counted(self._quick)
        is_near = quick_s <= DEFAULTS.near_placed * best_s and not math.isinf(quick_s)
        seconds = budget.left_s() if is_near else min(budget.left_s(), DEFAULTS.placing_share * budget.seconds)
        return self._counted(min(self._quick, self._placed(seconds, budget.evaluations), key=_value_s))

    def _is_beaten(self, placed_s: float, best_s: float) -> bool:
        """Whether no placement can be as fast as a strategy that takes `best_s`; any may, before one is known."""
        is_known = not math.isinf(placed_s)
        return best_s <= self._solver.lower_bound_s or (is_known and Rival(placed_s).is_beaten_by(best_s))

    def _counted(self, result: Result) -> Result:
        self._budget.spend(result.evaluations or 0)
        return result

    def _placed(self, seconds: float, evaluations: float) -> Result:
        """The placement found within limits; an infinite one is no limit."""
        part = Budget(
            seconds, math.inf if math.isinf(evaluations) else math.ceil(evaluations), limit=self._budget.limit
        )
        result = self._solver.solve_within(AUTO, part)
        self._budget.spend(0, part.worked_s)
        self._budget.interrupted |= part.interrupted  # also where it is not the better one
        return result


def _value_s(result: Result) -> float:
    return math.inf if result.objective_s is None else result.objective_s
