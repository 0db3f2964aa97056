"""The names that ``method`` and ``objective`` take, and which go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import baselines
from baselines import registry
from env.objectives import LATENCY, THROUGHPUT
from graphs.entry_points import imported

if TYPE_CHECKING:
    from baselines.budget import Budget, Search
    from baselines.portfolio import Candidate
    from env.plan import Method
    from env.problem import Problem

AUTO = registry.AUTO
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


def learned(problem: Problem, method: str) -> Place | None:
    """How a learned method places a problem, loaded and warmed up; None for every other method.

    Raises:
        PolicyFileError: a policy file that cannot be read.
        MismatchError: a policy that cannot place this problem.
    """
    if not is_learned(method):
        return None
    found: Place = imported("placement.learning.placing:prepared")(problem, method)  # loads torch
    return found


def is_method(name: str) -> bool:
    """Whether `placement.optimize` takes this name; a policy file need not exist for that."""
    return name in METHODS or (name.startswith(POLICY_FILE) and name != POLICY_FILE)


def supports(method: str, objective: str) -> bool:
    """Whether a method serves an objective; policies learn from step times."""
    if is_learned(method):
        return objective == LATENCY
    return method == AUTO or objective in baselines.ENTRIES[method].objectives


def heuristics_for(problem: Problem) -> dict[str, Method]:
    """The heuristics that serve the objective and end soon enough on a graph of this size."""
    return {
        name: method
        for name, method in baselines.METHODS.items()
        if supports(name, problem.objective) and problem.graph.n_ops <= baselines.ENTRIES[name].most_ops
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
