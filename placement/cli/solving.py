"""Commands that answer: compare, optimize, verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from placement.cli import options
from placement.cli.output import check_outputs, command_line, emit, emit_json, emit_rich, progress

if TYPE_CHECKING:
    from placement.comparison import Comparison
    from placement.sources import Source


def compare(
    graph: options.Graph,
    cluster: options.ClusterOption = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", metavar="A,B,...", show_default=False, help="Which methods; every heuristic by default."
        ),
    ] = None,
    seed: options.Seed = 0,
    objective: options.Objective = "latency",
    priority: options.PriorityOption = options.DEFAULT_PRIORITY,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", show_default=False, help="Write a report that opens offline in any browser."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", show_default=False, help="Write the best schedule as a trace for Perfetto."
        ),
    ] = None,
    output: options.Output = None,
) -> None:
    """Place a graph with every method, side by side, against a lower bound."""
    check_outputs(html, trace, output, inputs=[graph, cluster])
    with progress("importing"):
        from graphs.errors import InfeasibleError
        from placement import comparison
        from placement.optimization import HEURISTICS, check_options
        from placement.sources import cluster_for
    names = list(HEURISTICS) if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter(f"--methods names no method; valid: {', '.join(HEURISTICS)}.")
    check_options(names, seed, objective, priority)
    source = _read(graph, train, granularity, dims)
    target = cluster_for(source, cluster)
    with progress("bounding", len(names)) as report:
        found = comparison.compare(
            source.graph,
            target,
            names,
            seed=seed,
            objective=objective,
            priority=priority,
            progress=lambda name, done, _: report(f"placing with {name}", done),
        )
    settings = {"--cluster": cluster, "--methods": methods, "--seed": seed, **_unusual(priority, train, granularity)}
    found = dataclasses.replace(found, command=command_line("compare", graph, settings, dims))
    with progress("writing"):
        written = list(_write(found, html, trace, output))
    if as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import comparison_table
        from placement.report.words import headline

        emit_rich(*comparison_table(found), headline(found), *written, f"again: {found.command}")
    if found.best is None:
        first = found.results[0]
        raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")


def optimize(
    graph: options.Graph,
    cluster: options.ClusterOption = None,
    method: Annotated[
        str, typer.Option("--method", metavar="NAME", help="A heuristic, or auto: all of them, keeping the best.")
    ] = "auto",
    seed: options.Seed = 0,
    objective: options.Objective = "latency",
    priority: options.PriorityOption = options.DEFAULT_PRIORITY,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Find a placement, and save it with everything needed to replay and verify it."""
    check_outputs(output, inputs=[graph, cluster])
    with progress("importing"):
        from graphs.errors import InfeasibleError
        from placement import optimization
        from placement.sources import cluster_for
    optimization.check_options([method], seed, objective, priority)
    source = _read(graph, train, granularity, dims)
    target = cluster_for(source, cluster)
    with progress(f"placing with {method}"):
        result = optimization.optimize(source.graph, target, method, seed=seed, objective=objective, priority=priority)
    settings = {"--cluster": cluster, "--method": method, "--seed": seed, **_unusual(priority, train, granularity)}
    result = dataclasses.replace(result, command=command_line("optimize", graph, settings, dims))
    if output is not None and result.feasible:
        result.save(output)
    if as_json:
        emit_json(result.to_dict())
    elif result.feasible:
        emit(result.summary() + (f"\nsaved to {output}" if output is not None else ""))
    if not result.feasible:
        raise InfeasibleError(f"{method} found no placement that fits: {result.reason}")


def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What `placement optimize -o` wrote.")
    ],
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph",
            metavar="GRAPH",
            show_default=False,
            help="The graph it should be for; the one in FILE by default.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            show_default=False,
            help="The cluster it should be for; the one in FILE by default.",
        ),
    ] = None,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
) -> None:
    """Score a saved placement again, with code that no method shares, and compare every figure."""
    if graph is None and (train or dims or granularity != options.DEFAULT_GRANULARITY):
        raise typer.BadParameter("--train, --granularity and --dim say how to read --graph GRAPH; give that too.")
    with progress("importing"):
        from placement import verification
        from placement.sources import read_cluster
    expected = None if graph is None else _read(graph, train, granularity, dims).graph
    target = None if cluster is None else read_cluster(cluster)
    with progress(f"verifying {file}"):
        found = verification.verify(file, expected, target)
    if as_json:
        emit_json(found.to_dict())
    else:
        emit(found.summary())
    if not found.holds:
        raise typer.Exit(1)


def _unusual(priority: str, train: bool, granularity: str) -> dict[str, object]:
    """The settings that a command line need not name unless they differ from the default."""
    return {
        "--priority": None if priority == options.DEFAULT_PRIORITY else priority,
        "--train": train,
        "--granularity": None if granularity == options.DEFAULT_GRANULARITY else granularity,
    }


def _read(graph: str, train: bool, granularity: str, dims: list[str] | None) -> Source:
    sizes = options.parse_dims(dims)
    with progress(f"reading {graph}"):
        from placement.sources import read_source

        return read_source(graph, train=train, granularity=granularity, dims=sizes)


def _write(found: Comparison, html: Path | None, trace: Path | None, output: Path | None) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    from graphs.disk import write_atomically

    if html is not None:
        from placement.report import write_html

        write_html(found, html, found.command)
        yield f"report: {html}"
    if trace is not None and found.best is not None:
        from placement.report import write_trace

        write_trace(found.best, trace)
        yield f"trace: {trace}"
    if output is not None:
        write_atomically(output, found.to_json())
        yield f"results: {output}"
