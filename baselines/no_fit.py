"""What it comes to when every heuristic of a portfolio fails."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.errors import InfeasibleError, NotFoundError
from graphs.units import format_bytes


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
