"""``placement compare``: every method side by side, on one cluster or, what if, on several."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import completion, options
from placement.cli.options import parse_dims
from placement.cli.output import check_outputs, emit, emit_rich, progress, reason_as_json, usage_errors
from placement.cli.reading import HowToRead, read_graph
from placement.cli.records import again
from placement.cli.searching import ANSWER_FIELDS, HowToSearch, checked_search, do_it

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.comparison import Comparison
    from placement.inputs.sources import Source
    from placement.sizing.sweeps import Sweep
    from placement.what_if import WhatIf

DEVICES, FIGURES = "devices", "figures"  # of --sweep; the former is a copy of `placement.sizing.sweeps.DEVICES`


@dataclass(frozen=True, kw_only=True)
class CompareOptions(HowToSearch, HowToRead):
    """Options of ``placement compare``."""

    graph: options.Graph
    cluster: options.ClusterOption = None
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.METHODS),
            show_default=False,
            help="Which methods, policy:FILE for a trained policy; every heuristic and auto by default.",
        ),
    ] = None
    seed: options.Seed = 0
    objective: options.Objective = "latency"
    budget_s: options.BudgetSeconds = None
    evaluations: options.Evaluations = None
    communication: options.Communication = None
    memory_fraction: options.MemoryFraction = None
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="A,B,...",
            show_default=False,
            help="Rewrite the graph in each of these ways, e.g. dp8,'pp8 1f1b mb16','dp4 | tp2',none. By default the "
            "best of each family is searched and stands beside the methods; none alone leaves that out.",
        ),
    ] = None
    clusters: Annotated[
        str | None,
        typer.Option(
            "--clusters",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.CLUSTERS),
            show_default=False,
            help="What if: one row for each of these clusters.",
        ),
    ] = None
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="devices=1..8",
            show_default=False,
            help="What if: one row for each number of the cluster's devices (also devices=1,2,4), and where adding one "
            "stops helping; batch=32..4096: one row for each batch; long ranges go by doubling. figures: which figure "
            "of the cluster would help most, bandwidth, latency, memory or another.",
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            metavar="PER_DEVICE_HOUR",
            show_default=False,
            help="What one device costs in an hour; --sweep and --clusters then say what a step costs.",
        ),
    ] = None
    priority: options.PriorityOption = "longest_path"
    train: options.Train = False
    granularity: options.Granularity = "op"
    dim: options.Dims = None
    as_json: options.Json = False
    html: options.Html = None
    trace: options.Trace = None
    output: options.Output = None


def compare(given: CompareOptions) -> None:
    """Place a graph with every method, side by side, against a lower bound."""
    check_outputs(given.html, given.trace, given.output, inputs=[given.graph, given.cluster])
    with progress("importing"):
        from placement.inputs.sources import check_cluster_argument
        from placement.solving.methods import AUTO, METHODS, default_methods
    methods = None if given.methods is None else _names("--methods", given.methods)
    if methods is not None and not methods:
        raise typer.BadParameter(f"--methods names no method; valid: {', '.join(METHODS)}.")
    search = checked_search(methods or METHODS, given)
    several = [] if given.clusters is None else _names("--clusters", given.clusters)
    for name in [*([] if given.cluster is None else [given.cluster]), *several]:
        check_cluster_argument(name)
    strategies = None if given.strategies is None else _names("--strategies", given.strategies)
    is_what_if = given.clusters is not None or given.sweep is not None
    if strategies == ["none"]:
        strategies, methods = None, methods or ([AUTO] if is_what_if else list(default_methods(given.objective)))
    if given.sweep == FIGURES:
        from placement.cli.estimates import check_figures, compare_figures

        check_figures(given)
        compare_figures(given, read_graph(given.graph, given))
        return
    if strategies is not None:
        from placement.cli.strategies import check_strategies, compare_strategies

        check_strategies(given, strategies)
    sweep = _sweep(given)
    source = read_graph(
        given.graph, given if sweep is None or sweep.kind == DEVICES else _with_batch(given, sweep.sizes[0])
    )
    if strategies is not None:
        compare_strategies(given, source, strategies)
    elif is_what_if:
        _what_if(given, source, methods, search, sweep)
    else:
        _one_cluster(given, source, methods, search)


def _names(option: str, text: str) -> list[str]:
    """The names of a list with commas; none of an empty one."""
    names = [name.strip() for name in text.split(",")]
    if "" in names and any(names):
        raise typer.BadParameter(f"{option} {text} has an empty name; leave out the comma too many.")
    return [name for name in names if name]


def command_of(given: CompareOptions) -> str:
    """The command line that gives the same answer."""
    return again(
        "compare",
        [given.graph],
        given,
        ("cluster", "clusters", "sweep", "price", "methods", "strategies", *ANSWER_FIELDS),
    )


# -- one cluster ------------------------------------------------------------------------------------------------


def _one_cluster(given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]) -> None:
    from placement import comparison
    from placement.inputs.sources import cluster_for
    from placement.solving.methods import default_methods

    target = cluster_for(source, given.cluster, given.communication, given.memory_fraction)
    count = len(methods or default_methods(given.objective))
    with reason_as_json(given.as_json), progress("bounding", count) as report:
        found = comparison.compare(
            source.graph,
            target,
            methods,
            progress=lambda name, done, _: report(f"placing with {name}", done),
            **search,
        )
    found = dataclasses.replace(found, command=command_of(given))
    with progress("writing"):
        written = list(_write(found, given))
    if given.as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import comparison_table

        emit_rich(
            *_first_lines(found, given),
            *comparison_table(found),
            *_last_lines(found),
            *written,
            f"again: {found.command}",
        )
    if found.best is None and (found.overall is None or not found.overall.feasible):
        _refuse(found)


def _first_lines(found: Comparison, given: CompareOptions) -> list[str]:
    """The advice and how to follow it, where strategies were searched."""
    from graphs.formatting import show_line
    from placement.solving.advice import advice

    if found.overall is None:
        return []
    how = [f"do it: {do_it(given, found.overall)}"] if found.overall.feasible else []
    return [show_line(advice(found.overall)), *how]


def _last_lines(found: Comparison) -> list[str]:
    """The outcome of the methods, and what was searched beside them."""
    from graphs.formatting import show_line
    from placement.report.words import headline

    searched = [] if found.overall is None or not found.overall.note else [show_line(found.overall.note)]
    return [headline(found), *searched]


def _write(found: Comparison, given: CompareOptions) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if given.html is not None:
        from placement.report import write_html

        write_html(found, given.html, found.command)
        yield f"report: {given.html}"
    best = found.best if found.overall is None or not found.overall.feasible else found.overall
    if given.trace is not None and best is not None:
        from placement.report import write_trace

        write_trace(best, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
        yield f"results: {given.output}"


def _refuse(found: Comparison) -> None:
    """Raises: InfeasibleError: says why auto, or else the first method, found nothing."""
    from graphs.errors import InfeasibleError
    from placement.solving.methods import AUTO

    if found.overall is not None:
        raise InfeasibleError(f"found no placement and no strategy that fits: {found.overall.reason}")
    first = next((result for result in found.results if result.method == AUTO), found.results[0])
    raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")


# -- what if ----------------------------------------------------------------------------------------------------


def _sweep(given: CompareOptions) -> Sweep | None:
    """The sweep that is asked for, and a price that is one.

    Raises:
        typer.BadParameter: either makes no sense, or not beside the other options.
    """
    from placement.sizing.sweeps import BATCH, check_price, parse_sweep

    if given.price is not None:
        if given.clusters is None and given.sweep is None:
            raise typer.BadParameter("--price says what the rows of --sweep and --clusters cost; give one of them too.")
        with usage_errors():
            check_price(given.price)
    if given.sweep is None:
        return None
    if given.clusters is not None:
        raise typer.BadParameter("--sweep varies one --cluster; leave out --clusters.")
    with usage_errors():
        sweep = parse_sweep(given.sweep)
    if sweep.kind == BATCH and "batch" in parse_dims(given.dim):
        raise typer.BadParameter("--sweep batch=... and --dim batch=... both set the batch; leave out one of them.")
    return sweep


def _with_batch(given: CompareOptions, batch: int) -> CompareOptions:
    """The options of one batch of a sweep."""
    return dataclasses.replace(given, dim=[*(given.dim or ()), f"batch={batch}"])


def _what_if(
    given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any], sweep: Sweep | None
) -> None:
    from graphs.errors import InfeasibleError

    if given.trace is not None:
        raise typer.BadParameter("--trace shows one cluster; leave out --clusters and --sweep.")
    if sweep is not None and sweep.kind != DEVICES:
        found = _over_batches(given, source, methods, search, sweep)
    else:
        from placement.what_if import what_if

        targets = _several(given, source) if sweep is None else _swept(given, source, sweep)
        settings = {"is_sweep": sweep is not None, "price": given.price, **search}
        with progress("comparing", len(targets)) as report:
            found = what_if(source.graph, targets, methods, progress=report, **settings)
    found = dataclasses.replace(found, command=command_of(given))
    written = list(_write_what_if(found, given))
    if given.as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import what_if_table

        emit_rich(found.advice(), *what_if_table(found), *found.laws(), *written, f"again: {found.command}")
    if all(case.objective_s is None for case in found.cases):
        raise InfeasibleError(_nowhere(found))


def _over_batches(
    given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any], sweep: Sweep
) -> WhatIf:
    """The sweep of a batch; the graph of the first one has been read."""
    from placement.inputs.sources import cluster_for
    from placement.what_if import over_batches

    cluster = cluster_for(source, given.cluster, given.communication, given.memory_fraction)

    def graphs() -> Iterator[OpGraph]:
        yield source.graph
        for batch in sweep.sizes[1:]:
            yield read_graph(given.graph, _with_batch(given, batch)).graph

    with progress("comparing", len(sweep.sizes)) as report, usage_errors():
        return over_batches(graphs(), cluster, methods, price=given.price, progress=report, **search)


def _nowhere(found: WhatIf) -> str:
    """Why there is no answer: a proof for every cluster, or a search that found nothing on one of them."""
    open_cases = [case for case in found.cases if not case.proven_infeasible]
    if not open_cases:
        return f"{found.graph.name} fits on none of these clusters: {found.cases[-1].reason}"
    case = open_cases[-1]
    return (
        f"no placement of {found.graph.name} that fits was found on any of these clusters; on {case.cluster.name} "
        f"({case.devices} devices): {case.reason}"
    )


def _several(given: CompareOptions, source: Source) -> list[Cluster]:
    """The clusters that ``--clusters`` names."""
    from placement.inputs.sources import cluster_for

    if given.cluster is not None:
        raise typer.BadParameter("--cluster and --clusters both name clusters; give one of them.")
    names = _names("--clusters", given.clusters or "")
    if not names:
        raise typer.BadParameter("--clusters names no cluster; see `placement clusters`.")
    targets = [cluster_for(source, name, given.communication, given.memory_fraction) for name in names]
    for name, count in Counter(target.name for target in targets).items():
        if count > 1:
            raise typer.BadParameter(
                f"{count} of --clusters have the name {name!r}; give each once, and a file a name of its own."
            )
    return targets


def _swept(given: CompareOptions, source: Source, sweep: Sweep) -> list[Cluster]:
    """The one cluster with each number of its devices."""
    from env.resizing import resized
    from placement.inputs.sources import cluster_for

    whole = cluster_for(source, given.cluster, given.communication, given.memory_fraction)
    return [resized(whole, count) for count in sweep.sizes]


def _write_what_if(found: WhatIf, given: CompareOptions) -> Iterator[str]:
    """Write the files asked for; yields a sentence about the report."""
    if given.html is not None:
        from placement.report import write_what_if

        write_what_if(found, given.html)
        yield f"report: {given.html}"
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
