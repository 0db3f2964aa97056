"""Constraint programming for the makespan: the exact answer on small graphs, a bound on larger ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from baselines.plan import Plan
from baselines.search import Budget, Found, run_interruptible
from env.bounds import lower_bound
from env.problem import Problem
from env.scoring import Scorer

if TYPE_CHECKING:
    from baselines.cp_sat_model import Model

MOST_INTERVALS = 30_000  # op and transfer intervals of a model worth building: some 10 s and 1 GB before any search
PROVABLE_INTERVALS = 1_000  # up to here a proof within a minute is likely enough for `auto` to try
_WORKERS = 2  # whatever the number of cores, one for each of these ways to search
_SUBSOLVERS = ("no_lp", "objective_lb_search_no_lp")
_PER_EVALUATION = 1e-3  # deterministic time, roughly seconds, that one evaluation stands for
_ROUNDING = 1e-6  # relative; whole units of time cannot tell apart what is closer, so it counts as proved
_SAME = 1e-9  # relative; closer than this, an ordinary schedule is as good as a fixed sequence


def cp_sat(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """The best placement and schedule by constraint programming, with a bound, for the objective latency.

    An optional interval for each op on each device it may run on and for each transfer on each exclusive link of its
    route; no two overlap; memory over time as in docs/score.md where it could bind. Devices that are alike are used in
    order. Unlike the simulator's priorities the programme may leave a device idle on purpose and send tensors in any
    sequence, so its plan carries both sequences, unless the ordinary schedule is as good. Time is counted in whole
    units, durations rounded down, so that the bound holds; a schedule counts with its true times.

    Source: P. Laborie, J. Rogerie, P. Shaw, P. Vilím, "IBM ILOG CP Optimizer for scheduling", Constraints 23 (2018),
    doi:10.1007/s10601-018-9281-x, for the modelling with optional intervals; solved by CP-SAT of OR-Tools.

    Args:
        starts: at least one. The solver begins with the best and never returns worse.
        budget: an evaluation is a thousandth of CP-SAT's deterministic time; with these only, the answer is the same
            each time.

    Returns:
        The plan and what is proved; the bound is 0 where there was no time or the model is too large.
    """
    scorer = Scorer(problem)
    best = min(starts, key=lambda plan: scorer.value(plan.device, plan.order, plan.transfer_order))
    best_s = scorer.value(best.device, best.order, best.transfer_order)
    if not _worth_it(problem, budget, best_s):
        return Found(best)
    from ortools.sat.python import cp_model

    from baselines.cp_sat_model import build

    _, schedule = scorer.simulator.schedule(best.device, order=best.order, transfer_order=best.transfer_order)
    made = build(problem, schedule, max(budget.target_s, lower_bound(problem).value_s))
    solver = _solver(cp_model, made, seed, budget)
    if budget.over():
        return Found(best)
    status = run_interruptible(lambda: solver.solve(made.model), solver.stop_search, budget)
    spent = math.ceil(solver.response_proto.deterministic_time / _PER_EVALUATION)
    budget.spend(min(spent, int(min(budget.evaluations_left(), 2**62))))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # no answer, and so nothing to trust
        return Found(best, 0.0, spent)
    bound_s = max(0.0, solver.best_objective_bound) / made.scaled.per_second
    plan = _cheapest(scorer, [best, *_plans(made, solver)])
    value_s = scorer.value(plan.device, plan.order, plan.transfer_order)
    if status == cp_model.OPTIMAL and math.isclose(bound_s, value_s, rel_tol=_ROUNDING):
        bound_s = value_s  # they differ by the rounding of durations
    return Found(plan, min(bound_s, value_s), spent)


def tractable(problem: Problem) -> bool:
    """Whether a proof is likely enough: at most `PROVABLE_INTERVALS` op and transfer intervals."""
    return _intervals(problem) <= PROVABLE_INTERVALS


def _worth_it(problem: Problem, budget: Budget, best_s: float) -> bool:
    if budget.over() or budget.reached(best_s) or not 0 < best_s < math.inf:
        return False
    return _intervals(problem) <= MOST_INTERVALS


def _intervals(problem: Problem) -> int:
    """Op and transfer intervals of the model, give or take."""
    links = sum(len(route.links) for route in problem.cluster.routes.values())
    per_tensor = links / max(1, problem.cluster.n_devices - 1)
    return int(problem.allowed.sum() + problem.graph.n_tensors * per_tensor)


def _solver(cp_model: Any, made: Model, seed: int, budget: Budget) -> Any:
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
    if math.isfinite(budget.left_s()):
        settings.max_time_in_seconds = budget.left_s()
    if math.isfinite(budget.evaluations_left()):
        settings.interleave_search = True  # deterministic with several workers
        settings.max_deterministic_time = budget.evaluations_left() * _PER_EVALUATION
    return solver


def _plans(made: Model, solver: Any) -> list[Plan]:
    """The solution as a fixed sequence, and as an ordinary explicit order."""
    problem = made.scaled.problem
    device = np.array(
        [
            next(d for d, literal in made.where[problem.group_of[i]].items() if solver.boolean_value(literal))
            for i in range(problem.graph.n_ops)
        ]
    )
    place = np.argsort(problem.graph.topological_order)  # decides between ops that take no time at all
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
        value_s = scorer.value(plan.device, plan.order, plan.transfer_order)
        if value_s < best_s * (1 - _SAME) or best_s == math.inf > value_s:
            best, best_s = plan, value_s
    return best
