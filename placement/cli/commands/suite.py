"""``placement suite``: many graphs on many clusters, a row for each problem; a stopped suite goes on from its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from placement.cli import options
from placement.cli.output import emit, emit_json, emit_rich, progress
from placement.cli.reading import HowToRead, read_graph


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(HowToRead):
    """Options of ``placement suite``."""

    graphs: list[str]
    clusters: str
    methods: str | None = None
    strategies: bool | None = None
    seed: int = 0
    budget_s: float | None = None
    evaluations: int | None = None
    workers: int | None = None
    address: str | None = None
    stack: str | None = None
    rates: str = "measured"
    as_json: bool = False
    output: Path | None = None


def suite(given: SuiteOptions) -> None:
    """Place many graphs on many clusters, a row for each; with -o a suite that was stopped goes on."""
    with progress("importing"):
        from placement.comparing import suites
        from placement.inputs.sources import cluster_at
    methods = None if given.methods is None else options.parse_names("--methods", given.methods)
    named = options.parse_names("--clusters", given.clusters)
    for option, names in (("--clusters", named), ("--methods", methods)):
        if names == []:
            raise typer.BadParameter(f"{option} is empty; give one name, or several with commas between them.")
    clusters = [cluster_at(name, given.rates) for name in named]
    graphs = [read_graph(name, given).graph for name in given.graphs]
    with progress("placing", len(graphs) * len(clusters)) as report:
        found = suites.suite(
            graphs,
            clusters,
            methods,
            strategies=given.strategies,
            seed=given.seed,
            budget_s=given.budget_s,
            evaluations=given.evaluations,
            file=given.output,
            progress=lambda now, done, _: report(now, done),
            workers=given.workers,
            address=given.address,
        )
    if given.as_json:
        emit_json(found.to_dict())
        return
    emit(found.headline())
    emit_rich(found.table().rich())
    reasons = [f"{row.graph} on {row.cluster}: {row.reason}" for row in found.rows if row.reason]
    if reasons:
        emit("\n".join(reasons))
    if found.interrupted:
        again = " The same command goes on with the others." if given.output else ""
        emit(f"interrupted: {len(found.rows)} of {len(graphs) * len(clusters)} problems are done.{again}")
