"""`Solver`: a problem with its bound and simulator; runs methods and turns their plans into results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import baselines
from baselines.budget import Budget
from baselines.portfolio import Candidate, Outcome, improve, starts
from env.bounds.bounds import lower_bound
from env.bounds.memory import working_set_bytes
from env.bounds.memory_advice import what_would_help
from env.cluster import Cluster
from env.plan import Plan
from env.problem import THROUGHPUT, Problem
from env.simulation.loads import loads
from env.simulation.scoring import Scorer
from env.simulation.simulator import Schedule, Score
from env.simulation.steady_memory import steady_memory
from env.simulation.timeline import overflow_reason
from graphs.errors import InfeasibleError, NotFoundError
from graphs.opgraph import FloatArray, IntArray, OpGraph
from placement.solving.compiling import compile_for
from placement.solving.methods import (
    AUTO,
    DEFAULT_BUDGET_S,
    HEURISTICS,
    PRETRAINED,
    heuristics_for,
    is_learned,
    searches_of_auto,
)
from placement.solving.result import (
    OWN_ORDER,
    Result,
    agreed_bound_s,
    named_transfers,
    order_by_device,
    relative_gap,
    versions,
)

if TYPE_CHECKING:
    from placement.learning.placing import Place


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

    Args:
        methods, search: what to compile for at once (`placement.solving.compiling.compile_for`); the rest when it is
        prepared.

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
    ) -> None:
        self.problem = Problem(graph, cluster, objective)
        compile_for(self.problem, methods, search)
        bound = lower_bound(self.problem)
        if bound.memory_reason is not None:
            raise InfeasibleError(bound.memory_reason)
        self.lower_bound_s = bound.value_s
        self._scorer = Scorer(self.problem)
        self._seed, self._priority = seed, priority
        self._learned: dict[str, Place] = {}

    def prepare(self, method: str, search: bool = True) -> None:
        """Load what a method needs before its time begins to count, and check that it can be used here.

        Args:
            search: it has a budget to search.

        Raises:
            PolicyFileError: a policy file that cannot be read.
            MismatchError: a policy that cannot place this problem.
        """
        if is_learned(method) and method not in self._learned:
            from placement.learning.placing import prepared  # loads torch

            self._learned[method] = prepared(self.problem, method)
        compile_for(self.problem, [method], search)

    def solve(self, method: str, budget_s: float | None = None, evaluations: int | None = None) -> Result:
        """Run one method; the limits are for those that search (see `placement.optimize`).

        Raises:
            PolicyFileError, MismatchError: as `prepare`.
        """
        searching = method not in HEURISTICS
        self.prepare(method, search=budget_s != 0)
        began = time.perf_counter()
        budget = _budget(method, budget_s, evaluations, self.lower_bound_s)
        plan: Plan | str
        try:
            chosen, plan, bound_s, prover = self._plan(method, budget)
        except InfeasibleError as error:
            chosen, plan, bound_s, prover = method, self._failed(method, error), 0.0, ""
        return self.result(
            plan,
            method,
            chosen=chosen,
            bound_s=bound_s,
            prover=prover,
            budget_s=budget.seconds if searching and math.isfinite(budget.seconds) else None,
            evaluations=budget.spent if searching else None,
            interrupted=budget.interrupted,
            began_s=began,
        )

    def _failed(self, method: str, error: InfeasibleError) -> str:
        """Why a method found nothing, with advice where it is one that searches."""
        if method in HEURISTICS:
            return str(error)
        return f"{error} {what_would_help(self.problem, working_set_bytes(self.problem))}"

    def result(
        self,
        plan: Plan | str,
        method: str,
        *,
        chosen: str,
        began_s: float,
        budget_s: float | None,
        evaluations: int | None,
        interrupted: bool,
        bound_s: float = 0.0,
        prover: str = "",
        as_given: bool = False,
    ) -> Result:
        """A plan as a result, or, where there is none, the sentence that says why; fields as in `Result`.

        Args:
            began_s: when the method began, by ``time.perf_counter``.
            bound_s: what the method itself has proved, or `prover`, a search that it called.
            as_given: keep to the plan's own order, if it has one, even where the priority is faster.

        Raises:
            BoundError: the plan beats the bound, so one of them is wrong.
        """
        if isinstance(plan, str):
            answer = _no_answer(self.lower_bound_s, self._priority, plan)
        else:
            answer = self._answer(self._run(plan, as_given), bound_s, prover or method)
        return Result(
            graph=self.problem.graph,
            cluster=self.problem.cluster,
            method=method,
            chosen=chosen,
            seed=self._seed,
            objective=self.problem.objective,
            budget_s=budget_s,
            evaluations=evaluations,
            interrupted=interrupted,
            versions=versions(),
            solve_time_s=time.perf_counter() - began_s,
            **answer,
        )

    def _plan(self, method: str, budget: Budget) -> tuple[str, Plan, float, str]:
        """Who found the plan, the plan, the bound proved on the way, and who has proved it."""
        if method in HEURISTICS:
            return method, baselines.METHODS[method](self.problem, self._seed), 0.0, ""
        if is_learned(method):
            found = self._learned[method](self._seed, budget)
            return found.method, found.plan, 0.0, ""
        outcome = self._search(method, budget)
        return outcome.best.method, outcome.best.plan, outcome.lower_bound_s, outcome.prover

    def _search(self, method: str, budget: Budget) -> Outcome:
        problem = self.problem
        searches = searches_of_auto(problem) if method == AUTO else [(method, baselines.SEARCHES[method], 1.0)]
        found: list[Candidate] = []
        reason = ""
        try:
            found = starts(problem, self._seed, heuristics_for(problem), budget, every=method == AUTO)
        except InfeasibleError as error:
            reason = f" {error}"
        try:
            return improve(problem, self._seed, found, searches, budget)
        except NotFoundError as error:
            raise NotFoundError(f"{error}{reason}") from None

    def _run(self, plan: Plan, as_given: bool) -> _Run:
        """Run a plan under its own order, if it has one, and under the asked priority, and keep the better.

        The schedule's order is the answer: as an explicit order it repeats this run exactly. A fixed sequence (a plan
        with an order of transfers) is run as it stands.
        """
        simulator = self._scorer.simulator
        if plan.transfer_order is not None:
            runs = {OWN_ORDER: simulator.schedule(plan.device, order=plan.order, transfer_order=plan.transfer_order)}
        else:
            orders: dict[str, FloatArray | None] = {} if plan.order is None else {OWN_ORDER: plan.order}
            if not (as_given and orders):
                orders[self._priority] = None
            runs = {name: simulator.schedule(plan.device, self._priority, order) for name, order in orders.items()}
        if self.problem.objective == THROUGHPUT:
            period_s = loads(self.problem, plan.device).value_s
            held = {name: steady_memory(self.problem, schedule, period_s) for name, (_, schedule) in runs.items()}
            best = min(runs, key=lambda name: (not held[name].fits, runs[name][0].step_time_s))
            return _Run(plan, best, *runs[best], period_s, held[best].held_bytes, held[best].reason)
        best = min(runs, key=lambda name: (not runs[name][0].feasible, runs[name][0].step_time_s))
        score, schedule = runs[best]
        reason = overflow_reason(self.problem, schedule)
        return _Run(plan, best, score, schedule, score.step_time_s, score.peak_bytes, reason)

    def _answer(self, run: _Run, bound_s: float, prover: str) -> dict[str, Any]:
        if run.reason is not None:
            return _no_answer(self.lower_bound_s, run.priority, run.reason)
        graph, cluster, schedule = self.problem.graph, self.problem.cluster, run.schedule
        names = [device.name for device in cluster.devices]
        bound_s = max(
            agreed_bound_s(self.lower_bound_s, run.objective_s, "the bound of the problem"),
            agreed_bound_s(bound_s, run.objective_s, f"method {prover!r}"),
        )
        fixed = run.plan.transfer_order is not None
        return {
            "priority": run.priority,
            "feasible": True,
            "reason": None,
            "lower_bound_s": bound_s,
            "placement": {op: names[d] for op, d in zip(graph.op_names, schedule.device.tolist(), strict=True)},
            "order": order_by_device(graph, cluster, schedule.device, schedule.order.tolist()),
            "transfer_order": named_transfers(graph, cluster, schedule.transfer_order) if fixed else None,
            "objective_s": run.objective_s,
            "step_time_s": run.score.step_time_s,
            "throughput": 1 / run.objective_s if run.objective_s > 0 else None,
            "peak_bytes": dict(zip(names, run.peak_bytes.tolist(), strict=True)),
            "bytes_moved": run.score.bytes_moved,
            "gap": relative_gap(run.objective_s, bound_s),
            "note": run.plan.note,
        }


def _budget(method: str, budget_s: float | None, evaluations: int | None, target_s: float) -> Budget:
    """Either limit alone leaves the other open; without any it is the default time of the method."""
    if budget_s is None and evaluations is None:
        budget_s = 0.0 if method == PRETRAINED else DEFAULT_BUDGET_S
    elif budget_s is None:
        budget_s = math.inf
    return Budget(budget_s, math.inf if evaluations is None else evaluations, target_s)


def _no_answer(lower_bound_s: float, priority: str, reason: str) -> dict[str, Any]:
    empty = ("placement", "order", "transfer_order", "objective_s", "step_time_s", "throughput")
    nothing = dict.fromkeys((*empty, "peak_bytes", "bytes_moved", "gap"))
    return {"priority": priority, "feasible": False, "reason": reason, "lower_bound_s": lower_bound_s, **nothing}
