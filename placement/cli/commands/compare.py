"""``placement compare``: every method side by side, on one cluster or, what if, on several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from placement.cli import options
from placement.cli.comparing.asked import CompareOptions
from placement.cli.output import check_outputs, emit, emit_rich, progress, reason_as_json
from placement.cli.reading import read_graph
from placement.cli.searching import checked_search, compiled_line, first_lines

if TYPE_CHECKING:
    from placement.comparing.methods import Comparison
    from placement.inputs.sources import Source


def compare(given: CompareOptions) -> None:
    """Place a graph with every method, side by side, against a lower bound."""
    check_outputs(given.html, given.trace, given.output, inputs=[given.graph, given.cluster])
    with progress("importing"):
        from placement.inputs.sources import check_cluster_argument
        from placement.solving.methods import AUTO, METHODS, default_methods
    methods = None if given.methods is None else options.parse_names("--methods", given.methods)
    if methods is not None and not methods:
        raise typer.BadParameter(f"--methods names no method; valid: {', '.join(METHODS)}.")
    search = checked_search(methods or METHODS, given)
    several = [] if given.clusters is None else options.parse_names("--clusters", given.clusters)
    for name in [*([] if given.cluster is None else [given.cluster]), *several]:
        check_cluster_argument(name)
    strategies = None if given.strategies is None else options.parse_names("--strategies", given.strategies)
    is_what_if = given.clusters is not None or given.sweep is not None
    if strategies == ["none"]:
        strategies, methods = None, methods or ([AUTO] if is_what_if else list(default_methods(given.objective)))
    from placement.cli.comparing import sweeps

    if given.sweep == sweeps.FIGURES:
        sweeps.check_figures(given)
        sweeps.compare_figures(given, read_graph(given.graph, given))
        return
    if given.seeds is not None:
        from placement.cli.comparing.seeds import check_seeds

        check_seeds(given)
    if strategies is not None:
        from placement.cli.comparing.strategies import check_strategies, compare_strategies

        check_strategies(given, strategies)
    sweep = sweeps.sweep_of(given)
    source = sweeps.source_of(given, sweep)
    if given.seeds is not None:
        from placement.cli.comparing.seeds import compare_under_seeds

        compare_under_seeds(given, source, methods, search)
    elif strategies is not None:
        compare_strategies(given, source, strategies)
    elif is_what_if:
        sweeps.sweep_or_clusters(given, source, methods, search, sweep, several)
    else:
        _one_cluster(given, source, methods, search)


# -- one cluster ------------------------------------------------------------------------------------------------


def _one_cluster(given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]) -> None:
    from placement.comparing import methods as comparing
    from placement.inputs.sources import cluster_for
    from placement.solving.methods import default_methods

    target = cluster_for(source, given.cluster, given.communication, given.memory_fraction, given.rates)
    count = len(methods or default_methods(given.objective))
    with reason_as_json(given.as_json), progress("bounding", count) as report:
        found = comparing.compare(
            source.graph,
            target,
            methods,
            progress=lambda name, done, _: report(f"placing with {name}", done),
            **search,
        )
    found = dataclasses.replace(found, command=given.again())
    with progress("writing"):
        written = list(_write(found, given))
    if given.as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import comparison_table

        emit_rich(
            *_advice(found, given),
            *comparison_table(found),
            *_last_lines(found),
            *written,
            f"again: {found.command}",
        )
    if found.best is None and (found.overall is None or not found.overall.feasible):
        _refuse(found)


def _advice(found: Comparison, given: CompareOptions) -> list[str]:
    """The advice and how to follow it."""
    from graphs.formatting import show_line
    from graphs.transforms.coverage import repeats_first
    from placement.report.words import NOT_SEARCHED
    from placement.solving.one_device import beside_one_device

    result = found.overall or found.best
    if result is None:
        return []
    advice, *how = first_lines(given, beside_one_device(result, found.graph, found.cluster))
    repeats, _ = repeats_first(result.note)
    said = [f"not shared: {show_line(repeats)}"] if repeats else []
    if found.overall is None and found.has_strategies:
        said.insert(0, f"{NOT_SEARCHED}.".capitalize())
    return [advice, *how, *said]


def _last_lines(found: Comparison) -> list[str]:
    """The outcome of the methods, what was searched beside them, and what torch.compile would bring."""
    from graphs.formatting import show_line
    from graphs.transforms.coverage import repeats_first
    from placement.report.words import headline

    note = "" if found.overall is None else repeats_first(found.overall.note)[1]
    searched = [show_line(note)] if note else []
    return [headline(found), *searched, *compiled_line(found.compiled_words())]


def _write(found: Comparison, given: CompareOptions) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if given.html is not None:
        from placement.report import write_html

        write_html(found, given.html, found.command)
        yield f"report: {given.html}"
    if given.paper is not None:
        from placement.report.html import render_html
        from placement.report.paper import write_paper

        rows = [*found.to_dict()["results"], *_searched(found)]
        yield from (f"for a paper: {path}" for path in write_paper(given.paper, rows, render_html(found)))
    if given.trace is not None and found.answer is not None:
        from placement.report import write_trace

        write_trace(found.answer, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
        yield f"results: {given.output}"


def _searched(found: Comparison) -> list[dict[str, Any]]:
    """Rows of strategies beside those of methods."""
    ways = [] if found.overall is None else found.overall.alternatives
    return [
        {
            "method": one.name,
            "strategy": one.strategy.text,
            "step_time_s": one.step_time_s,
            "fullest_bytes": one.peak_bytes,
        }
        for one in ways
    ]


def _refuse(found: Comparison) -> None:
    """Raises: InfeasibleError: says why auto, or else the first method, found nothing."""
    from graphs.errors import InfeasibleError
    from placement.solving.methods import AUTO

    if found.overall is not None:
        raise InfeasibleError(f"found no placement and no strategy that fits: {found.overall.reason}")
    first = next((result for result in found.results if result.method == AUTO), found.results[0])
    raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")
