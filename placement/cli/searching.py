"""From the words of a command line to how methods search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from placement.cli.output import usage_errors

# What an answer depends on beside graph, cluster and method, as its command line names it.
ANSWER_FIELDS = (
    *("seed", "objective", "budget_s", "evaluations", "communication", "memory_fraction", "priority", "granularity"),
    *("train", "dim"),
)


class HowToSearch:
    """The options of a record that are arguments, too, of `placement.optimize` and `placement.compare`."""

    seed: int
    objective: str
    priority: str
    budget_s: float | None
    evaluations: int | None


def checked_search(methods: Iterable[str], how: HowToSearch) -> dict[str, Any]:
    """The arguments that `HowToSearch` stands for, of methods that exist and serve the objective.

    Raises:
        UnknownNameError, MismatchError: as `placement.solving.methods.check_options`.
        typer.BadParameter: a number out of range.
    """
    from placement.solving.methods import check_options

    search = {name: getattr(how, name) for name in HowToSearch.__annotations__}
    with usage_errors():
        check_options(methods, **search)
    return search
