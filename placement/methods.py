"""The names that ``method`` and ``objective`` take, and which go together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import baselines
from env.problem import LATENCY, OBJECTIVES, THROUGHPUT
from env.simulator import Priority
from graphs.errors import MismatchError, UnknownNameError

AUTO = "auto"
HEURISTICS = tuple(baselines.METHODS)
SEARCHES = tuple(baselines.SEARCHES)
METHODS = (*HEURISTICS, *SEARCHES, AUTO)  # every value of `method`
DEFAULT_BUDGET_S = 10.0


def supports(method: str, objective: str) -> bool:
    """Whether a method serves an objective."""
    return method == AUTO or objective in baselines.OBJECTIVES_OF.get(method, OBJECTIVES)


def measure(objective: str) -> str:
    """What an objective measures, in words."""
    return {LATENCY: "step time", THROUGHPUT: "largest load"}[objective]


def default_methods(objective: str) -> tuple[str, ...]:
    """What `compare` runs when nothing is asked for: every heuristic that serves the objective, and ``auto``."""
    return tuple(name for name in (*HEURISTICS, AUTO) if supports(name, objective))


def check_options(
    methods: Iterable[str],
    seed: int,
    objective: str,
    priority: str,
    budget_s: float | None = None,
    evaluations: int | None = None,
) -> None:
    """Refuse what does not exist.

    Raises:
        UnknownNameError: lists the valid names and the nearest.
        MismatchError: none of the methods serves the objective.
        ValueError: no method, a lone name instead of a list, a seed or a number of evaluations that is no whole
            number, 0 or more, or a budget that is no number of seconds.
    """
    if isinstance(methods, str):
        raise ValueError(f"methods is a list of names, got {methods!r}; write [{methods!r}].")
    methods = list(methods)
    if not methods:
        raise ValueError(f"methods names no method; expected at least one of {', '.join(METHODS)}.")
    for method in methods:
        if method not in METHODS:
            raise UnknownNameError("method", str(method), METHODS)
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", str(objective), OBJECTIVES)
    if not any(supports(method, objective) for method in methods):
        able = [name for name in METHODS if supports(name, objective)]
        raise MismatchError(
            f"{', '.join(methods)}: not for objective {objective}; methods that are: {', '.join(able)}."
        )
    Priority.of(priority)
    _check_count("a seed", seed)
    if evaluations is not None:
        _check_count("a number of evaluations", evaluations)
    if budget_s is not None and not _is_seconds(budget_s):
        raise ValueError(f"a budget is a finite number of seconds, 0 or more, got {budget_s!r}.")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is a whole number, 0 or more, got {value!r}.")
