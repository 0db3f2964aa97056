"""``placement compare`` on one cluster: methods, and the best strategies beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from graphs.formatting import format_seconds, show, show_line
from placement.cli.comparing.answering import answer, dim, target_of
from placement.cli.output import progress, reason_as_json
from placement.cli.searching import compiled_line, first_lines
from placement.results.utilisation import basis
from placement.solving.methods import AUTO, default_methods, measure

if TYPE_CHECKING:
    from placement.cli.comparing.asked import CompareOptions
    from placement.comparing.methods import Comparison
    from placement.inputs.sources import Source


def compare_methods(given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]) -> None:
    """Run the methods on one cluster and show them, best first."""
    from placement.comparing.methods import compare
    from placement.report.html import render_html

    target = target_of(given, source)
    count = len(methods or default_methods(given.objective))
    with reason_as_json(given.as_json), progress("bounding", count) as report:
        found = compare(
            source.graph,
            target,
            methods,
            progress=lambda name, done, _: report(f"placing with {name}", done),
            **search,
        )
    rows, chart = [], ""
    if given.paper is not None:
        from placement.report.bar_chart import MeanBar, bar_chart

        rows = [*found.to_dict()["results"], *_searched(found)]
        bars = [MeanBar(one.method, one.answer.objective_s) for one in found.results if one.answer is not None]
        chart = bar_chart(bars, f"{measure(given.objective)} of methods")
    answer(given, found, lambda: _text(found, given), render_html, rows, found.answer, chart=chart)
    if found.best is None and (found.overall is None or not found.overall.feasible):
        _refuse(found)


def _text(found: Comparison, given: CompareOptions) -> list[RenderableType]:
    return [*_advice(found, given), *comparison_table(found), *_last_lines(found)]


def _advice(found: Comparison, given: CompareOptions) -> list[str]:
    """The advice and how to follow it."""
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
    from graphs.transforms.coverage import repeats_first
    from placement.report.words import headline

    note = "" if found.overall is None else repeats_first(found.overall.note)[1]
    searched = [show_line(note)] if note else []
    return [headline(found), *searched, *compiled_line(found.compiled_words())]


def comparison_table(comparison: Comparison) -> list[RenderableType]:
    """The bound, one row per method best first, and why the infeasible ones are."""
    graph, cluster, overall = comparison.graph, comparison.cluster, comparison.overall
    head = (
        f"{show(graph.name)} on {show(cluster.name)}: {graph.n_ops:,} ops, {graph.n_edges:,} edges, "
        f"{cluster.n_devices} devices"
    )
    if comparison.lower_bound_s > 0:
        bound = format_seconds(comparison.lower_bound_s)
        head = f"{head}; no placement has a {measure(comparison.objective)} below {bound}"
    if overall is not None and overall.lower_bound_s > 0:
        head = f"{head}, no strategy one below {format_seconds(overall.lower_bound_s)}"
    width = max(len(result.method) for result in comparison.results)
    below: list[RenderableType] = [
        Text(f" {show(result.method):<{width}}  infeasible: {show_line(result.reason or '')}", style="red")
        for result in comparison.results
        if result.answer is None
    ]
    below += [
        Text(f" {show(result.method):<{width}}  {show_line(result.note)}", style="dim")
        for result in comparison.results
        if result.note
    ]
    notes = [basis(graph, cluster)]
    if comparison.unsupported:
        notes.insert(0, f"not for objective {comparison.objective}: {', '.join(comparison.unsupported)}")
    return [head, comparison.table().rich(), *below, *dim(*notes)]


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

    if found.overall is not None:
        raise InfeasibleError(f"found no placement and no strategy that fits: {found.overall.reason}")
    first = next((result for result in found.results if result.method == AUTO), found.results[0])
    raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")
