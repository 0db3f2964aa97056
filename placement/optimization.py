"""`optimize`: one problem, one method, one `Result`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from env.cluster import Cluster
from env.plan import Priority
from env.problem import LATENCY
from graphs.errors import InfeasibleError, MismatchError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import NONE, Strategy
from placement.learning.by_name import learned
from placement.runtime.checking.check import check
from placement.solving.interruption import as_keyboard_interrupt
from placement.solving.methods import AUTO, LOCAL_SEARCH, METHODS, check_options, check_problem
from placement.solving.result import Result
from placement.solving.solver import Solver
from placement.solving.stacks import asked_for, beside_compiled
from placement.solving.strategies.row import strategy_row
from placement.workers.islands import island_search
from placement.workers.runner import Shared, opened
from placement.workers.scoring import many_scored

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from placement.solving.strategies.search import Progress
    from placement.workers.runner import Runner

__all__ = ["METHODS", "optimize", "solved"]


@as_keyboard_interrupt()
def optimize(
    graph: OpGraph,
    cluster: Cluster,
    method: str = AUTO,
    *,
    seed: int = 0,
    objective: str = LATENCY,
    priority: str = Priority.LONGEST_PATH.value,
    budget_s: float | None = None,
    evaluations: int | None = None,
    scorer: str | ScorerFactory = "simulate",
    strategy: str | Strategy | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    address: str | None = None,
    stack: str | None = None,
) -> Result:
    """Find out how to run `graph` on `cluster`: which strategy, and which op on which device.

    Strategies are searched where `method`, `objective` and `priority` have their defaults and ops of the graph have
    split rows, as captured ones have. One device and the placements that ``"auto"`` finds for the graph as it is are
    always candidates.

    Args:
        method: a name in `METHODS`; ``"auto"`` tries the heuristics, one device among them, and improves the best by
            local search and, where the problem is small enough, an exact solver. docs/methods.md says which to choose,
            and how budgets are spent.
        seed: of everything random, 0 or more.
        objective: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of a device or link
            in steady state; both in seconds.
        priority: how devices choose among ready ops (docs/score.md). Where a method says itself in which order ops
            run, the faster of its order and `priority` counts.
        budget_s: seconds that a searching method may take, 10 by default, and up to 120 for strategies of a large
            graph; 0 gives the best quick answer. It stops earlier where a gap of 0 is proven, and on Ctrl-C returns the
            best so far, `Result.interrupted`.
        evaluations: placements that a searching method may score. With this and without `budget_s` the answer depends
            on the seed only, not on the speed of the machine.
        scorer: ``executor.scorer`` of a `placement.Executor` has the placement really run, and `Result.note` say what
            was measured. A heuristic's answer stays what it is; every other method proposes by the cost model, and the
            answer is the fastest, as measured, of what it found, the best heuristics and one device. Where strategies
            are searched, the best of each family is run, too. The runs come on top of the budget.
        strategy: None searches strategies; ``"none"`` places the graph as it is; any other text, e.g.
            ``"dp4 zero1 | pp2 1f1b mb8"`` (docs/strategies.md), fixes one. That says itself where and in which order
            ops run, so the other arguments keep their defaults. Where a strategy is the answer, the result's graph is
            the rewritten one, and its cluster has lanes where that communicates.
        progress: called by a search over strategies with what it does now, how much of it is done, and of how much.
        workers: processes that score strategies side by side, and search placements on islands that exchange their best
            (docs/scale.md), with method ``"auto"`` or ``"local_search"``. With `evaluations` the answer
            is the same for any number of them. 1 is this process; so is None, without islands.
        address: of a Ray cluster, ``"auto"`` or ``"HOST:PORT"``, that has the workers; None: this machine.
        stack: how ops become kernels: ``"eager"``, ``"compiled"`` or ``"fused"`` (docs/stacks.md); None: as the graph
            says, which is eager where nobody put it on another. `Result.compiled_s` of an eager answer is what
            ``"compiled"`` would bring.

    Returns:
        The result; `Result.feasible` is False, with the reason, where nothing that fits was found. Of a search over
        strategies, `Result.alternatives` has the best of each family.

    Raises:
        UnknownNameError: an unknown method, objective, priority or stack.
        GraphError: a graph that cannot be put on the stack.
        MismatchError: a method that does not serve the objective; a scorer of step times for another objective; a
            strategy with a method, an objective, a budget or a scorer.
        StrategyError: a strategy that cannot be read, or that graph or cluster do not allow.
        ValueError: a seed, budget or number of evaluations below 0, or what is no graph or no cluster.
        InfeasibleError: no method can place this graph on this cluster; names op, device, bytes needed and free.
        WorkersError: workers cannot begin; the sentence says why, and what to do without them.
    """
    check_problem(graph, cluster)
    graph = asked_for(graph, stack)
    how = seed, objective, priority, budget_s, evaluations, scorer, strategy, progress, workers, address
    return beside_compiled(_optimized(graph, cluster, method, *how), graph, cluster)


def _optimized(
    graph: OpGraph,
    cluster: Cluster,
    method: str,
    seed: int,
    objective: str,
    priority: str,
    budget_s: float | None,
    evaluations: int | None,
    scorer: str | ScorerFactory,
    strategy: str | Strategy | None,
    progress: Progress | None,
    workers: int | None,
    address: str | None,
) -> Result:
    """`optimize` of a graph that is on its stack."""
    if workers is not None or address is not None:
        if method not in (AUTO, LOCAL_SEARCH) or scorer != "simulate" or strategy not in (None, NONE, Strategy()):
            raise MismatchError(
                f"workers search by {AUTO} or {LOCAL_SEARCH} and the simulator, over all strategies or none; leave out "
                "workers, or method, scorer and strategy."
            )
        with opened(Shared(graph, cluster), 1 if workers is None else workers, address) as runner:
            limits = budget_s, evaluations
            return _by_workers(graph, cluster, method, strategy, (seed, objective, priority), limits, progress, runner)
    from placement.solving.strategies.search import SearchAids, best_of_all, has_strategies

    check_options([method], seed, objective, priority, budget_s, evaluations)
    check_problem(graph, cluster)
    usual = (objective, priority, scorer) == (LATENCY, Priority.LONGEST_PATH.value, "simulate")
    plain = usual and method == AUTO
    if strategy is None and plain and has_strategies(graph):
        found = best_of_all(graph, cluster, seed, budget_s, evaluations, progress, SearchAids(check))
        return dataclasses.replace(found, method=method)
    asked = strategy if isinstance(strategy, Strategy) else Strategy.parse(NONE if strategy is None else strategy)
    if not asked.is_none:
        if not plain or (budget_s, evaluations) != (None, None):
            raise MismatchError(
                f"strategy {asked.text!r} says itself where and in which order ops run; leave out method, objective, "
                "priority, budgets and scorer."
            )
        return _checked(graph, cluster, strategy_row(graph, cluster, asked, seed).result)
    if scorer == "simulate":
        return solved(Solver(graph, cluster, seed, objective, priority), method, budget_s, evaluations)
    from env.gym.batch import StrategyScorer, scorer_of  # loads Gymnasium

    make_scorer = scorer_of(scorer)
    if objective != LATENCY:
        raise MismatchError(f"a scorer gives step times; expected objective {LATENCY}, got {objective}.")
    from placement.measured_best import fastest_measured, fastest_strategy

    solver = Solver(graph, cluster, seed, objective, priority)
    measuring = make_scorer(solver.problem)  # says at once if it is for another model
    placed = fastest_measured(solver, solved(solver, method, budget_s, evaluations), measuring)
    is_searched = strategy is None and (method, priority) == (AUTO, Priority.LONGEST_PATH.value)
    if is_searched and isinstance(measuring, StrategyScorer) and has_strategies(graph):
        found = best_of_all(graph, cluster, seed, budget_s, evaluations, progress, SearchAids(check))
        return fastest_strategy(graph, cluster, found, placed, measuring)
    return placed


def _checked(graph: OpGraph, cluster: Cluster, result: Result) -> Result:
    """The result of a strategy that the user chose.

    Raises:
        InfeasibleError: it cannot be carried out, or would compute something else than the model.
    """
    if result.answer is None:
        return result
    found = check(graph, cluster, result)
    if found.problem:
        raise InfeasibleError(f"strategy {result.strategy.text!r} is not to be taken: {found.problem}.")
    return dataclasses.replace(result, checked=found.words)


def _by_workers(
    graph: OpGraph,
    cluster: Cluster,
    method: str,
    strategy: str | Strategy | None,
    how: tuple[int, str, str],
    limits: tuple[float | None, int | None],
    progress: Progress | None,
    runner: Runner,
) -> Result:
    """`optimize` where a runner does what is worth doing side by side; `how`: seed, objective and priority."""
    from placement.solving.strategies.search import SearchAids, best_of_all, has_strategies

    seed, objective, priority = how
    check_options([method], seed, objective, priority, *limits)
    check_problem(graph, cluster)
    usual = (objective, priority, method, strategy) == (LATENCY, Priority.LONGEST_PATH.value, AUTO, None)
    if usual and has_strategies(graph):
        aids = SearchAids(check, island_search(runner), partial(many_scored, runner))
        return best_of_all(graph, cluster, seed, *limits, progress, aids=aids)
    solver = Solver(graph, cluster, seed, objective, priority)
    solver.search_by(LOCAL_SEARCH, island_search(runner))
    return solver.solve(method, *limits)


def solved(solver: Solver, method: str, budget_s: float | None = None, evaluations: int | None = None) -> Result:
    """The result of any method by its name; policies are loaded before their time begins to count.

    Raises:
        PolicyFileError, MismatchError: as `placement.learning.by_name.learned`.
    """
    return solver.solve(method, budget_s, evaluations, learned(solver.problem, method))
