"""`Solver`: a problem with its bound and simulator; runs methods and turns their plans into results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import baselines
from baselines.budget import NO_LIMITS, Budget, Limits
from baselines.portfolio import PortfolioOutcome, searched
from env.bounds.bounds import lower_bound
from env.bounds.memory import what_would_help
from env.cluster import Cluster
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Plan, Priority
from env.problem import Problem
from env.simulation.scoring import Scorer, loads
from env.simulation.simulator import Schedule, Score
from env.simulation.steady_memory import steady_memory
from env.simulation.timeline import overflow_reason
from graphs.arrays import nearly_least
from graphs.errors import InfeasibleError
from graphs.formatting import counted
from graphs.opgraph import IntArray, OpGraph
from graphs.transforms.coarsen.multilevel import to_size
from graphs.transforms.derived import Derived
from placement.results.answer import Answer, agreed_bound_s, named_transfers, order_by_device, relative_gap
from placement.results.result import OWN_ORDER, Result
from placement.results.utilisation import step_size
from placement.solving.compiling import compile_for
from placement.solving.methods import (
    AUTO,
    DEFAULT_BUDGET_S,
    HEURISTICS,
    PRETRAINED,
    Place,
    heuristics_for,
    learned,
    searches_of_auto,
)

AGENT = "agent"  # the method of a placement that an episode has made
TABLE_ENTRIES = 100_000_000  # ops times devices: beyond, no table of all times is made, and groups of ops are placed


@dataclass(frozen=True, eq=False)
class Finding:
    """A method's plan, or why it has none, and what was proved on the way.

    Attributes:
        plan: or, where there is none, the sentence that says why.
        chosen: the method whose plan it is.
        bound_s: what has been proved on the way; 0 if nothing.
        prover: who has proved it; the method itself where "".
    """

    plan: Plan | str
    chosen: str
    bound_s: float = 0.0
    prover: str = ""


@dataclass(frozen=True)
class Attempt:
    """A method's limits, and what it spent; fields as in `Result`.

    Attributes:
        began_s: when it began, by ``time.perf_counter``.
    """

    method: str
    began_s: float
    budget_s: float | None = None
    evaluations: int | None = None
    interrupted: bool = False
    limit_s: float | None = None

    @staticmethod
    def of(result: Result) -> Attempt:
        """The one that gave a result."""
        began_s = time.perf_counter() - result.solve_time_s
        return Attempt(result.method, began_s, result.budget_s, result.evaluations, result.interrupted, result.limit_s)


@dataclass(frozen=True, eq=False)
class _Run:
    """A plan, scored: under which priority, its objective and memory under that objective, and why it does not fit."""

    plan: Plan
    priority: str
    score: Score
    schedule: Schedule
    objective_s: float
    peak_bytes: IntArray
    reason: str | None


class Solver:
    """A problem with its bound and simulator, for any number of methods.

    Where ops times devices are more than `TABLE_ENTRIES`, methods place a coarsened graph. Plans are scored op by op.

    Args:
        seed, objective, priority: as for `placement.optimize`.
        methods, search: what to compile for at once (`placement.solving.compiling.compile_for`); the rest when it runs.
        bound_s: a lower bound that is known; None: it is computed.

    Raises:
        InfeasibleError: the graph fits nowhere on the cluster, whatever the placement.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        seed: int,
        objective: str,
        priority: str,
        methods: Sequence[str] = (),
        search: bool = True,
        bound_s: float | None = None,
    ) -> None:
        self.problem = Problem(graph, cluster, objective)
        compile_for(self.problem, methods, search)
        if bound_s is None:
            bound = lower_bound(self.problem)
            if bound.memory_reason is not None:
                raise InfeasibleError(bound.memory_reason)
            bound_s = bound.value_s
        self.lower_bound_s = bound_s
        self.seed = seed
        self._priority = priority
        self._scorer = Scorer(self.problem)

    @cached_property
    def _size(self) -> dict[str, Any]:
        return step_size(self.problem.graph)

    def solve(self, method: str, limits: Limits = NO_LIMITS, place: Place | None = None) -> Result:
        """Run one method.

        Args:
            limits: for one that searches.
            place: how a method of one's own, or a learned one that is loaded already, places this problem.

        Raises:
            PolicyFileError, MismatchError: as `placement.solving.methods.learned`.
        """
        if place is None:
            place = learned(self.problem, method)  # before its time begins to count
        compile_for(self.problem, [method], search=limits.budget_s != 0)
        return self.solve_within(method, limits.budget(DEFAULT_BUDGET_S), place)

    def solve_within(self, method: str, budget: Budget, place: Place | None = None) -> Result:
        """As `solve`, within a budget, in which is noted what was spent."""
        began_s = time.perf_counter()
        budget.target_s = max(budget.target_s, self.lower_bound_s)
        try:
            found = self._found(method, budget, place)
        except InfeasibleError as error:
            found = Finding(self._failed(method, error), method)
        if method in (*HEURISTICS, PRETRAINED):
            return self.result(found, Attempt(method, began_s, interrupted=budget.interrupted))
        seconds, limit_s = (each if math.isfinite(each) else None for each in (budget.seconds, budget.limit.seconds))
        return self.result(found, Attempt(method, began_s, seconds, budget.spent, budget.was_cut(), limit_s))

    def result(self, found: Finding, attempt: Attempt, as_given: bool = False) -> Result:
        """The result of a finding.

        Args:
            as_given: keep to the plan's own order, if it has one, even where the priority is faster.

        Raises:
            BoundError: the plan beats the bound, so one of them is wrong.
        """
        priority, reason, bound_s, answer = self._priority, None, self.lower_bound_s, None
        if isinstance(found.plan, str):
            reason = found.plan
        else:
            run = self._run(found.plan, as_given)
            priority, reason = run.priority, run.reason
            if reason is None:
                bound_s = self._bound_s(run.objective_s, found, attempt.method)
                answer = self._answer(run, bound_s)
        return Result(
            graph=self.problem.graph,
            cluster=self.problem.cluster,
            source_hash=self.problem.graph.hash,
            method=attempt.method,
            chosen=found.chosen,
            seed=self.seed,
            objective=self.problem.objective,
            budget_s=attempt.budget_s,
            evaluations=attempt.evaluations,
            interrupted=attempt.interrupted,
            limit_s=attempt.limit_s,
            priority=priority,
            reason=reason,
            lower_bound_s=bound_s,
            answer=answer,
            note="" if answer is None or isinstance(found.plan, str) else found.plan.note,
            **self._size,
            solve_time_s=time.perf_counter() - attempt.began_s,
        )

    def _failed(self, method: str, error: InfeasibleError) -> str:
        """The reason why a method found nothing, with advice where it is one that searches."""
        if method in HEURISTICS:
            return str(error)
        return f"{error} {what_would_help(self.problem, self.problem.working_bytes)}"

    def _found(self, method: str, budget: Budget, place: Place | None) -> Finding:
        if place is not None:
            found = place(self.seed, budget)
            return Finding(found.plan, found.method)
        coarse, problem = self._coarse, self._placed
        if method in HEURISTICS:
            plan, chosen, proved = baselines.METHODS[method](problem, self.seed), method, (0.0, "")
        else:
            outcome = self._search(problem, method, budget)
            plan, chosen, proved = outcome.best.plan, outcome.best.method, (outcome.lower_bound_s, outcome.prover)
        if coarse is None:
            return Finding(plan, chosen, *proved)
        # Proofs and orders hold for the groups alone.
        return Finding(Plan(coarse.expand(plan.device), note=_in_groups(coarse)), chosen)

    @cached_property
    def _coarse(self) -> Derived | None:
        """Groups of ops to be placed in the place of too many ops."""
        graph, n_devices = self.problem.graph, self.problem.cluster.n_devices
        if graph.n_ops * n_devices <= TABLE_ENTRIES:
            return None
        return to_size(graph, max(1, TABLE_ENTRIES // n_devices))

    @cached_property
    def _placed(self) -> Problem:
        """The problem that methods place: the problem itself, or that of its groups."""
        if self._coarse is None:
            return self.problem
        return Problem(self._coarse.graph, self.problem.cluster, self.problem.objective)

    def _search(self, problem: Problem, method: str, budget: Budget) -> PortfolioOutcome:
        searches = searches_of_auto(problem) if method == AUTO else [(method, baselines.SEARCHES[method], 1.0)]
        return searched(problem, self.seed, heuristics_for(problem), searches, budget, every=method == AUTO)

    def _run(self, plan: Plan, as_given: bool) -> _Run:
        """Run a plan under its own order, if it has one, and under the asked priority, and keep the better.

        The schedule's order is the answer: as an explicit order it repeats this run exactly. A fixed sequence (a plan
        with an order of transfers) is run as it stands.
        """
        simulator = self._scorer.simulator
        if plan.transfer_order is not None:
            runs = {OWN_ORDER: simulator.schedule(plan)}
        else:
            ways = {} if plan.order is None else {OWN_ORDER: plan}
            if not (as_given and ways):
                ways[self._priority] = Plan(plan.device)
            runs = {name: simulator.schedule(way, self._priority) for name, way in ways.items()}
        if self.problem.objective == THROUGHPUT:
            period_s = loads(self.problem, plan).value_s
            held = {name: steady_memory(self.problem, schedule, period_s) for name, (_, schedule) in runs.items()}
            best = min(runs, key=lambda name: (not held[name].fits, runs[name][0].step_time_s))
            return _Run(plan, best, *runs[best], period_s, held[best].held_bytes, held[best].reason)
        fitting = [name for name in runs if runs[name][0].feasible] or list(runs)
        best = fitting[nearly_least([runs[name][0].step_time_s for name in fitting])[0]]
        score, schedule = runs[best]
        reason = overflow_reason(self.problem, schedule)
        return _Run(plan, best, score, schedule, score.step_time_s, score.peak_bytes, reason)

    def _bound_s(self, objective_s: float, found: Finding, method: str) -> float:
        """The best bound known: that of the problem, or what the method has proved."""
        return max(
            agreed_bound_s(self.lower_bound_s, objective_s, "the bound of the problem"),
            agreed_bound_s(found.bound_s, objective_s, f"method {found.prover or method!r}"),
        )

    def _answer(self, run: _Run, bound_s: float) -> Answer:
        """A run that fits, by the names of ops and devices."""
        graph, cluster, schedule = self.problem.graph, self.problem.cluster, run.schedule
        names = [device.name for device in cluster.devices]
        fixed = run.plan.transfer_order is not None
        return Answer(
            placement={op: names[d] for op, d in zip(graph.op_names, schedule.device.tolist(), strict=True)},
            order=order_by_device(graph, cluster, schedule.device, schedule.order.tolist()),
            transfer_order=named_transfers(graph, cluster, schedule.transfer_order) if fixed else None,
            objective_s=run.objective_s,
            step_time_s=run.score.step_time_s,
            throughput=1 / run.objective_s if run.objective_s > 0 else None,
            peak_bytes=dict(zip(names, run.peak_bytes.tolist(), strict=True)),
            bytes_moved=run.score.bytes_moved,
            gap=relative_gap(run.objective_s, bound_s),
        )


def _in_groups(coarse: Derived) -> str:
    groups, ops = counted(coarse.graph.n_ops, "group"), counted(coarse.source.n_ops, "op")
    return f"placed in {groups}: on so many devices, {ops} are too many to weigh one by one"


def result_of(problem: Problem, plan: Plan, method: str = AGENT) -> Result:
    """The result that a method has which proposes the plan; without an answer where it does not fit.

    Raises:
        InfeasibleError: the graph fits nowhere on the cluster, whatever the placement.
    """
    began_s = time.perf_counter()
    solver = Solver(problem.graph, problem.cluster, 0, LATENCY, Priority.LONGEST_PATH.value)
    return solver.result(Finding(plan, method), Attempt(method, began_s), as_given=True)
