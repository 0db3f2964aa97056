"""Arguments that several verbs share, refused in one sentence where they are none."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baselines.budget import NO_LIMITS, Limits
from env.cluster import Cluster
from env.objectives import OBJECTIVES
from env.plan import Priority
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import OpGraph
from placement.solving.methods import METHODS, POLICY_FILE, is_method, supports


def check_options(
    methods: Iterable[str],
    seed: int,
    objective: str,
    priority: str,
    limits: Limits = NO_LIMITS,
) -> None:
    """Refuse what does not exist.

    Raises:
        UnknownNameError: lists the valid names and the nearest.
        MismatchError: none of the methods serves the objective.
        ValueError: no method, a lone name instead of a list, a seed or a number of evaluations that is no whole
            number, 0 or more, or a budget or limit that is no number of seconds.
    """
    if isinstance(methods, str):
        raise ValueError(f"methods is a list of names, got {methods!r}; write [{methods!r}].")
    methods = list(methods)
    if not methods:
        raise ValueError(f"methods names no method; expected at least one of {', '.join(METHODS)}.")
    for method in methods:
        if method == POLICY_FILE:
            raise ValueError(f"{POLICY_FILE} names no file; write {POLICY_FILE}FILE with what `placement train` wrote.")
        if not is_method(str(method)):
            raise UnknownNameError("method", str(method), (*METHODS, f"{POLICY_FILE}FILE"))
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", str(objective), OBJECTIVES)
    if not any(supports(method, objective) for method in methods):
        able = [name for name in METHODS if supports(name, objective)]
        raise MismatchError(
            f"{', '.join(methods)}: not for objective {objective}; methods that are: {', '.join(able)}."
        )
    Priority.of(priority)
    check_count("a seed", seed)
    if limits.evaluations is not None:
        check_count("a number of evaluations", limits.evaluations)
    for what, seconds in (("a budget", limits.budget_s), ("a limit", limits.limit_s)):
        if seconds is not None:
            check_seconds(what, seconds)


def check_problem(graph: object, cluster: object) -> None:
    """Refuse what is no graph or no cluster; names and files are for the command line.

    Raises:
        ValueError: says what came and how to make what was expected.
    """
    check_graph(graph)
    check_cluster(cluster)


def check_graph(graph: object) -> None:
    """Raises: ValueError: it is none."""
    _check(graph, "an", OpGraph, "placement.load_graph or placement.capture")


def check_cluster(cluster: object) -> None:
    """Raises: ValueError: it is none."""
    _check(cluster, "a", Cluster, "placement.Cluster.preset or placement.Cluster.from_toml")


def _check(value: object, article: str, kind: type, way: str) -> None:
    if not isinstance(value, kind):
        shown = f" {value!r}" if isinstance(value, str) else ""
        raise ValueError(f"expected {article} {kind.__name__}, got {type(value).__name__}{shown}: use {way}.")


def check_seconds(what: str, value: object) -> None:
    """Refuse what is no length of time.

    Raises:
        ValueError: says what came.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} is a finite number of seconds, 0 or more, got {value!r}.")


def check_count(what: str, value: object) -> None:
    """Refuse what counts nothing.

    Raises:
        ValueError: says what came.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is a whole number, 0 or more, got {value!r}.")
