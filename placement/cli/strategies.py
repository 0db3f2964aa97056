"""``placement compare --strategies``: the table of rewritten graphs, and what the command does for it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphs.formatting import format_bytes, format_seconds, show, show_line
from placement.cli.output import emit, emit_rich, progress, reason_as_json, usage_errors

if TYPE_CHECKING:
    from placement.cli.commands.compare import CompareOptions
    from placement.inputs.sources import Source
    from placement.strategy_comparison import StrategyComparison, StrategyRow

_COLUMNS = (
    *("strategy", "step time", "speed-up", "devices", "peak memory", "parameters", "gradients", "optimizer"),
    *("activations", "bubble", "exposed", "exchanged"),
)


def compare_strategies(given: CompareOptions, source: Source, texts: list[str]) -> None:
    """Score the strategies and show them, best first."""
    with progress("importing"):
        from placement.cli.commands.compare import command_of
        from placement.inputs.sources import cluster_for
        from placement.strategy_comparison import compare_strategies as compared
    _check(given, texts)
    target = cluster_for(source, given.cluster, given.communication, given.memory_fraction)
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
    found = dataclasses.replace(found, command=command_of(given))
    written = []
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
        written.append(f"results: {given.output}")
    if given.as_json:
        emit(found.to_json())
    else:
        emit_rich(*strategy_table(found), headline(found), *written, f"again: {found.command}")
    if found.best is None:
        from graphs.errors import InfeasibleError

        first = found.rows[0].result
        raise InfeasibleError(f"no strategy fits; {first.strategy}: {first.reason}")


def _check(given: CompareOptions, texts: list[str]) -> None:
    if not texts:
        raise typer.BadParameter("--strategies names no strategy; give for example dp8,'pp8 1f1b mb16',none.")
    for name, value in (("--clusters", given.clusters), ("--sweep", given.sweep), ("--methods", given.methods)):
        if value is not None:
            raise typer.BadParameter(
                f"--strategies compares on one cluster with the strategy's own placement; leave out {name}."
            )
    if given.objective != "latency":
        raise typer.BadParameter("--strategies gives step times; leave out --objective.")
    from graphs.transforms.strategy import Strategy

    for text in texts:
        Strategy.parse(text)  # before a graph is read for minutes


def headline(found: StrategyComparison) -> str:
    """The advice in one sentence."""
    best = found.best
    if best is None or best.result.answer is None:
        return "None of these strategies fits."
    speedup = found.speedup(best)
    time = format_seconds(best.result.answer.objective_s)
    if speedup is None:
        return f"{best.strategy} is the fastest of these, {time}; one device is not enough."
    if speedup <= 1:
        return f"None of these is faster than one device, {format_seconds(found.single_device_s or 0.0)}."
    return f"{best.strategy} is the fastest of these: {time}, {speedup:.2f}x one device."


def strategy_table(found: StrategyComparison) -> list[RenderableType]:
    """One row for each strategy, and one for one device; below, why some do not fit."""
    graph, cluster = found.graph, found.cluster
    head = (
        f"{show(graph.name)} on {show(cluster.name)}: {graph.n_ops:,} ops before rewriting, {cluster.n_devices} devices"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, len(_COLUMNS) - 1) else "right", no_wrap=number > 0)
    below: list[RenderableType] = []
    for number, row in enumerate(found.rows):
        style = "red" if not row.result.feasible else "bold green" if number == 0 else ""
        table.add_row(*_cells(found, row), style=style)
        if not row.result.feasible:
            below.append(Text(f" {row.strategy}  does not fit: {show_line(row.result.reason or '')}", style="red"))
    if found.single_device_s is None:
        below.append(Text(" one device  does not fit", style="dim"))
    else:
        table.add_row("one device", format_seconds(found.single_device_s), "1.00x", "1", *[""] * 8, style="dim")
    note = " bubble: share of the devices' time without computing; exposed: communication that computing waits for"
    below.append(Text(note, style="dim"))
    return [head, table, *below]


def _cells(found: StrategyComparison, row: StrategyRow) -> list[str]:
    result, given = row.result, row.figures
    speedup = found.speedup(row)
    time = "does not fit" if result.answer is None else format_seconds(result.answer.objective_s)
    cells = [row.strategy, time, "-" if speedup is None else f"{speedup:.2f}x"]
    if given is None:
        used = "" if result.answer is None else str(len(result.answer.used))
        peak = "" if result.answer is None else format_bytes(max(result.answer.peak_bytes.values(), default=0))
        return [*cells, used, peak, *[""] * 7]
    parts = given.peak_bytes
    return [
        *cells,
        str(given.devices),
        format_bytes(sum(parts.values())),
        *(format_bytes(parts[name]) for name in ("parameters", "gradients", "optimizer", "activations")),
        f"{100 * given.bubble:.1f} %",
        format_seconds(given.exposed_s),
        ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(given.exchanged_bytes.items())),
    ]
