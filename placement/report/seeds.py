"""One self-contained HTML page for methods under several seeds: their table, and intervals of their means."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graphs.formatting import format_seconds
from placement.report.bar_chart import MeanBar, bar_chart
from placement.report.page import page, repeating
from placement.solving.methods import measure

if TYPE_CHECKING:
    from placement.comparing.seeds import SeedComparison


def render_seeds(found: SeedComparison) -> str:
    """The page as text."""
    best, what = found.rows[0], measure(found.objective)
    least = "" if best.mean_s is None else f"{best.method} has the least mean {what}: {format_seconds(best.mean_s)}"
    fitting = [row for row in found.rows if row.mean_s is not None]
    bars = [
        MeanBar(row.method, row.mean_s or 0.0, row.interval_s or 0.0, (row.least_s or 0.0, row.most_s or 0.0))
        for row in fitting
    ]
    drawn = bar_chart(bars, f"{what} of methods over seeds")
    facts = {"seeds": ", ".join(map(str, found.seeds)), "graph": found.graph.hash, "cluster": found.cluster.hash}
    parts = {
        "graph": escape(found.graph.name),
        "among": escape(f"{found.cluster.name}, {len(found.seeds)} seeds"),
        "verdict": escape(least),
        "cases": "Methods",
        "charts": f'<section class="card"><h2>{escape(what.capitalize())} over the seeds</h2>{drawn}'
        '<p class="note">Bar: mean; thick: its 95 % interval (t distribution); line: least to most.</p></section>',
        "notes": "Spread: standard deviation over the seeds; 95 %: half of the interval of the mean.",
        "table": found.table().html(),
        "facts": repeating(found.command, facts, found.versions),
    }
    return page("what_if.html", f"{found.graph.name}: seeds", parts)
