"""`optimize`: one problem, one method, one `Result`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baselines.budget import NO_LIMITS, Limits
from baselines.strategies.searching.records import ANY_TOOL, ScoreMany, ToolLimits
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Method, Priority
from env.problem import Problem
from graphs.entry_points import imported
from graphs.errors import InfeasibleError, MismatchError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.processes.runner import opened
from placement.results.alternatives import KeptTo
from placement.results.result import Result
from placement.results.stacks import asked_for, beside_compiled
from placement.runtime.checking.check import check
from placement.runtime.checking.runnable import check_of_run, nearest_run, run_check, runner_limits, why_not_run
from placement.solving.arguments import check_options, check_problem
from placement.solving.best_of_all import FIRST_S, Progress, best_of_all
from placement.solving.checked import Check, unchecked
from placement.solving.choosing import SearchAids, has_strategies
from placement.solving.interruption import as_keyboard_interrupt
from placement.solving.methods import AUTO, METHODS, Place
from placement.solving.own_methods import own_methods
from placement.solving.solver import Solver
from placement.solving.strategy_row import strategy_row
from placement.solving.worker_tasks import Shared, many_scored

if TYPE_CHECKING:
    from torch import nn

    from env.gym.batch import ScorerFactory

__all__ = ["METHODS", "optimize"]

SIMULATOR = "simulate"  # the scorer by default
_TARGETS = "placement.exporters.targets"  # loaded where a target is named


@as_keyboard_interrupt()
def optimize(
    graph: OpGraph,
    cluster: Cluster,
    method: str | Method = AUTO,
    *,
    seed: int = 0,
    objective: str = LATENCY,
    priority: str = Priority.LONGEST_PATH.value,
    budget_s: float | None = None,
    evaluations: int | None = None,
    scorer: str | ScorerFactory = SIMULATOR,
    strategy: str | Strategy | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    address: str | None = None,
    stack: str | None = None,
    target: str | None = None,
    model: nn.Module | None = None,
    first: bool = False,
    limit_s: float | None = None,
    own: Sequence[str | Strategy] = (),
) -> Result:
    """Find out how to run `graph` on `cluster`: which strategy, and which op on which device.

    Strategies are searched where `method`, `objective` and `priority` have their defaults and ops of the graph have
    split rows, as captured ones have. One device and the placements that ``"auto"`` finds for the graph as it is are
    always candidates.

    Args:
        method: a name in `METHODS`; ``"auto"`` tries the heuristics, one device among them, and improves the best by
            local search and, where the problem is small enough, an exact solver. docs/methods.md says which to choose,
            and how budgets are spent. Or a function of your own from a `Problem` and a seed to a `Plan`.
        seed: of everything random, 0 or more.
        objective: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of a device or link
            in steady state; both in seconds.
        priority: how devices choose among ready ops (docs/score.md). Where a method says itself in which order ops
            run, the faster of its order and `priority` counts.
        budget_s: work of a searching method, in the seconds that it takes on a quiet machine of two cores: 10 by
            default, and up to 45 for strategies of a large graph; 0 gives the best quick answer. Work is counted, so
            the answer depends on the seed only. It stops earlier where a gap of 0 is proven, and on Ctrl-C returns the
            best so far, `Result.interrupted`.
        evaluations: placements that a searching method may score.
        scorer: ``executor.scorer`` of a `placement.Executor` has the placement really run, and `Result.note` say what
            was measured. A heuristic's answer stays what it is; every other method proposes by the cost model, and the
            answer is the fastest, as measured, of what it found, the best heuristics and one device. Where strategies
            are searched, the best of each family is run, too. The runs come on top of the budget.
        strategy: None searches strategies; ``"none"`` places the graph as it is; any other text, e.g.
            ``"dp4 zero1 | pp2 1f1b mb8"`` (docs/strategies.md), fixes one. That says itself where and in which order
            ops run, so the other arguments keep their defaults. Where a strategy is the answer, the result's graph is
            the rewritten one, and its cluster has lanes where that communicates.
        progress: called by a search over strategies with what it does now, how much of it is done, and of how much.
        workers: processes that score strategies side by side where they are searched (docs/scale.md). The answer is
            the same with any number of them, and without: None, like 1, is this process.
        address: of a Ray cluster, ``"auto"`` or ``"HOST:PORT"``, that has the workers; None: this machine.
        stack: how ops become kernels: ``"eager"``, ``"compiled"`` or ``"fused"`` (docs/stacks.md); None: as the graph
            says, which is eager where nobody put it on another. `Result.compiled_s` of an eager answer is what
            ``"compiled"`` would bring.
        target: None: the answer is one that `placement.apply` carries out (docs/strategies.md has a table).
            ``"any"``: all strategies are scored, and `Result.not_run` says why nothing runs the answer, if so. The
            tool that is to run the answer, a training step, which `placement.export` writes for it: ``"torch"``,
            ``"fsdp2"``, ``"torchtitan"``, ``"megatron"``, ``"accelerate"``, ``"deepspeed"`` (docs/targets.md). The
            search keeps to strategies that it can run, and `Result.kept_to` is what that costs.
        model: the model of the graph, also on ``meta``; by default the one that it was captured from, while that is
            there. What its modules allow is known before strategies that cut weights or the model itself are scored;
            without a model they may turn out to be none that can be run.
        first: stop at the first advice: after `FIRST_S` seconds of search over strategies, without a check by computing
            and without what ``"compiled"`` would bring.
        limit_s: seconds by the clock, on top: a search that they end returns the best so far, `Result.interrupted`.
        own: strategies of your own, such as that of your configuration, which a search scores before all others: its
            answer is no worse.

    Returns:
        The result; `Result.feasible` is False, with the reason, where nothing that fits was found. After a search over
        strategies, `Result.alternatives` has the best of each family.

    Raises:
        UnknownNameError: an unknown method, objective, priority, stack or target.
        GraphError: a graph that cannot be put on the stack.
        MismatchError: a method that does not serve the objective; a scorer of step times for another objective; a
            strategy with a method, an objective, a budget or a scorer; one that nothing runs; a target beside a
            method, an objective or a scorer, for a graph without strategies or training, or that cannot run the
            strategy given; ``first`` where
            no strategies are searched, or with a budget.
        StrategyError: a strategy that cannot be read, or that graph or cluster do not allow.
        ValueError: a seed, budget or number of evaluations below 0, or what is no graph or no cluster.
        InfeasibleError: no method can place this graph on this cluster; names op, device, bytes needed and free.
        WorkersError: workers cannot begin; the sentence says why, and what to do without them.
    """
    check_problem(graph, cluster)
    limits = Limits(budget_s, evaluations, limit_s)
    own_place = None
    if callable(method):
        name = str(getattr(method, "__name__", type(method).__name__))
        method, own_place = name, own_methods({name: method}).get(name)
    check_options([AUTO if own_place is not None else method], seed, objective, priority, limits)
    fixed = None if strategy is None else _read(strategy)
    placed = asked_for(graph, stack)
    run = runner_limits(placed, cluster, model)
    tool = run if target is None else imported(f"{_TARGETS}:tool_for")(target, placed, cluster, model)
    question = Question(
        placed,
        cluster,
        method,
        seed=seed,
        objective=objective,
        priority=priority,
        limits=limits,
        scorer=scorer,
        strategy=None if fixed is None else tool.cut(fixed),
        progress=progress,
        workers=None if workers is None and address is None else (1 if workers is None else workers, address),
        tool=tool,
        model=model,
        first=first,
        own=tuple(map(_read, own)),
        beyond=run if tool is ANY_TOOL else None,
        own_place=own_place,
    )
    if tool.name:
        _check_target(question)
    elif question.beyond is None:
        _check_runs(question)
    if first:
        _check_first(question)
    result = _answered(question)
    if question.beyond is not None and result.answer is not None:
        result = dataclasses.replace(result, not_run=why_not_run(run, result.strategy))
    return result if first else beside_compiled(result, placed, cluster)


def _read(strategy: str | Strategy) -> Strategy:
    return strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)


@dataclass(frozen=True, eq=False)
class Question:
    """The arguments of `optimize`, of a graph that is on its stack.

    Attributes:
        limits: budget, evaluations, and by the clock.
        workers: how many, and the address of their Ray cluster; None: this process alone.
        tool: limits of what runs the answer.
        beyond: limits of `placement.apply`, where the search goes beyond these; else None.
        own_place: makes the method of a problem, where it is the user's own function; else None.
    """

    graph: OpGraph
    cluster: Cluster
    method: str
    seed: int
    objective: str
    priority: str
    limits: Limits
    scorer: str | ScorerFactory
    strategy: Strategy | None
    progress: Progress | None
    workers: tuple[int, str | None] | None
    tool: ToolLimits
    model: nn.Module | None
    first: bool
    own: tuple[Strategy, ...]
    beyond: ToolLimits | None
    own_place: Callable[[Problem], Place] | None

    @property
    def is_simulated(self) -> bool:
        """The simulator scores."""
        return self.scorer == SIMULATOR

    @property
    def is_usual(self) -> bool:
        """The method, the objective and the order of ready ops are the defaults."""
        return (self.method, self.objective, self.priority) == (AUTO, LATENCY, Priority.LONGEST_PATH.value)

    @property
    def searches_strategies(self) -> bool:
        """Nothing fixes or excludes strategies, and there are some."""
        return self.strategy is None and self.is_usual and has_strategies(self.graph)

    @property
    def check(self) -> Check:
        """Finds out about a strategy before it is the answer."""
        found = unchecked if self.first else check
        if self.beyond is not None:
            return check_of_run(self.beyond, found)
        if not self.tool.name:
            return run_check(self.tool, found)
        written: Check = imported(f"{_TARGETS}:written_check")(self.tool.name, self.model, found)
        return written

    def solver(self) -> Solver:
        return Solver(self.graph, self.cluster, self.seed, self.objective, self.priority)

    def placed(self, solver: Solver) -> Result:
        """A placement of the graph as it is, by one method."""
        place = None if self.own_place is None else self.own_place(solver.problem)
        return solver.solve(self.method, self.limits, place)

    def best_of_all(self, score_many: ScoreMany | None = None) -> Result:
        """The fastest of one device, placements of the graph as it is, and all strategies."""
        aids = SearchAids(self.check, score_many, self.tool, self.first, self.own)
        return best_of_all(self.graph, self.cluster, self.seed, self.limits, self.progress, aids)


def _check_target(question: Question) -> None:
    """Raises: MismatchError: what is asked for beside a target leaves it nothing to choose, or cannot be run by it."""
    name, strategy = question.tool.name, question.strategy
    if strategy is not None and not strategy.is_none:
        refusal = question.tool.refuses(strategy)
        lacks = question.tool.lacks(strategy) or ("" if refusal is None else refusal.reason.rstrip("."))
        if lacks:
            raise MismatchError(f"target {name!r} cannot run strategy {strategy.text!r}: {lacks}.")
        return
    if strategy is not None or not (question.is_usual and question.is_simulated):
        raise MismatchError(
            f"target {name!r} runs strategies, which are searched by method {AUTO} and the simulator; leave out the "
            "target, or method, objective, priority, scorer and strategy 'none'."
        )
    if not has_strategies(question.graph):
        raise MismatchError(
            f"target {name!r} runs strategies, and no op of graph {question.graph.name!r} can be split; capture it "
            "from a model."
        )


def _check_runs(question: Question) -> None:
    """Raises: MismatchError: a strategy that nothing runs."""
    strategy = question.strategy
    reason = "" if strategy is None else why_not_run(question.tool, strategy)
    if strategy is None or not reason:
        return
    nearest = nearest_run(question.tool, strategy)
    instead = "" if nearest is None else f"; the nearest that runs is {nearest.text!r}"
    begin = f"nothing runs strategy {strategy.text!r:.200}: {reason}{instead}"
    raise MismatchError(f"{begin}; target='any' scores it.").but_on_command_line(f"{begin}; --for any scores it.")


def _check_first(question: Question) -> None:
    """Raises: MismatchError: no search over strategies to end early, or one with a budget of its own."""
    if not has_strategies(question.graph):
        raise MismatchError(
            f"a first advice ends a search over strategies, and no op of graph {question.graph.name!r} can be split; "
            "leave out first, or capture the graph from a model."
        )
    limits = question.limits
    given = {
        "method": question.method != AUTO,
        "objective": question.objective != LATENCY,
        "priority": question.priority != Priority.LONGEST_PATH.value,
        "strategy": question.strategy is not None,
        "scorer": not question.is_simulated,
        "budget_s": limits.budget_s is not None,
        "evaluations": limits.evaluations is not None,
    }
    if any(given.values()):
        names = [name for name, is_given in given.items() if is_given]
        options = [f"--{name.replace('_', '-')}" for name in names]
        begin = f"a first advice ends a search over strategies after {FIRST_S:g} s by itself"
        raise MismatchError(f"{begin}; leave out {' and '.join(names)}, or first.").but_on_command_line(
            f"{begin}; leave out {' and '.join(options)}, or --first."
        )


def _answered(question: Question) -> Result:
    """The answer, in the first way that a question is one for."""
    if question.workers is not None:
        return _by_workers(question, *question.workers)
    if question.strategy is not None and not question.strategy.is_none:
        return _fixed_strategy(question, question.strategy)
    if not question.is_simulated:
        return _measured(question)
    return question.best_of_all() if question.searches_strategies else question.placed(question.solver())


def _by_workers(question: Question, count: int, address: str | None) -> Result:
    """The fastest of all, as without workers; they score strategies side by side."""
    if not (question.searches_strategies and question.is_simulated):
        raise MismatchError(
            "workers score strategies by the simulator, and none are searched here; leave out workers, for placements "
            "are searched by threads of this process."
        )
    with opened(Shared(question.graph, question.cluster), count, address) as runner:
        return question.best_of_all(partial(many_scored, runner))


def _fixed_strategy(question: Question, strategy: Strategy) -> Result:
    """The strategy that the user chose, checked.

    Raises:
        InfeasibleError: it would compute something else than the model.
    """
    if not (question.is_usual and question.is_simulated) or question.limits != NO_LIMITS:
        raise MismatchError(
            f"strategy {strategy.text!r} says itself where and in which order ops run; leave out method, objective, "
            "priority, budgets and scorer."
        )
    result = strategy_row(question.graph, question.cluster, strategy, question.seed).result
    if result.answer is None:
        return result
    found = question.check(question.graph, question.cluster, result)
    if found.problem:
        raise InfeasibleError(
            f"strategy {strategy.text!r} is not to be taken: {found.problem}; a search leaves such strategies out."
        )
    kept_to = KeptTo(question.tool.name) if question.tool.name else None
    return dataclasses.replace(result, checked=found.words, kept_to=kept_to)


def _measured(question: Question) -> Result:
    """The fastest of several answers by a scorer that runs them."""
    from env.gym.batch import StrategyScorer, scorer_of  # loads Gymnasium
    from placement.measured_best import fastest_measured, fastest_strategy

    make_scorer = scorer_of(question.scorer)
    if question.objective != LATENCY:
        raise MismatchError(f"a scorer gives step times; expected objective {LATENCY}, got {question.objective}.")
    solver = question.solver()
    measuring = make_scorer(solver.problem)  # says at once if it is for another model
    placed = fastest_measured(solver, question.placed(solver), measuring)
    if question.searches_strategies and isinstance(measuring, StrategyScorer):
        return fastest_strategy(question.graph, question.cluster, question.best_of_all(), placed, measuring)
    return placed
