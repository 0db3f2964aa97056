"""One self-contained HTML page for methods of distributed optimisation: losses over time, or times over sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from html import escape
from os import PathLike
from typing import TYPE_CHECKING

from graphs.disk import write_atomically
from graphs.formatting import counted, format_bytes, format_seconds
from placement.fitting.sweep import FitSweep
from placement.report.charts import Across, Curve, evenly, plot
from placement.report.page import card, page, repeating

if TYPE_CHECKING:
    from placement.fitting.comparison import FitComparison
    from placement.fitting.log import CurvePoint, FitRun
    from placement.sizing.sweeps import Sweep

COLOURS = 8  # of the style sheet
_MOST_POINTS = 200  # of a curve: more are closer than a point is wide
_NOTE = (
    "Loss: over the held-out samples; staleness: updates between the reading of weights and the update by their "
    "gradient, in the mean."
)


def write_fits(found: FitComparison | FitSweep, path: str | PathLike[str]) -> None:
    """Write the report of a comparison of methods, or of a sweep of them.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    write_atomically(path, render_fits(found))


def render_fits(found: FitComparison | FitSweep) -> str:
    """The page as text."""
    sweep = found.sweep if isinstance(found, FitSweep) else None
    one = replace(found.cases[0], command=found.command) if isinstance(found, FitSweep) else found
    charts = _charts_over_sizes(found) if isinstance(found, FitSweep) else _charts_of_losses(found)
    parts = {
        "kind": f"fit{'' if sweep is None else f' over {sweep.kind}'}",
        "headline": escape(found.advice()),
        "picture": charts[0],
        "rows": "Methods",
        "table": found.table().html(),
        "notes": _NOTE,
        "said": "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in found.sentences()),
        "after": "".join(charts[1:]),
        "facts": _facts(one, sweep),
    }
    return page(one.graph.name, one.cluster.name, parts)


def _charts_of_losses(found: FitComparison) -> tuple[str, str]:
    over_time = _chart(found, "Loss over time", "time", lambda point: point.seconds, format_seconds)
    return over_time, _chart(found, "Loss over bytes sent", "bytes sent", lambda point: point.bytes, format_bytes)


def _charts_over_sizes(found: FitSweep) -> tuple[str, str]:
    times = _over_sizes(found, "Time to the loss", lambda run: run.seconds, format_seconds)
    return times, _over_sizes(found, "Updates to the loss", lambda run: run.updates, lambda count: f"{count:.3g}")


def _over_sizes(found: FitSweep, title: str, value: Callable[[FitRun], float], show: Callable[[float], str]) -> str:
    """A curve for each method, of the sizes at which it reaches the loss."""
    curves = [
        Curve(method, f"c{k % COLOURS}", [(float(n), value(run)) for n, run in found.runs(method) if run.reached])
        for k, method in enumerate(found.methods)
    ]
    drawn = plot(curves, Across(found.sweep.kind, [float(size) for size in found.sweep.sizes]), show)
    note = f"Over {found.sweep.kind}; sizes at which a method does not reach it are left out."
    return card(title, drawn, note)


def _chart(
    found: FitComparison, title: str, name: str, at: Callable[[CurvePoint], float], show: Callable[[float], str]
) -> str:
    last = max((at(point) for run in found.runs for point in run.points), default=0.0) or 1.0
    curves = [
        Curve(run.method, f"c{number % COLOURS}", [(at(point), point.loss) for point in _thinned(run)])
        for number, run in enumerate(found.runs)
    ]
    if found.until is not None:
        curves.append(Curve(f"loss {found.until:g}", "single", [(0.0, found.until), (last, found.until)]))
    drawn = plot(curves, evenly(last, name, show), lambda loss: f"{loss:.3g}")
    note = (
        "Every worker's bytes together."
        if name != "time"
        else f"Seconds of {counted(found.workers, 'worker')} together."
    )
    return card(title, drawn, note)


def _thinned(run: FitRun) -> list[CurvePoint]:
    """Points that can be told apart, the first and the last among them; none whose loss is no number."""
    points = [point for point in run.points if math.isfinite(point.loss)]
    every = -(-len(points) // _MOST_POINTS)
    return [point for k, point in enumerate(points) if k % every == 0 or k == len(points) - 1]


def _facts(found: FitComparison, sweep: Sweep | None = None) -> str:
    """Settings, versions, hashes and the command that repeat it; of a sweep, its sizes in the place of one."""
    sizes = {"workers": str(found.workers), "batch": counted(found.batch, "sample")}
    if sweep is not None:
        sizes[sweep.kind] = f"{', '.join(map(str, sweep.sizes))}{' samples' if sweep.kind == 'batch' else ''}"
    facts = {
        "graph": f"{found.graph.name}: {found.graph.n_ops:,} ops, the step of one worker",
        "graph hash": found.graph.hash,
        "cluster": found.cluster.name,
        "about it": found.cluster.summary,
        "cluster hash": found.cluster.hash,
        "workers": sizes["workers"],
        "batch of each": sizes["batch"],
        "learning rate": f"{found.learning_rate:g}, of methods that name none",
        "strategy": found.strategy,
        "stragglers": found.stragglers,
        "seed": str(found.seed),
        "time": "of the wall, in real processes" if found.is_real else "simulated",
    }
    return repeating(found.command, facts, found.versions)
