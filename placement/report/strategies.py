"""One self-contained HTML page for a comparison of strategies; its drawings are made here and need no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from graphs.formatting import format_bytes, format_seconds
from placement.report.alternatives import alternatives_cards
from placement.report.page import page, repeating, typed
from placement.report.strategy_drawings import PARTS, memory_bars, timeline
from placement.results.advice import advice
from placement.results.utilisation import basis

if TYPE_CHECKING:
    from placement.comparing.strategies import StrategyComparison
    from placement.results.result import Result
    from placement.solving.strategy_row import StrategyRow

MOST_SECTIONS = 8  # strategies with a timeline of their own


def render_strategies(found: StrategyComparison, searched: Result | None = None, do_it: str = "") -> str:
    """The page as text.

    Args:
        searched: the result of the search that found the strategies, if there was one.
        do_it: the command that takes the answer.
    """
    graph, cluster = found.graph, found.cluster
    headline, *beside = [found.headline()] if searched is None else advice(searched).split("; ")
    drawn = [row for row in found.rows if row.applied is not None][:MOST_SECTIONS]
    parts = {
        "graph": escape(graph.name),
        "cluster": escape(cluster.name),
        "headline": escape(headline),
        "beside": escape("; ".join(beside)),
        "do_it": typed("do it", do_it),
        "basis": escape(f"Step times are {note}." if (note := basis(graph, cluster)) else ""),
        "table": found.table().html(),
        "notes": _notes(found, "" if searched is None else searched.why),
        "alternatives": "" if searched is None else alternatives_cards(searched),
        "sections": "\n".join(_section(found, row) for row in drawn),
        "facts": _facts(found),
    }
    return page("strategies.html", f"{graph.name} on {cluster.name}: strategies", parts)


def _notes(found: StrategyComparison, why: str) -> str:
    lines = [*found.reasons(), *([f"why: {why}"] if why else [])]
    items = [f"<li>{escape(line)}</li>" for line in lines]
    items += [
        f"<li><code>{escape(row.strategy.text)}</code>: {escape(said)}</li>"
        for row in found.rows
        for said in (row.result.note, f"nothing runs it: {row.result.not_run}" if row.result.not_run else "")
        if said
    ]
    return f'<ul class="notes">{"".join(items)}</ul>' if items else ""


def _section(found: StrategyComparison, row: StrategyRow) -> str:
    """One strategy: when each device does what, what fills its memory, and what is exchanged."""
    what, given = row.applied, row.figures
    if what is None or given is None:
        return ""
    time = "does not fit" if row.result.answer is None else format_seconds(row.result.answer.step_time_s)
    capacity = {d.name: d.usable_bytes for d in what.problem.cluster.devices}
    return (
        f'<section class="card strategy"><h2><code>{escape(row.strategy.text)}</code> <small>{time}, '
        f"{what.derived.graph.n_ops:,} ops</small></h2>"
        f"{timeline(what)}"
        '<div class="two"><div><h3>Memory at the peak</h3>'
        f"{memory_bars(given.memory, capacity)}</div>"
        f"<div><h3>Exchanged in a step</h3>{_exchanged(given.exchanged_bytes)}"
        f"<h3>Fullest device</h3>{_table((name, given.peak_bytes[name]) for name in PARTS)}</div></div></section>"
    )


def _exchanged(exchanged: Mapping[str, int]) -> str:
    if not exchanged:
        return '<p class="note">No collectives.</p>'
    return _table((kind.replace("_", "-"), size) for kind, size in sorted(exchanged.items()))


def _table(rows: Iterable[tuple[str, int]]) -> str:
    cells = (f'<tr><th scope="row">{escape(name)}</th><td>{format_bytes(size)}</td></tr>' for name, size in rows)
    return f"<table>{''.join(cells)}</table>"


def _facts(found: StrategyComparison) -> str:
    """Versions, hashes and the command that repeat it."""
    facts = {
        "graph": f"{found.graph.name}: {found.graph.n_ops:,} ops, {found.graph.n_edges:,} edges; before rewriting",
        "graph hash": found.graph.hash,
        "cluster": found.cluster.name,
        "cluster hash": found.cluster.hash,
        "seed": str(found.seed),
    }
    return repeating(found.command, facts, found.versions)
