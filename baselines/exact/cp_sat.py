"""Constraint programming for the makespan: the exact answer on small graphs, a bound on larger ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from baselines import prices
from baselines.budget import Budget, Found, run_interruptible
from baselines.exact.cp_sat_model import BITS, COARSE_BITS, CpSatModel, build, memory_may_bind, packing, serial_s
from baselines.fitting import nearest_to_fitting, none_fits, not_found
from env.bounds.bounds import lower_bound
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Schedule

MOST_INTERVALS = 30_000  # op and transfer intervals of a model worth building: some 10 s and 1 GB before any search
PROVABLE_INTERVALS = 1_000  # up to here a proof within a minute is likely enough for `auto` to try
_WORKERS = 2  # whatever the number of cores, one for each of these ways to search
_SUBSOLVERS = ("no_lp", "objective_lb_search_no_lp")
_COARSE_SHARE = 0.5  # of the budget, for coarse units where memory may bind
# Where memory may bind, evaluations in fine units take fifty times as long, and what is not proved by then never is.
_MOST_CREEPING = 500
_START_SHARE = 0.3  # of the budget, to find a plan that fits where none is known
_PER_EVALUATION = 1e-4  # deterministic time, roughly seconds, that one evaluation stands for
_ROUNDING = 1e-6  # relative; whole units of time cannot tell apart what is closer, so it counts as proved
_SAME = 1e-9  # relative; closer than this, an ordinary schedule is as good as a fixed sequence


def cp_sat(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """The best placement and schedule by constraint programming, with a bound, for the objective latency.

    An optional interval for each op on each device it may run on and for each transfer on each exclusive link of its
    route; no two overlap; memory over time as in docs/score.md where it could bind. Devices that are alike are used in
    order. Unlike the simulator's priorities the programme may leave a device idle on purpose and send tensors in any
    sequence, so its plan carries both sequences, unless the ordinary schedule is as good. Time is counted in whole
    units, durations rounded down, so that the bound holds; a schedule counts with its true times. A schedule that waits
    for memory to be freed is no plan, so where memory is that tight the best plan may stay above the bound.

    Source: P. Laborie, J. Rogerie, P. Shaw, P. Vilím, "IBM ILOG CP Optimizer for scheduling", Constraints 23 (2018),
    doi:10.1007/s10601-018-9281-x, for the modelling with optional intervals; solved by CP-SAT of OR-Tools.

    Args:
        starts: the solver begins with the best and never returns worse. Without any it looks for one itself.
        budget: an evaluation is 1e-4 of CP-SAT's deterministic time.

    Returns:
        The plan and what is proved; the bound is 0 where there was no time or the model is too large.

    Raises:
        NotFoundError: there was no plan, and none was found.
        InfeasibleError: no placement fits, whatever the order: proved.
    """
    search = _Search(problem, starts, budget)
    if not starts:
        search.look_for_a_start(seed)
    if search.is_worth_it():
        if not search.has_plan:
            search.check_room(seed, budget.part(_START_SHARE))
        if memory_may_bind(problem):
            search.run(seed, COARSE_BITS, budget.part(_COARSE_SHARE))
            fine = budget.part(1.0)
            fine.evaluations = min(fine.evaluations, _MOST_CREEPING)
            search.run(seed, BITS, fine)
        else:
            search.run(seed, BITS, budget.part(1.0))
    return search.found()


class _Search:
    """The best plan so far, what is proved of all, and the evaluations spent."""

    def __init__(self, problem: Problem, starts: Sequence[Plan], budget: Budget) -> None:
        self._problem, self._budget = problem, budget
        self._scorer = Scorer(problem)
        self._plans, self._hint = list(starts), starts[0].device if starts else np.zeros(0, dtype=np.int64)
        self._bound_s, self._spent = 0.0, 0

    def look_for_a_start(self, seed: int) -> None:
        """A start, where no plan is known: one that fits, or the placement that nearly does as a hint."""
        part = self._budget.part(_START_SHARE)
        nearest = nearest_to_fitting(self._problem, seed, part)
        self._budget.absorb(part)
        self._hint = nearest.device
        if nearest.excess_bytes == 0:
            self._plans.append(Plan(nearest.device))

    @property
    def has_plan(self) -> bool:
        """True if some plan is known."""
        return bool(self._plans)

    def check_room(self, seed: int, part: Budget) -> None:
        """Solve a model of memory without time, which is quick.

        Raises:
            InfeasibleError: it has no solution, so no placement fits.
        """
        from ortools.sat.python import cp_model

        model, solver = packing(self._problem), _solver(cp_model, seed, part)
        if self._solved(solver, model, part) == cp_model.INFEASIBLE:
            raise none_fits(self._problem)

    def best(self) -> tuple[Plan | None, float]:
        """The best plan and its value in seconds, infinite without one."""
        if not self._plans:
            return None, math.inf
        best = _cheapest(self._scorer, self._plans)
        return best, self._value_s(best)

    def is_worth_it(self) -> bool:
        """True if there is time, something to gain, and a model small enough to build."""
        best_s = self.best()[1]
        if self._budget.over() or self._budget.reached(best_s) or best_s == 0:
            return False
        return _intervals(self._problem) <= MOST_INTERVALS

    def run(self, seed: int, bits: int, part: Budget) -> None:
        """Solve the model in units of ``2 ** -bits`` of all durations, within a part of the budget.

        Raises:
            InfeasibleError: the solver has proved that no placement fits.
        """
        from ortools.sat.python import cp_model

        best, best_s = self.best()
        horizon_s = serial_s(self._problem) if best is None else best_s
        if part.over() or self._proved(best_s) or not 0 < horizon_s < math.inf:
            return
        made = build(self._problem, self._schedule(best), horizon_s, self._least_s(), bits)
        part.spend(0, prices.INTERVAL_S * _intervals(self._problem))
        solver = _solver(cp_model, seed, part)
        status = self._solved(solver, made.model, part)
        if status == cp_model.INFEASIBLE and best is None:
            raise none_fits(self._problem)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # else there is no answer, and so nothing to trust
            self._learn(made, solver, bits, status == cp_model.OPTIMAL)

    def _solved(self, solver: Any, model: Any, part: Budget) -> Any:
        """The solver's status; None where there was no time."""
        status, spent, worked = None, 0, 0.0
        if not part.over():
            status = run_interruptible(lambda: solver.solve(model), solver.stop_search, part)
            worked = solver.response_proto.deterministic_time
            spent = math.ceil(worked / _PER_EVALUATION)
        part.spend(min(spent, int(min(part.evaluations_left(), 2**62))), worked * prices.SOLVER_S)
        self._budget.absorb(part)
        self._spent += spent
        return status

    def _learn(self, made: CpSatModel, solver: Any, bits: int, optimal: bool) -> None:
        bound_s = max(0.0, solver.best_objective_bound) / made.scaled.per_second
        sequences = _plans(made, solver)
        tried = [*sequences, Plan(sequences[0].device)]
        self._plans += [plan for plan in tried if self._value_s(plan) < math.inf]
        value_s = self.best()[1]
        if optimal and bits == BITS and math.isclose(bound_s, value_s, rel_tol=_ROUNDING):
            bound_s = value_s  # they differ by the rounding of durations
        self._bound_s = max(self._bound_s, bound_s)

    def found(self) -> Found:
        """The answer.

        Raises:
            NotFoundError: there is none.
        """
        best, _ = self.best()
        if best is None:
            raise not_found(self._problem)
        return Found(best, self._bound_s, self._spent)

    def _proved(self, best_s: float) -> bool:
        return best_s <= self._bound_s * (1 + _ROUNDING)

    def _least_s(self) -> float:
        return max(self._budget.target_s, self._bound_s, lower_bound(self._problem).value_s)

    def _schedule(self, best: Plan | None) -> Schedule:
        plan = Plan(self._hint) if best is None else best
        return self._scorer.simulator.schedule(plan)[1]

    def _value_s(self, plan: Plan) -> float:
        return self._scorer.value(plan)


def tractable(problem: Problem) -> bool:
    """True if a proof is likely enough: at most `PROVABLE_INTERVALS` op and transfer intervals."""
    return _intervals(problem) <= PROVABLE_INTERVALS


def _intervals(problem: Problem) -> int:
    """Op and transfer intervals of the model, give or take."""
    links = sum(len(route.links) for route in problem.cluster.routes.values())
    per_tensor = links / max(1, problem.cluster.n_devices - 1)
    return int(problem.allowed.sum() + problem.graph.n_tensors * per_tensor)


def _solver(cp_model: Any, seed: int, budget: Budget) -> Any:
    solver = cp_model.CpSolver()
    settings = solver.parameters
    settings.num_workers = _WORKERS
    settings.random_seed = seed % 2**31
    # Linear relaxations of disjunctions prove next to nothing here and cost most of the time.
    settings.linearization_level = 0
    settings.subsolvers.extend(_SUBSOLVERS)
    settings.symmetry_level = 0  # equal devices are ordered in the model
    settings.presolve_inclusion_work_limit = 0  # drops conditions of rows it should keep: or-tools issue 5293
    settings.catch_sigint_signal = False
    settings.interleave_search = True  # deterministic with several workers
    most = min(budget.evaluations_left() * _PER_EVALUATION, budget.left_s() / prices.SOLVER_S)
    if math.isfinite(most):
        settings.max_deterministic_time = most
    return solver


def _plans(made: CpSatModel, solver: Any) -> list[Plan]:
    """The solution as a fixed sequence, and as an ordinary explicit order."""
    problem = made.scaled.problem
    device = np.array(
        [
            next(d for d, literal in made.where[problem.unit_of[i]].items() if solver.boolean_value(literal))
            for i in range(problem.graph.n_ops)
        ]
    )
    place = np.argsort(problem.graph.topological_order)  # decides between ops that take no time
    starts = [solver.value(start) for start in made.start]
    ends = [solver.value(end) for end in made.end]
    order = np.empty(len(starts))
    order[np.lexsort((place, ends, starts))] = np.arange(len(starts))
    producer = problem.graph.tensor_producer
    sent = sorted(
        (solver.value(start), solver.value(end), place[producer[t]], t, b)
        for (t, b), (literal, start, end) in made.sent.items()
        if solver.boolean_value(literal)
    )
    transfers = np.array([row[3:] for row in sent], dtype=np.int64).reshape(-1, 2)
    return [Plan(device, order), Plan(device, order, transfers)]


def _cheapest(scorer: Scorer, plans: list[Plan]) -> Plan:
    """The best plan by its true times; an earlier one where it is as good."""
    best, best_s = plans[0], math.inf
    for plan in plans:
        value_s = scorer.value(plan)
        if value_s < best_s * (1 - _SAME) or best_s == math.inf > value_s:
            best, best_s = plan, value_s
    return best
