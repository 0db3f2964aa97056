"""``placement suite``: many graphs on many clusters, a row for each problem; a stopped suite goes on from its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from placement.cli import completion, options
from placement.cli.output import emit, emit_json, emit_rich, progress
from placement.cli.reading import HowToRead, read_graph


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(HowToRead):
    """Options of ``placement suite``."""

    graphs: Annotated[
        list[str],
        typer.Argument(
            metavar="GRAPH...",
            autocompletion=completion.one_of(completion.MODELS),
            help="Built-in models, files and file.py:function, as `placement optimize` takes one.",
        ),
    ]
    clusters: Annotated[
        str,
        typer.Option(
            "--clusters",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.CLUSTERS),
            help="Presets and TOML files; each graph is placed on each of them.",
        ),
    ]
    methods: options.Methods = None
    strategies: Annotated[
        bool | None,
        typer.Option(
            "--strategies/--no-strategies",
            help="Search strategies, too, as `placement optimize` does; by default where --methods names none.",
        ),
    ] = None
    seed: options.Seed = 0
    budget_s: options.BudgetSeconds = None
    evaluations: options.Evaluations = None
    workers: options.Workers = None
    address: options.Address = None
    train: options.Train = False
    precision: options.Precision = None
    granularity: options.Granularity = "op"
    dim: options.Dims = None
    stack: options.Stack = None
    rates: options.Rates = "measured"
    as_json: options.Json = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A line of JSON for each row is appended here; rows that it has are not made again.",
        ),
    ] = None


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
