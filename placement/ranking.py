"""Which of several results is best, and which are ties."""

from __future__ import annotations

import math
from collections.abc import Iterable

from placement.solving.result import Result

SINGLE = "single_device"  # the method whose name says best what a placement on one device is
SAME = 1e-9  # objectives closer than this, relative, are a tie


def ranked(results: Iterable[Result]) -> tuple[Result, ...]:
    """Feasible results by objective, infeasible ones last; ties by fewer devices, then `SINGLE`, then by name."""
    listed = sorted(results, key=lambda r: (not r.feasible, r.objective_s or 0.0, r.method))
    done: list[Result] = []
    while listed:
        level = [r for r in listed if _tie(listed[0], r)]
        done += sorted(level, key=lambda r: (n_used(r), r.method != SINGLE, r.method))
        listed = listed[len(level) :]
    return tuple(done)


def ties(results: Iterable[Result]) -> dict[str, str]:
    """For each method that only equals a better ranked one, the name of that one."""
    found: dict[str, str] = {}
    first: Result | None = None
    for result in ranked(results):
        if result.feasible and first is not None and _tie(first, result):
            found[result.method] = first.method
        else:
            first = result
    return found


def n_used(result: Result) -> int:
    """Number of devices that run at least one op; 0 without a placement."""
    return len(set(result.placement.values())) if result.placement is not None else 0


def _tie(a: Result, b: Result) -> bool:
    if not (a.feasible and b.feasible) or a.objective_s is None or b.objective_s is None:
        return a.feasible == b.feasible
    return math.isclose(a.objective_s, b.objective_s, rel_tol=SAME)
