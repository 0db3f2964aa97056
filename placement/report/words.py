"""The outcome of a comparison in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from env.bounds.memory import is_too_large_for_one
from env.problem import Problem, scope
from graphs.formatting import format_seconds
from placement.comparing.rows import NO_GAP, format_percent
from placement.results.answer import relative_gap
from placement.solving.methods import SINGLE, default_methods

if TYPE_CHECKING:
    from placement.comparing.methods import Comparison
    from placement.results.result import Result

NOT_SEARCHED = "strategies were not searched"


def headline(comparison: Comparison) -> str:
    """The outcome in a sentence or two; "one device" is the best single device."""
    said = _outcome(comparison)
    is_searched = comparison.overall is not None or not comparison.has_strategies
    return said if is_searched else f"{said} {NOT_SEARCHED.capitalize()}."


def _outcome(comparison: Comparison) -> str:
    best, single_s = comparison.best, comparison.single_device_s
    if best is None or best.answer is None:
        return "No method found a placement that fits."
    speedup = comparison.speedup(best)
    if single_s is None or speedup is None:
        time = format_seconds(best.answer.objective_s)
        is_proved = is_too_large_for_one(Problem(comparison.graph, comparison.cluster))
        fails = f"One device is not enough{'' if is_proved else ' in the orders tried'}"
        return f"{fails}; {best.method} takes {time}, {_distance(best.answer.gap, comparison)}."
    tied = [r.method for r in leaders(comparison)]
    if SINGLE in tied or speedup <= 1:
        gap = relative_gap(single_s, comparison.lower_bound_s)
        return f"{_none_faster(comparison)}, and it is {_distance(gap, comparison)}."
    who = f"{tied[0]} is" if len(tied) == 1 else f"{', '.join(tied[:-1])} and {tied[-1]} tie,"
    ratio = f"{speedup:.2f}×" if speedup >= 1.005 else format_percent(speedup - 1)
    return f"{who} {ratio} faster than one device, {_distance(best.answer.gap, comparison)}."


def _none_faster(comparison: Comparison) -> str:
    """Claim only what the methods tried can support."""
    tried = [result.method for result in comparison.results if result.method != SINGLE]
    if set(tried) >= set(default_methods(comparison.objective)) - {SINGLE}:
        return "One device is best: no method is faster"
    if not tried:
        return "Only one device was tried"
    if len(tried) == 1:
        return f"{tried[0]} is not faster than one device"
    if len(tried) == 2:
        return f"Neither {tried[0]} nor {tried[1]} is faster than one device"
    return f"None of {', '.join(tried[:-1])} and {tried[-1]} is faster than one device"


def leaders(comparison: Comparison) -> list[Result]:
    """The best result and those that tie with it; empty if nothing is feasible."""
    return [] if comparison.best is None else tied_with(comparison, comparison.best)


def tied_with(comparison: Comparison, result: Result) -> list[Result]:
    """The feasible results as fast as this one, itself included, in the order of the comparison."""
    first = comparison.ties.get(result.method, result.method)
    return [r for r in comparison.results if r.feasible and comparison.ties.get(r.method, r.method) == first]


def _distance(gap: float, comparison: Comparison) -> str:
    distance = f"at most {format_percent(gap)} from optimal" if gap > NO_GAP else "proven optimal"
    return f"{distance} {scope(comparison.objective)}"
