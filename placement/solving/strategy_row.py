"""`strategy_row`: a strategy carried out on a graph and a cluster, as a `Result`, with where its time and memory go."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baselines.strategies.figures import StrategyFigures, figures
from env.cluster import Cluster
from env.lanes import with_lanes_of
from env.objectives import LATENCY
from env.plan import Priority
from env.problem import Problem
from env.routes import TABLE_DEVICES
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.results.result import Result
from placement.results.same_model import model_hash
from placement.results.utilisation import step_size
from placement.results.why import spent
from placement.solving.methods import STRATEGY
from placement.solving.solver import Attempt, Finding, Solver

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied


MOST_BOUNDED_OPS = 100_000  # the bound of a larger rewritten graph takes as long as all the rest


@dataclass(frozen=True)
class StrategyRow:
    """One strategy's outcome.

    Attributes:
        result: the placement of the rewritten graph; of ``none``, what `AUTO` found for the graph as it is.
        figures: where time and memory go, also where the memory does not suffice; None where no order of the pipeline
            fits, or ``none`` has no placement, or the strategy is refused.
        applied: the rewritten graph and its plan; None where `figures` is, and for ``none``.
        is_refused: whether graph or cluster do not allow the strategy; the result's reason says why.
    """

    result: Result
    figures: StrategyFigures | None
    applied: Applied | None = field(default=None, repr=False)
    is_refused: bool = False

    @property
    def strategy(self) -> Strategy:
        return self.result.strategy

    def checked(self, words: str) -> StrategyRow:
        """The same, whose result says what was computed of it before it was advised."""
        return dataclasses.replace(self, result=dataclasses.replace(self.result, checked=words))

    @property
    def without_answer(self) -> str:
        """Words in the place of a time, where there is none."""
        return "not possible" if self.is_refused else "does not fit"


def strategy_row(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, seed: int = 0, bounds: Mapping[str, float] | None = None
) -> StrategyRow:
    """One strategy other than ``none``, carried out and scored; where its graph would be too large, one place for all.

    Args:
        bounds: `strategy_bounds` of graph and cluster, if they are known; None to work them out, and that of the
            rewritten graph, which takes as long as the rest where that is large.

    Raises:
        StrategyError: graph or cluster do not allow it.
    """
    from baselines.strategies.applied import applied  # these load all transforms
    from baselines.strategies.folding import is_to_be_folded
    from baselines.strategies.searching.bound import ALL, strategy_bounds

    began_s = time.perf_counter()
    keeps_statistics = strategy.statistics != "local"
    bounds = bounds if keeps_statistics else None  # which hold for strategies that keep them
    try:
        what = applied(graph, cluster, strategy, folded=is_to_be_folded(graph, cluster, strategy))
    except InfeasibleError as error:  # no order of a pipeline keeps to the memory
        refused = without_answer(graph, cluster, seed, STRATEGY, str(error))
        return StrategyRow(dataclasses.replace(refused, strategy=strategy), None)
    score, schedule = Simulator(what.problem).schedule(what.plan)
    found = figures(what, score, schedule, cluster)
    result = _result(graph, cluster, what, seed, began_s, None if bounds is None else bounds.get(ALL))
    if result.answer is not None:
        result = dataclasses.replace(result, spent=spent(found.parts))
        known = strategy_bounds(graph, cluster, keeps_statistics) if bounds is None else bounds
        result = result.among_strategies(known)
    return StrategyRow(result, found, what)


def figures_of(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> StrategyFigures:
    """Where time and memory of a strategy go: `strategy_row` without a result.

    Raises:
        StrategyError: graph or cluster do not allow it.
        InfeasibleError: no order of its pipeline keeps to the memory.
    """
    from baselines.strategies.applied import applied  # these load all transforms
    from baselines.strategies.folding import is_to_be_folded

    what = applied(graph, cluster, strategy, folded=is_to_be_folded(graph, cluster, strategy))
    return figures(what, *Simulator(what.problem).schedule(what.plan), cluster)


def cut_as_found(result: Result) -> Strategy:
    """A result's strategy with the cuts of its stages, which measured op times may have decided."""
    strategy = result.strategy
    if strategy.stages > 1 and not strategy.cuts:
        return dataclasses.replace(strategy, cuts=tuple(result.stage_cuts))
    return strategy


def refused_row(graph: OpGraph, cluster: Cluster, strategy: Strategy, reason: str, seed: int = 0) -> StrategyRow:
    """A strategy that graph or cluster do not allow, among others that they do."""
    result = dataclasses.replace(without_answer(graph, cluster, seed, STRATEGY, reason), strategy=strategy)
    return StrategyRow(result, None, is_refused=True)


def unrewritten_row(result: Result) -> StrategyRow:
    """``none``: a placement of the graph as it is, with the figures that other strategies have."""
    from baselines.strategies.applied import as_it_is

    if result.answer is None:
        return StrategyRow(result, None)
    score, schedule = result.schedule()
    found = figures(as_it_is(Problem(result.graph, result.cluster), result.plan()), score, schedule)
    return StrategyRow(dataclasses.replace(result, spent=spent(found.parts)), found)


def _result(
    graph: OpGraph, cluster: Cluster, what: Applied, seed: int, began_s: float, bound_s: float | None
) -> Result:
    from baselines.strategies.stage_cuts import stage_cuts  # loads all transforms

    priority = Priority.LONGEST_PATH.value
    if what.is_folded and cluster.n_devices <= TABLE_DEVICES:  # of more, those stay that stand for all
        what = what.on(with_lanes_of(cluster, what.problem.cluster))
    bound_s = 0.0 if what.problem.graph.n_ops > MOST_BOUNDED_OPS else None
    try:
        solver = Solver(what.problem.graph, what.problem.cluster, seed, LATENCY, priority, bound_s=bound_s)
    except InfeasibleError as error:
        result = without_answer(what.problem.graph, what.problem.cluster, seed, STRATEGY, str(error))
    else:
        found = Finding(what.plan, STRATEGY)
        result = solver.result(found, Attempt(STRATEGY, began_s), as_given=True)
    return dataclasses.replace(
        result,
        strategy=what.strategy,
        source_hash=graph.hash,
        model_hash=model_hash(graph),
        note=what.note,
        stage_cuts=stage_cuts(graph, cluster, what.strategy),
        **step_size(graph),
        solve_time_s=time.perf_counter() - began_s,
    )


def without_answer(graph: OpGraph, cluster: Cluster, seed: int, method: str, reason: str) -> Result:
    """The result of a graph that does not fit."""
    return Result(graph, cluster, graph.hash, method, method, seed, reason=reason, **step_size(graph))
