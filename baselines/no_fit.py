"""Errors for problems that nothing was found to fit: failed heuristics, an ended search, a proof."""

from __future__ import annotations

from collections.abc import Mapping

from env.problem import Problem
from graphs.errors import InfeasibleError, NotFoundError
from graphs.formatting import format_bytes


def all_failed(reasons: Mapping[str, InfeasibleError]) -> NotFoundError:
    """The error of methods (at least one) that all failed: it is no proof, and does not read like one.

    Args:
        reasons: by method, in the order in which a sentence is preferred where several were equally near.
    """
    near = {name: error.missing_bytes for name, error in reasons.items() if error.missing_bytes is not None}
    name = min(near, key=lambda method: near[method]) if near else next(iter(reasons))
    short = f" by {format_bytes(near[name])}" if near else ""
    if len(reasons) == 1:
        return NotFoundError(f"The heuristic {name} failed{short}: {reasons[name]}", near.get(name))
    return NotFoundError(
        f"All {len(reasons)} heuristics tried failed, the nearest, {name},{short}: {reasons[name]}",
        near.get(name),
    )


def not_found(problem: Problem) -> NotFoundError:
    """The error for a search that has ended without a placement."""
    return NotFoundError(
        f"no placement of graph {problem.graph.name!r} that fits cluster {problem.cluster.name!r} was found, which "
        "does not prove that there is none."
    )


def none_fits(problem: Problem) -> InfeasibleError:
    """The error for what an exact solver has proved."""
    return InfeasibleError(
        f"no placement of graph {problem.graph.name!r} fits the memory and the pins of cluster "
        f"{problem.cluster.name!r}: an exact search has proved it."
    )
