"""``placement compare --strategies``: the tables of rewritten graphs, and what the command does for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphs.formatting import format_bytes, format_seconds, show, show_line
from placement.cli.output import emit, emit_rich, progress, reason_as_json, usage_errors
from placement.cli.records import is_default
from placement.solving.utilisation import basis, rate_of

if TYPE_CHECKING:
    from placement.cli.comparing.asked import CompareOptions
    from placement.comparing.strategies import StrategyComparison
    from placement.inputs.sources import Source
    from placement.solving.result import Result
    from placement.solving.strategies.row import StrategyRow

_COLUMNS = ("strategy", "step time", "vs one", "MFU", "peak", "bubble", "exposed", "gap")
_PARTS = ("parameters", "gradients", "optimizer", "activations")  # of the peak
_NOTES = (
    "vs one: times as fast as one device; MFU: of the FLOP/s of the devices in use; peak: memory of the fullest device",
    "bubble: share of the devices' time without computing",
    "exposed: time in which a device computes nothing and communicates",
    "gap: at most so far from optimal among all strategies",
)
NONE_THERE = "–"


def compare_strategies(given: CompareOptions, source: Source, texts: list[str]) -> None:
    """Score the strategies and show them, best first."""
    with progress("importing"):
        from placement.cli.searching import compiled_line
        from placement.comparing.strategies import compare_strategies as compared
        from placement.inputs.sources import cluster_for
    target = cluster_for(source, given.cluster, given.communication, given.memory_fraction, given.rates)
    with reason_as_json(given.as_json), progress("scoring", len(texts)) as report, usage_errors():
        found = compared(
            source.graph,
            target,
            texts,
            seed=given.seed,
            budget_s=given.budget_s,
            evaluations=given.evaluations,
            progress=lambda text, done, _: report(f"scoring {text}", done),
        )
    found = dataclasses.replace(found, command=given.again())
    with progress("writing"):
        written = list(_write(found, given))
    if given.as_json:
        emit(found.to_json())
    else:
        last = [found.headline(), *compiled_line(found.compiled_words())]
        emit_rich(*_advice(found, given), *strategy_tables(found), *last, *written, f"again: {found.command}")
    if found.best is None:
        from graphs.errors import InfeasibleError

        first = found.rows[0].result
        raise InfeasibleError(f"no strategy fits; {first.strategy.text}: {first.reason}")


def _advice(found: StrategyComparison, given: CompareOptions) -> list[str]:
    """The advice and how to follow it; nothing where no strategy fits."""
    from placement.cli.searching import first_lines
    from placement.solving.one_device import with_alternatives

    if found.best is None:
        return []
    results = [row.result for row in found.rows]
    return first_lines(given, with_alternatives(found.best.result, results, found.single))


def check_strategies(given: CompareOptions, texts: list[str]) -> None:
    """Refuse what cannot be, before a graph is read for minutes.

    Raises:
        typer.BadParameter: no strategy, or an option that strategies do not go with.
        StrategyError: a text that cannot be read.
    """
    if not texts:
        raise typer.BadParameter("--strategies names no strategy; give for example dp8,'pp8 1f1b mb16',none.")
    for name, value in (("--clusters", given.clusters), ("--sweep", given.sweep), ("--methods", given.methods)):
        if value is not None:
            raise typer.BadParameter(
                f"--strategies compares on one cluster with the strategy's own placement; leave out {name}."
            )
    if given.objective != "latency":
        raise typer.BadParameter("--strategies gives step times; leave out --objective.")
    if not is_default(given, "priority"):
        raise typer.BadParameter("--strategies says itself in which order ops run; leave out --priority.")
    from graphs.transforms.strategy import Strategy

    for text in texts:
        Strategy.parse(text)


def _write(found: StrategyComparison, given: CompareOptions) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if given.html is not None:
        from placement.report import write_strategies

        write_strategies(found, given.html)
        yield f"report: {given.html}"
    if given.paper is not None:
        from placement.report.paper import write_paper
        from placement.report.strategies import render_strategies

        written = write_paper(given.paper, found.to_dict()["results"], render_strategies(found))
        yield from (f"for a paper: {path}" for path in written)
    if given.trace is not None and found.best is not None:
        from placement.report import write_trace

        write_trace(found.best.result, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
        yield f"results: {given.output}"


# -- tables -----------------------------------------------------------------------------------------------------


def strategy_tables(found: StrategyComparison) -> list[RenderableType]:
    """Times of every strategy, best first, and of one device; the peak by parts; bytes exchanged; what does not fit."""
    graph, cluster = found.graph, found.cluster
    head = (
        f"{show(graph.name)} on {show(cluster.name)}: {graph.n_ops:,} ops before rewriting, {cluster.n_devices} devices"
    )
    rate, per_s = rate_of(graph)
    times = _table(*_COLUMNS[:2], rate, *_COLUMNS[2:])
    for number, row in enumerate(found.rows):
        style = "red" if not row.result.feasible else "bold green" if number == 0 else ""
        times.add_row(*_with_rate(_cells(found, row), row.result.objective_s, per_s), style=style)
    times.add_row(*_with_rate(_one_device(found), found.single_device_s, per_s), style="dim")
    below = [Text(f" {line}", style="dim") for line in (*_NOTES, basis(graph, cluster)) if line]
    for row in found.rows:
        if row.result.note:
            below.append(Text(f" {row.strategy.text}  {show_line(row.result.note)}"))
        if not row.result.feasible:
            reason = show_line(row.result.reason or "")
            below.append(Text(f" {row.strategy.text}  {row.without_answer}: {reason}", style="red"))
    return [head, times, *below, *_peaks(found), *_exchanges(found)]


def _with_rate(cells: list[str], step_s: float | None, per_s: Callable[[float], str]) -> list[str]:
    """A row with samples or tokens a second behind its time."""
    return [*cells[:2], NONE_THERE if step_s is None else per_s(step_s), *cells[2:]]


def _one_device(found: StrategyComparison) -> list[str]:
    """The row that speed-ups refer to: which device, its time and its peak."""
    answer = None if found.single is None else found.single.answer
    if answer is None:
        return ["one device", "does not fit", NONE_THERE, NONE_THERE, *[""] * (len(_COLUMNS) - 4)]
    name, peak = found.single_device, format_bytes(max(answer.peak_bytes.values()))
    time = format_seconds(answer.objective_s)
    mfu = _mfu(found.single)
    return [f"one device, {show(name or '')}", time, "1.00x", mfu, peak, *[""] * (len(_COLUMNS) - 5)]


def _mfu(result: Result | None) -> str:
    mfu = None if result is None else result.utilisation.mfu
    return NONE_THERE if mfu is None else f"{mfu:.0%}"


def _table(*columns: str) -> Table:
    """A table whose first column, of strategies, breaks between words where it is long; no other does."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _cells(found: StrategyComparison, row: StrategyRow) -> list[str]:
    result, given = row.result, row.figures
    speedup = found.speedup(row)
    answer = result.answer
    time = row.without_answer if answer is None else format_seconds(answer.objective_s)
    cells = [row.strategy.text, time, NONE_THERE if speedup is None else f"{speedup:.2f}x", _mfu(result)]
    gap = "" if answer is None else f"{100 * answer.gap:.1f} %"
    if given is None:
        peak = "" if answer is None else format_bytes(max(answer.peak_bytes.values(), default=0))
        return [*cells, peak, "", "", gap]
    peak = format_bytes(sum(given.peak_bytes.values()))
    return [*cells, peak, f"{100 * given.bubble:.1f} %", format_seconds(given.exposed_s), gap]


def _peaks(found: StrategyComparison) -> Iterator[RenderableType]:
    """Parts of the fullest device's peak."""
    rows = [(row, row.figures) for row in found.rows if row.figures is not None]
    if not rows:
        return
    table = _table("memory of the fullest device", *_PARTS)
    for row, given in rows:
        table.add_row(row.strategy.text, *(format_bytes(given.peak_bytes[name]) for name in _PARTS))
    yield ""
    yield table


def _exchanges(found: StrategyComparison) -> Iterator[RenderableType]:
    """Bytes of the tensors exchanged, by kind of collective."""
    given = [(row.strategy.text, row.figures.exchanged_bytes) for row in found.rows if row.figures is not None]
    kinds = [
        kind
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        if any(kind in e for _, e in given)
    ]
    if not kinds:
        return
    table = _table("exchanged in a step", *(kind.replace("_", "-") for kind in kinds))
    for strategy, exchanged in given:
        if exchanged:
            table.add_row(strategy, *(format_bytes(exchanged[k]) if k in exchanged else NONE_THERE for k in kinds))
    yield ""
    yield table
