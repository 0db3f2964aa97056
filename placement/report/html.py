"""One self-contained HTML page for a comparison: it opens offline and asks nothing of any network.

The header, the table and the bars are written here and in `placement.report.methods`; the charts are drawn in the page
by the scripts of ``assets/`` from the data of `placement.report.content`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from os import PathLike
from typing import TYPE_CHECKING

from env.cluster import UNLIMITED_BYTES
from env.problem import Problem, scope
from graphs.disk import write_atomically
from graphs.formatting import format_bytes, format_count, format_seconds
from placement.comparing.rows import NO_GAP, format_percent
from placement.report.alternatives import alternatives_cards
from placement.report.content import drawn_of, page_data, shown_schedules
from placement.report.methods import bars, notes, rows
from placement.report.page import asset, page, repeating
from placement.report.words import headline, leaders
from placement.results.advice import advice
from placement.results.answer import relative_gap
from placement.solving.methods import measure

if TYPE_CHECKING:
    from placement.comparing.methods import Comparison

SCRIPTS = ("base.js", "methods.js", "timeline.js", "pointing.js", "load.js", "graph.js")


def write_html(comparison: Comparison, path: str | PathLike[str], command: str | None = None) -> None:
    """Write the report of a comparison.

    Args:
        command: the command line that repeats it; the comparison's own where None.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    write_atomically(path, render_html(comparison, command))


def render_html(comparison: Comparison, command: str | None = None) -> str:
    """The page as text."""
    graph, cluster = comparison.graph, comparison.cluster
    problem = Problem(graph, cluster, comparison.objective)
    shown = shown_schedules(problem, comparison)
    drawn = drawn_of(problem, shown)
    left_out = drawn.left_out(graph, [one.schedule for one in shown])
    data = page_data(problem, shown, drawn, comparison.lower_bound_s)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "graph": escape(graph.name),
        "cluster": escape(cluster.name),
        "headline": escape(headline(comparison) if comparison.overall is None else advice(comparison.overall)),
        "measure": measure(comparison.objective),
        "Measure": measure(comparison.objective).capitalize(),
        "tiles": _tiles(comparison),
        "rows": rows(comparison),
        "alternatives": "" if comparison.overall is None else alternatives_cards(comparison.overall),
        "notes": notes(comparison),
        "bars": bars(comparison),
        "facts": _facts(comparison, comparison.command if command is None else command, left_out),
        "data": text.replace("<", "\\u003c"),  # so that no name can end the script element
    }
    script = "\n".join(asset(name) for name in SCRIPTS)
    return page("page.html", f"{graph.name} on {cluster.name}", parts, script)


def _tiles(comparison: Comparison) -> str:
    """The figures to remember, label, value and note."""
    graph, best, overall = comparison.graph, comparison.best, comparison.overall
    who = ""
    if overall is not None and not overall.strategy.is_none:
        best, who = overall, overall.strategy.text
    elif best is not None:
        n_others = len(leaders(comparison)) - 1
        who = best.method + (f" and {n_others} other{'s' if n_others > 1 else ''}" if n_others else "")
    answer = None if best is None else best.answer
    bound_s, among = comparison.lower_bound_s, scope(comparison.objective)
    if overall is not None:
        bound_s, among = overall.lower_bound_s, overall.scope
    tiles = []
    if best is not None and answer is not None:
        tiles.append((f"best {measure(comparison.objective)}", format_seconds(answer.objective_s), who))
        speedup = comparison.speedup(best)
        if speedup is not None and comparison.single_device_s is not None:
            tiles.append(("speed-up", f"{speedup:.2f}×", f"one device: {format_seconds(comparison.single_device_s)}"))
    what = "placement" if overall is None else "strategy or placement"
    tiles.append(("lower bound", format_seconds(bound_s), f"no {what} can be faster"))
    if answer is not None:
        gap = relative_gap(answer.objective_s, bound_s)
        distance = "at most so far from optimal" if gap > NO_GAP else "proven optimal"
        tiles.append(("gap", format_percent(gap), f"{distance} {among}"))
    tiles.append(("graph", f"{graph.n_ops:,} ops", f"{graph.n_edges:,} edges"))
    return "\n".join(
        f'<div class="tile"><dt>{label}</dt><dd>{escape(value)}</dd><dd class="under">{escape(note)}</dd></div>'
        for label, value, note in tiles
    )


def _facts(comparison: Comparison, command: str, left_out: str) -> str:
    """Versions, hashes and the command that repeat the comparison, and what the page does not draw one by one."""
    graph, cluster = comparison.graph, comparison.cluster
    memory = dict.fromkeys(d.usable_bytes for d in cluster.devices if d.memory_bytes < UNLIMITED_BYTES)
    kept = format_bytes(int(graph.kept_bytes.sum()))
    sizes = f"{graph.n_ops:,} ops, {graph.n_tensors:,} tensors, {graph.n_edges:,} edges"
    facts = {
        "graph": f"{graph.name}: {sizes}, {format_count(graph.flops.sum())}FLOP, {kept} kept all step",
        "graph hash": graph.hash,
        "cluster": f"{cluster.name}: {_counted([d.model or d.kind for d in cluster.devices])}",
        "about it": cluster.summary,
        "its figures": cluster.source,
        "cluster hash": cluster.hash,
        "memory": f"{' or '.join(map(format_bytes, memory))} per device" if memory else "not modelled",
        "drawn": left_out,
        "objective": comparison.objective,
        "seed": str(comparison.seed),
    }
    return repeating(command, facts, comparison.versions, copies=True)


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
