"""`fastest_measured`: the cost model proposes placements, a scorer that measures has the last word."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

import baselines
from baselines.budget import Budget
from baselines.portfolio import candidates
from env.gym.batch import BatchScorer, ScorerFactory
from env.plan import Plan
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from placement.solving.interruption import on_interrupt
from placement.solving.methods import HEURISTICS, heuristics_for
from placement.solving.result import Result, measured_note
from placement.solving.solver import Solver

MOST_CONTENDERS = 8
_ONE_DEVICE = "single_device"


def fastest_measured(
    solver: Solver,
    method: str,
    seed: int,
    make_scorer: ScorerFactory,
    budget_s: float | None,
    evaluations: int | None,
) -> Result:
    """The answer of a method, as measured; of one that searches, the fastest of the best few that are known.

    Of such a method `MOST_CONTENDERS` are measured at most: what it found, what the heuristics find, those with the
    smallest predicted step times, one device always among them. On Ctrl-C the fastest so far.

    Args:
        seed, budget_s, evaluations: as for `placement.optimize`.
    """
    began_s = time.perf_counter()
    scorer = make_scorer(solver.problem)  # says at once if it is for another model
    found = solver.solve(method, budget_s, evaluations)
    if not found.feasible:
        return found
    contenders = [_first_come(solver, found)]
    if method not in HEURISTICS:
        contenders = _different(contenders + _of_heuristics(solver, found, seed))
    stops: list[bool] = [True] if found.interrupted else []
    with on_interrupt(lambda: stops.append(True)):
        measured: list[tuple[float, Result]] = []
        for contender in contenders:
            if stops and measured:
                break
            measured.append((_measured_s(scorer, contender), contender))
    answer = _answer(solver, found, measured)
    return dataclasses.replace(
        answer, interrupted=bool(stops) or found.interrupted, solve_time_s=time.perf_counter() - began_s
    )


def _answer(solver: Solver, found: Result, measured: list[tuple[float, Result]]) -> Result:
    best_s, best = min(measured, key=lambda pair: pair[0])
    if math.isinf(best_s):
        what = "the placement" if len(measured) == 1 else f"none of the {len(measured)} best placements"
        reason = f"{what} could {'not ' if len(measured) == 1 else ''}be run; Executor.run says why."
        return _as(solver, reason, found, found.chosen)
    words = [measured_note(best_s, best)]
    if len(measured) > 1:
        words.append(f"the fastest of {len(measured)} that were run")
        words += [f"one device {format_seconds(s)}" for s, one in measured if _n_used(one) == 1 and one is not best][:1]
    return dataclasses.replace(best, note="; ".join(words))


def _of_heuristics(solver: Solver, found: Result, seed: int) -> list[Result]:
    """What the heuristics find, best first, and the best on one device before them."""
    plans: list[tuple[str, Plan]] = []
    with contextlib.suppress(InfeasibleError):
        plans.append((_ONE_DEVICE, baselines.METHODS[_ONE_DEVICE](solver.problem, seed)))
    with contextlib.suppress(InfeasibleError):
        ranked = candidates(solver.problem, seed, heuristics_for(solver.problem), Budget())
        plans += [(candidate.method, candidate.plan) for candidate in ranked]
    results = [_as(solver, plan, found, name) for name, plan in plans]
    return [_first_come(solver, result) for result in results if result.feasible]


def _different(results: list[Result]) -> list[Result]:
    """The first two, which are what was found and one device, and the best of the others that differ from them."""
    found: list[Result] = []
    for result in [*results[:2], *sorted(results[2:], key=lambda result: result.step_time_s or 0.0)]:
        same = any(result.placement == other.placement and result.order == other.order for other in found)
        if not same and len(found) < MOST_CONTENDERS:
            found.append(result)
    return found


def _first_come(solver: Solver, result: Result) -> Result:
    """The same placement and order of ops without a fixed sequence of transfers, which only the simulator can keep."""
    if result.transfer_order is None:
        return result
    return _as(solver, Plan(result.device_numbers(), result.order_numbers(), note=result.note), result, result.chosen)


def _as(solver: Solver, plan: Plan | str, found: Result, chosen: str) -> Result:
    """A plan as an answer to what was asked when `found` was."""
    return solver.result(
        plan,
        found.method,
        chosen=chosen,
        began_s=time.perf_counter(),
        budget_s=found.budget_s,
        evaluations=found.evaluations,
        interrupted=found.interrupted,
        bound_s=found.lower_bound_s,
    )


def _measured_s(scorer: BatchScorer, result: Result) -> float:
    scores = scorer.batch(result.device_numbers()[None], orders=result.order_numbers()[None])
    return float(scores.step_time_s[0]) if scores.feasible[0] else math.inf


def _n_used(result: Result) -> int:
    return len(set((result.placement or {}).values()))
