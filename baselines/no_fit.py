"""What it comes to when every method of a portfolio fails."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.errors import InfeasibleError
from graphs.units import format_bytes


def none_fits(reasons: Mapping[str, InfeasibleError]) -> InfeasibleError:
    """The error of a search whose methods (at least one) all failed: it is no proof, and does not read like one.

    Args:
        reasons: by method, in the order in which a sentence is preferred where several were equally near.
    """
    near = {name: error.missing_bytes for name, error in reasons.items() if error.missing_bytes is not None}
    name = min(near, key=lambda method: near[method]) if near else next(iter(reasons))
    short = f" by {format_bytes(near[name])}" if near else ""
    tried = "the only method tried" if len(reasons) == 1 else f"none of the {len(reasons)} methods tried"
    found = "found none" if len(reasons) == 1 else "found one"
    return InfeasibleError(
        f"{tried} {found} that fits; the nearest, {name}, failed{short}: {reasons[name]}", near.get(name)
    )
