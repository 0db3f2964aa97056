"""Commands that answer: compare, optimize, verify."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import completion, options
from placement.cli.executing import check_scorer, profiled
from placement.cli.output import (
    check_outputs,
    command_line,
    emit,
    emit_json,
    emit_rich,
    progress,
    reason_as_json,
    usage_errors,
)

if TYPE_CHECKING:
    from env.cluster import Cluster
    from placement.cli.executing import Running
    from placement.comparison import Comparison
    from placement.inputs.sources import Source
    from placement.solving.result import Result


def compare(
    graph: options.Graph,
    cluster: options.ClusterOption = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.METHODS),
            show_default=False,
            help="Which methods, policy:FILE for a trained policy; every heuristic and auto by default.",
        ),
    ] = None,
    seed: options.Seed = 0,
    objective: options.Objective = options.DEFAULT_OBJECTIVE,
    budget_s: options.BudgetSeconds = None,
    evaluations: options.Evaluations = None,
    communication: options.Communication = None,
    memory_fraction: options.MemoryFraction = None,
    clusters: Annotated[
        str | None,
        typer.Option(
            "--clusters",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.CLUSTERS),
            show_default=False,
            help="What if: one row for each of these clusters.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="devices=1..8",
            show_default=False,
            help="What if: one row for each number of the cluster's devices (also devices=1,2,4), and where adding one "
            "stops helping.",
        ),
    ] = None,
    priority: options.PriorityOption = options.DEFAULT_PRIORITY,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
    html: options.Html = None,
    trace: options.Trace = None,
    output: options.Output = None,
) -> None:
    """Place a graph with every method, side by side, against a lower bound."""
    check_outputs(html, trace, output, inputs=[graph, cluster])
    with progress("importing"):
        from graphs.errors import InfeasibleError
        from placement import comparison
        from placement.inputs.sources import check_cluster_argument, cluster_for
        from placement.solving.methods import AUTO, METHODS, check_options, default_methods
    names = None if methods is None else _names("--methods", methods)
    if names is not None and not names:
        raise typer.BadParameter(f"--methods names no method; valid: {', '.join(METHODS)}.")
    with usage_errors():
        check_options(names or METHODS, seed, objective, priority, budget_s, evaluations)
    for name in [*([] if cluster is None else [cluster]), *(_names("--clusters", clusters) if clusters else [])]:
        check_cluster_argument(name)
    source = _read(graph, train, granularity, dims)
    settings = {
        "--cluster": cluster,
        "--clusters": clusters,
        "--sweep": sweep,
        "--methods": methods,
        "--seed": seed,
        **_unusual(objective, budget_s, evaluations, communication, memory_fraction, priority, train, granularity),
    }
    command = command_line("compare", [graph], settings, dims)
    asked: dict[str, Any] = {"seed": seed, "objective": objective, "priority": priority}
    asked |= {"budget_s": budget_s, "evaluations": evaluations}
    if clusters is not None or sweep is not None:
        if trace is not None:
            raise typer.BadParameter("--trace shows one cluster; leave out --clusters and --sweep.")
        targets = _targets(source, cluster, clusters, sweep, communication, memory_fraction)
        _what_if(source, targets, names, asked, sweep is not None, command, html, output, as_json)
        return
    target = cluster_for(source, cluster, communication, memory_fraction)
    with reason_as_json(as_json), progress("bounding", len(names or default_methods(objective))) as report:
        found = comparison.compare(
            source.graph,
            target,
            names,
            progress=lambda name, done, _: report(f"placing with {name}", done),
            **asked,
        )
    found = dataclasses.replace(found, command=command)
    with progress("writing"):
        written = list(_write(found, html, trace, output))
    if as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import comparison_table
        from placement.report.words import headline

        emit_rich(*comparison_table(found), headline(found), *written, f"again: {found.command}")
    if found.best is None:
        first = next((result for result in found.results if result.method == AUTO), found.results[0])
        raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")


def optimize(
    graph: options.Graph,
    cluster: options.ClusterOption = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            autocompletion=completion.list_of(completion.METHODS),
            help="A heuristic, a search, a learned policy, policy:FILE for a trained one, or auto: heuristics, "
            "search and exact solvers, keeping the best.",
        ),
    ] = "auto",
    seed: options.Seed = 0,
    objective: options.Objective = options.DEFAULT_OBJECTIVE,
    budget_s: options.BudgetSeconds = None,
    evaluations: options.Evaluations = None,
    communication: options.Communication = None,
    memory_fraction: options.MemoryFraction = None,
    priority: options.PriorityOption = options.DEFAULT_PRIORITY,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    scorer: options.ScorerOption = options.DEFAULT_SCORER,
    as_json: options.Json = False,
    html: options.Html = None,
    trace: options.Trace = None,
    output: options.Output = None,
) -> None:
    """Find a placement, and save it with everything needed to replay and verify it."""
    check_outputs(html, trace, output, inputs=[graph, cluster])
    with progress("importing"):
        from graphs.errors import InfeasibleError
        from placement import optimization
        from placement.inputs.sources import check_cluster_argument, cluster_for
        from placement.solving.methods import HEURISTICS, check_options
    with usage_errors():
        check_options([method], seed, objective, priority, budget_s, evaluations)
    check_scorer(scorer, granularity, objective)
    if cluster is not None:
        check_cluster_argument(cluster)
    running: Running = contextlib.nullcontext(scorer)
    if scorer == options.DEFAULT_SCORER:
        source = _read(graph, train, granularity, dims)
        read, target = source.graph, cluster_for(source, cluster, communication, memory_fraction)
    else:
        read, target, running = profiled(graph, cluster, train, dims)
    with reason_as_json(as_json), running as make_scorer, progress(f"placing with {method}"):
        result = optimization.optimize(
            read,
            target,
            method,
            seed=seed,
            objective=objective,
            priority=priority,
            budget_s=budget_s,
            evaluations=evaluations,
            scorer=make_scorer,
        )
    settings = {
        "--cluster": cluster,
        "--method": method,
        "--scorer": scorer if scorer != options.DEFAULT_SCORER else None,
        "--seed": seed,
        **_unusual(objective, budget_s, evaluations, communication, memory_fraction, priority, train, granularity),
    }
    result = dataclasses.replace(result, command=command_line("optimize", [graph], settings, dims))
    written = list(_write_result(result, html, trace, output)) if result.feasible else []
    if as_json:
        emit_json(result.to_dict())
    elif result.feasible:
        from placement.cli.tables import at_peak

        note = at_peak(result.graph, result.cluster)
        emit("\n".join([result.summary(), *([f"note         {note}"] if note else []), *written]))
    if not result.feasible:
        others = "" if method not in HEURISTICS else " Another method may find one; --method auto tries them all."
        raise InfeasibleError(f"{method} found no placement that fits: {result.reason}{others}")


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
        from placement.inputs.sources import read_cluster
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


def _unusual(
    objective: str,
    budget_s: float | None,
    evaluations: int | None,
    communication: str | None,
    memory_fraction: float | None,
    priority: str,
    train: bool,
    granularity: str,
) -> dict[str, object]:
    """The settings that a command line need not name unless they differ from the default."""
    return {
        "--objective": objective if objective != options.DEFAULT_OBJECTIVE else None,
        "--budget-s": budget_s,
        "--evaluations": evaluations,
        "--communication": communication,
        "--memory-fraction": memory_fraction,
        "--priority": priority if priority != options.DEFAULT_PRIORITY else None,
        "--granularity": granularity if granularity != options.DEFAULT_GRANULARITY else None,
        "--train": train,
    }


def _names(option: str, text: str) -> list[str]:
    """The names of a list with commas; none of an empty one."""
    names = [name.strip() for name in text.split(",")]
    if "" in names and any(names):
        raise typer.BadParameter(f"{option} {text} has an empty name; leave out the comma too many.")
    return [name for name in names if name]


def _targets(
    source: Source,
    cluster: str | None,
    clusters: str | None,
    sweep: str | None,
    communication: str | None,
    memory_fraction: float | None,
) -> list[Cluster]:
    """The clusters of a what-if."""
    from placement.inputs.sources import cluster_for
    from placement.what_if import first_devices, parse_sweep

    if sweep is None:
        if cluster is not None:
            raise typer.BadParameter("--cluster and --clusters both name clusters; give one of them.")
        names = _names("--clusters", clusters or "")
        if not names:
            raise typer.BadParameter("--clusters names no cluster; see `placement clusters`.")
        targets = [cluster_for(source, name, communication, memory_fraction) for name in names]
        for name, count in Counter(target.name for target in targets).items():
            if count > 1:
                raise typer.BadParameter(
                    f"{count} of --clusters have the name {name!r}; give each once, and a file a name of its own."
                )
        return targets
    if clusters is not None:
        raise typer.BadParameter("--sweep varies one --cluster; leave out --clusters.")
    with usage_errors():
        counts = parse_sweep(sweep)
    return [first_devices(cluster_for(source, cluster, communication, memory_fraction), count) for count in counts]


def _what_if(
    source: Source,
    targets: list[Cluster],
    names: list[str] | None,
    asked: dict[str, Any],
    is_sweep: bool,
    command: str,
    html: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    from graphs.disk import write_atomically
    from graphs.errors import InfeasibleError
    from placement.solving.methods import AUTO
    from placement.what_if import what_if

    with progress("comparing", len(targets)) as report:
        found = what_if(source.graph, targets, names or [AUTO], is_sweep=is_sweep, progress=report, **asked)
    found = dataclasses.replace(found, command=command)
    written = []
    if html is not None:
        from placement.report import write_what_if

        write_what_if(found, html)
        written.append(f"report: {html}")
    if output is not None:
        write_atomically(output, found.to_json())
    if as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import what_if_table

        emit_rich(*what_if_table(found), found.verdict(), *written, f"again: {command}")
    if all(case.objective_s is None for case in found.cases):
        raise InfeasibleError(f"{source.graph.name} fits on none of these clusters: {found.cases[0].reason}")


def _read(graph: str, train: bool, granularity: str, dims: list[str] | None) -> Source:
    sizes = options.parse_dims(dims)
    with progress(f"reading {graph}"):
        from placement.inputs.sources import read_source

        return read_source(graph, train=train, granularity=granularity, dims=sizes)


def _write_result(result: Result, html: Path | None, trace: Path | None, output: Path | None) -> Iterator[str]:
    """Write the files asked for of one result; yields a sentence about each."""
    if html is not None:
        from placement.comparison import with_one_device
        from placement.report import write_html

        write_html(with_one_device(result), html, result.command)
        yield f"report: {html}"
    if trace is not None:
        from placement.report import write_trace

        write_trace(result, trace)
        yield f"trace: {trace}"
    if output is not None:
        result.save(output)
        yield f"saved to {output}"


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
