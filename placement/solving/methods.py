"""The names that ``method`` and ``objective`` take, and which go together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import baselines
from baselines.budget import Search
from env.cluster import Cluster
from env.plan import Method, Priority
from env.problem import LATENCY, OBJECTIVES, THROUGHPUT, Problem
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import OpGraph

if TYPE_CHECKING:
    from baselines.budget import Budget, Search
    from baselines.portfolio import Candidate

AUTO = "auto"
LOCAL_SEARCH = "local_search"
SINGLE = "single_device"  # the method whose name says best what a placement on one device is
HEURISTICS = tuple(baselines.METHODS)
SEARCHES = tuple(baselines.SEARCHES)
POLICY_NAMES = ("hierarchical", "seq2seq", "graph", "ppo")  # trained on the problem itself, within the budget
PRETRAINED = "pretrained"  # the graph policy that comes with the package
STRATEGY = "strategy"  # not for asking: the method of a placement that a strategy prescribes
REFINED = "+local_search"  # a third of the budget learns, the rest is local search from what was learned
LEARNED = tuple(f"{name}{end}" for name in (*POLICY_NAMES, PRETRAINED) for end in ("", REFINED))
POLICY_FILE = "policy:"  # and the name of a file that `placement train` wrote
METHODS = (*HEURISTICS, *SEARCHES, *LEARNED, AUTO)  # every value of `method`, but for ``policy:FILE``
DEFAULT_BUDGET_S = 10.0


class Place(Protocol):
    """A learned method, ready for one problem."""

    def __call__(self, seed: int, budget: Budget, /) -> Candidate:
        """The best that it found; it spends the budget."""


def is_learned(method: str) -> bool:
    """Whether a policy decides: one trained on the problem, the one that comes with the package, or one in a file."""
    return method in LEARNED or method.startswith(POLICY_FILE)


def is_method(name: str) -> bool:
    """Whether `placement.optimize` takes this name; a policy file need not exist for that."""
    return name in METHODS or (name.startswith(POLICY_FILE) and name != POLICY_FILE)


def supports(method: str, objective: str) -> bool:
    """Whether a method serves an objective; policies learn from step times."""
    if is_learned(method):
        return objective == LATENCY
    return method == AUTO or objective in baselines.OBJECTIVES_OF.get(method, OBJECTIVES)


def heuristics_for(problem: Problem) -> dict[str, Method]:
    """The heuristics that serve the objective and end soon enough on a graph of this size."""
    return {
        name: method
        for name, method in baselines.METHODS.items()
        if supports(name, problem.objective) and problem.graph.n_ops <= baselines.MOST_OPS.get(name, math.inf)
    }


def searches_of_auto(problem: Problem) -> list[tuple[str, Search, float]]:
    """The stages by which `auto` improves candidates: `baselines.portfolio.stages` with the searches there are."""
    from baselines.portfolio import stages  # loads the simulator

    return stages(problem, baselines.SEARCHES, baselines.exact_is_tractable(problem))


def measure(objective: str) -> str:
    """The measure of an objective, in words."""
    return {LATENCY: "step time", THROUGHPUT: "largest load"}[objective]


def default_methods(objective: str) -> tuple[str, ...]:
    """Methods that `compare` runs when none is named: every heuristic that serves the objective, and ``auto``."""
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
    if evaluations is not None:
        check_count("a number of evaluations", evaluations)
    if budget_s is not None:
        check_seconds("a budget", budget_s)


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
