"""``placement compare --seeds``: methods under several seeds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from graphs.formatting import format_seconds, show
from placement.cli.comparing.answering import answer, dim, target_of
from placement.cli.output import progress, reason_as_json
from placement.cli.records import is_default, option_of
from placement.report.words import NOT_SEARCHED
from placement.results.utilisation import basis
from placement.solving.methods import measure

if TYPE_CHECKING:
    from placement.cli.comparing.asked import CompareOptions
    from placement.comparing.seeds import SeedComparison
    from placement.inputs.sources import Source

_MOST_SEEDS = 10_000


def check_seeds(given: CompareOptions) -> None:
    """Refuse what seeds do not go with, before a graph is read for minutes.

    Raises:
        typer.BadParameter: an option of another comparison, or a text that is no range of seeds.
    """
    for field in ("seed", "clusters", "sweep", "price", "trace", "strategies"):
        if not is_default(given, field) and not (field == "strategies" and given.strategies == "none"):
            raise typer.BadParameter(f"--seeds compares methods on one cluster; leave out {option_of(field)}.")
    parse_seeds(given.seeds or "")


def parse_seeds(text: str) -> list[int]:
    """``"0..3"`` or ``"0,1,7"``.

    Raises:
        typer.BadParameter: neither, none, or too many.
    """
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text)
    if span is not None and 0 <= int(span[2]) - int(span[1]) < _MOST_SEEDS:
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        return list(dict.fromkeys(map(int, text.split(","))))
    raise typer.BadParameter(f"--seeds takes A..B with B at least A, or A,B,...; got {text!r}.")


def compare_under_seeds(
    given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]
) -> None:
    """Run the methods under each seed and show mean and spread."""
    from graphs.errors import InfeasibleError
    from placement.comparing.seeds import compare_seeds
    from placement.report.seeds import render_seeds

    seeds = parse_seeds(given.seeds or "")
    settings = {name: value for name, value in search.items() if name != "seed"}
    with reason_as_json(given.as_json), progress("comparing", len(seeds)) as report:
        settings["progress"] = lambda name, done, _: report(name, done)
        found = compare_seeds(source.graph, target_of(given, source), methods, seeds=seeds, **settings)
    fields = found.to_dict()
    answer(given, found, lambda: seed_table(found), render_seeds, fields["results"], runs=fields["runs"])
    if all(row.mean_s is None for row in found.rows):
        raise InfeasibleError("no method found a placement that fits under any of these seeds.")


def seed_table(found: SeedComparison) -> list[RenderableType]:
    """The best by mean, and a row for each method."""
    best = found.rows[0]
    what = measure(found.objective)
    head = f"{show(found.graph.name)} on {show(found.cluster.name)}, {len(found.seeds)} seeds"
    if best.mean_s is not None:
        gain = "" if best.speedup is None else f", {best.speedup:.2f}x one device"
        least = f"{show(best.method)} has the least mean {what}: {format_seconds(best.mean_s)}{gain}"
        head = f"{least}; {NOT_SEARCHED}\n{head}"
    notes = dim(
        "spread: standard deviation over the seeds; 95 %: half of the interval of the mean",
        basis(found.graph, found.cluster),
    )
    return [*head.split("\n"), found.table().rich(), *notes]
