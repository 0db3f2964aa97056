"""`fastest_measured`: the cost model proposes placements, a scorer that measures has the last word."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING

import baselines
from baselines.budget import Budget
from baselines.portfolio import candidates
from env.plan import Plan
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from graphs.transforms.strategy import Strategy
from placement.results.result import Result, measured_note
from placement.solving.interruption import on_interrupt
from placement.solving.methods import HEURISTICS, SINGLE, heuristics_for
from placement.solving.solver import Attempt, Finding, Solver
from placement.solving.strategy_row import strategy_row

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.gym.batch import BatchScorer, StrategyScorer
    from graphs.opgraph import OpGraph

MOST_CONTENDERS = 8


def fastest_measured(solver: Solver, found: Result, scorer: BatchScorer) -> Result:
    """The result of a method, as measured; for one that searches, the fastest of the best few that are known.

    At most `MOST_CONTENDERS` of such a method are measured: what it found, what the heuristics find, those with the
    smallest predicted step times, one device always among them. On Ctrl-C the fastest so far.
    """
    began_s = time.perf_counter() - found.solve_time_s
    if found.answer is None:
        return found
    contenders = [_first_come(solver, found)]
    if found.method not in HEURISTICS:
        contenders = _different(contenders + _of_heuristics(solver, found))
    stops: list[bool] = [True] if found.interrupted else []
    with on_interrupt(lambda: stops.append(True)):
        measured: list[tuple[float, Result]] = []
        for contender in contenders:
            if stops and measured:
                break
            measured.append((_measured_s(scorer, contender), contender))
    answer = _fastest(solver, found, measured)
    return dataclasses.replace(
        answer, interrupted=bool(stops) or found.interrupted, solve_time_s=time.perf_counter() - began_s
    )


def fastest_strategy(graph: OpGraph, cluster: Cluster, found: Result, placed: Result, scorer: StrategyScorer) -> Result:
    """The fastest, as measured, of a search's answer, the best of each family and the best placement.

    Args:
        found: of the search.
        placed: of `fastest_measured`.
        scorer: that measures strategies, too.
    """
    began_s = time.perf_counter()
    ways = dict.fromkeys([found.strategy, *(one.strategy for one in found.alternatives)])
    contenders = [strategy for strategy in ways if not strategy.is_none][:MOST_CONTENDERS]
    measured = [(scorer.strategy_s(strategy.text), strategy) for strategy in contenders]
    best_s, best = min(measured, key=lambda pair: (pair[0], pair[1].text), default=(math.inf, Strategy()))
    placed_s = _measured_s(scorer, placed) if placed.answer is not None else math.inf
    spent_s = found.solve_time_s + placed.solve_time_s + time.perf_counter() - began_s
    if placed_s <= best_s:
        words = f"{placed.note}; {len(contenders)} strategies were run, too".lstrip("; ")
        return dataclasses.replace(placed, note=words, alternatives=found.alternatives, solve_time_s=spent_s)
    row = found if found.strategy == best else strategy_row(graph, cluster, best, found.seed).result
    tried = sum(math.isfinite(s) for s, _ in measured)
    note = "; ".join(
        [
            measured_note(best_s, row),
            f"the fastest of {tried} strategies that were run",
            f"best placement {format_seconds(placed_s)}",
        ]
    )
    return dataclasses.replace(
        row, note=note, alternatives=found.alternatives, bounds=found.bounds, solve_time_s=spent_s
    )


def _fastest(solver: Solver, found: Result, measured: list[tuple[float, Result]]) -> Result:
    best_s, best = min(measured, key=lambda pair: pair[0])
    if math.isinf(best_s):
        what = "the placement" if len(measured) == 1 else f"none of the {len(measured)} best placements"
        reason = f"{what} could {'not ' if len(measured) == 1 else ''}be run; Executor.run says why."
        return _as(solver, reason, found, found.chosen)
    words = [measured_note(best_s, best)]
    if len(measured) > 1:
        words.append(f"the fastest of {len(measured)} that were run")
        words += [
            f"one device {format_seconds(s)}"
            for s, one in measured
            if len(one.answered().used) == 1 and one is not best
        ][:1]
    return dataclasses.replace(best, note="; ".join(words))


def _of_heuristics(solver: Solver, found: Result) -> list[Result]:
    """Results of the heuristics, best first, and the best on one device before them."""
    plans: list[tuple[str, Plan]] = []
    with contextlib.suppress(InfeasibleError):
        plans.append((SINGLE, baselines.METHODS[SINGLE](solver.problem, solver.seed)))
    with contextlib.suppress(InfeasibleError):
        ranked = candidates(solver.problem, solver.seed, heuristics_for(solver.problem), Budget())
        plans += [(candidate.method, candidate.plan) for candidate in ranked]
    results = [_as(solver, plan, found, name) for name, plan in plans]
    return [_first_come(solver, result) for result in results if result.answer is not None]


def _different(results: list[Result]) -> list[Result]:
    """The first two, which are what was found and one device, and the best of the others that differ from them."""
    found: list[Result] = []
    for result in [*results[:2], *sorted(results[2:], key=lambda result: result.answered().step_time_s)]:
        mine = result.answered()
        same = any(mine.placement == other.placement and mine.order == other.order for other in found)
        if not same and len(found) < MOST_CONTENDERS:
            found.append(result)
    return found


def _first_come(solver: Solver, result: Result) -> Result:
    """The same placement and order of ops without a fixed sequence of transfers, which only the simulator can keep."""
    if result.answered().transfer_order is None:
        return result
    return _as(solver, dataclasses.replace(result.plan(), transfer_order=None), result, result.chosen)


def _as(solver: Solver, plan: Plan | str, found: Result, chosen: str) -> Result:
    """A plan as an answer to what was asked when `found` was."""
    attempt = dataclasses.replace(Attempt.of(found), began_s=time.perf_counter())
    return solver.result(Finding(plan, chosen, found.lower_bound_s), attempt)


def _measured_s(scorer: BatchScorer, result: Result) -> float:
    scores = scorer.batch(result.device_numbers()[None], orders=result.order_numbers()[None])
    return float(scores.step_time_s[0]) if scores.feasible[0] else math.inf
