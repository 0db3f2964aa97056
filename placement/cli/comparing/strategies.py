"""``placement compare --strategies``: the tables of rewritten graphs, and what the command does for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphs.formatting import show, show_line
from placement.cli.comparing.answering import answer, dim, target_of
from placement.cli.output import progress, reason_as_json, usage_errors
from placement.cli.records import is_default
from placement.cli.searching import compiled_line, first_lines
from placement.comparing.rows import Column, Row, RowTable
from placement.results.utilisation import basis

if TYPE_CHECKING:
    from placement.cli.comparing.asked import CompareOptions
    from placement.comparing.strategies import StrategyComparison
    from placement.inputs.sources import Source

_PARTS = ("parameters", "gradients", "optimizer", "activations")  # of the peak
_NOTES = (
    "vs one: times as fast as one device; MFU: of the FLOP/s of the devices in use; peak: memory of the fullest device",
    "bubble: share of the devices' time without computing",
    "exposed: time in which a device computes nothing and communicates, the mean of the devices",
    "gap: at most so far from optimal among all strategies",
)
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift")


def compare_strategies(given: CompareOptions, source: Source, texts: list[str]) -> None:
    """Score the strategies and show them, best first."""
    with progress("importing"):
        from placement.comparing.strategies import compare_strategies as compared
        from placement.report.strategies import render_strategies
    target = target_of(given, source)
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
    rows = [] if given.paper is None else found.to_dict()["results"]
    best = None if found.best is None else found.best.result
    answer(given, found, lambda: _text(found, given), render_strategies, rows, best)
    if found.best is None:
        from graphs.errors import InfeasibleError

        first = found.rows[0].result
        raise InfeasibleError(f"no strategy fits; {first.strategy.text}: {first.reason}")


def _text(found: StrategyComparison, given: CompareOptions) -> list[RenderableType]:
    last = [found.headline(), *map(show_line, found.reasons()), *compiled_line(found.compiled_words())]
    return [*_advice(found, given), *strategy_tables(found), *last]


def _advice(found: StrategyComparison, given: CompareOptions) -> list[str]:
    """The advice and how to follow it; nothing where no strategy fits."""
    from placement.solving.one_device import with_alternatives

    if found.best is None:
        return []
    results = [row.result for row in found.rows]
    return first_lines(given, with_alternatives(found.best.result, results, found.single))


def check_strategies(given: CompareOptions, texts: list[str]) -> None:
    """Refuse what cannot be, before a graph is read for minutes.

    Raises:
        typer.BadParameter: no strategy, or an option that strategies do not go with.
        StrategyError: no text can be read.
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
    from graphs.transforms.strategy_reading import read_strategies

    read_strategies(texts)


# -- tables -----------------------------------------------------------------------------------------------------


def strategy_tables(found: StrategyComparison) -> list[RenderableType]:
    """Times of every strategy, best first, and of one device; the peak by parts; bytes exchanged; what does not fit."""
    graph, cluster = found.graph, found.cluster
    head = (
        f"{show(graph.name)} on {show(cluster.name)}: {graph.n_ops:,} ops before rewriting, {cluster.n_devices} devices"
    )
    below = dim(*_NOTES, basis(graph, cluster))
    for row in found.rows:
        if row.result.note:
            below.append(Text(f" {row.strategy.text}  {show_line(row.result.note)}"))
        if row.result.not_run:
            below.append(Text(f" {row.strategy.text}  nothing runs it: {show_line(row.result.not_run)}", style="red"))
        if not row.result.feasible:
            reason = show_line(row.result.reason or "")
            below.append(Text(f" {row.strategy.text}  {row.without_answer}: {reason}", style="red"))
    for text, why in found.unread.items():
        below.append(Text(f" {show_line(text)}  not read: {show_line(why)}", style="red"))
    return [head, found.table().rich(), *below, *_peaks(found), *_exchanges(found)]


def _peaks(found: StrategyComparison) -> Iterator[RenderableType]:
    """Parts of the fullest device's peak."""
    given = [(row.strategy.text, row.figures.peak_bytes) for row in found.rows if row.figures is not None]
    if given:
        yield from ("", _sizes("memory of the fullest device", _PARTS, given))


def _exchanges(found: StrategyComparison) -> Iterator[RenderableType]:
    """Bytes of the tensors exchanged, by kind of collective."""
    given = [(row.strategy.text, row.figures.exchanged_bytes) for row in found.rows if row.figures is not None]
    kinds = [kind for kind in _COLLECTIVES if any(kind in exchanged for _, exchanged in given)]
    if kinds:
        yield from ("", _sizes("exchanged in a step", kinds, [pair for pair in given if pair[1]]))


def _sizes(title: str, names: Iterable[str], given: Iterable[tuple[str, Mapping[str, int]]]) -> Table:
    """A row of sizes in bytes for each strategy."""
    columns = (Column(name, name.replace("_", "-"), "bytes") for name in names)
    rows = (Row({"strategy": strategy, **sizes}) for strategy, sizes in given)
    return RowTable((Column("strategy", title, is_text=True), *columns), tuple(rows)).rich()
