"""One self-contained HTML page for methods of distributed optimisation: loss against time, and against bytes sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from html import escape
from os import PathLike
from typing import TYPE_CHECKING

from graphs.disk import write_atomically
from graphs.formatting import counted, format_bytes, format_seconds
from placement.report.curves import Across, Curve, evenly, plot
from placement.report.page import page, repeating

if TYPE_CHECKING:
    from placement.fit_sweep import FitSweep
    from placement.fitting import FitComparison
    from placement.replicas.fit_result import CurvePoint, FitRun
    from placement.sizing.sweeps import Sweep

COLOURS = 8  # of the style sheet
_MOST_POINTS = 200  # of a curve: more are closer than a point is wide


def write_fits(found: FitComparison, path: str | PathLike[str]) -> None:
    """Write the report of a comparison of methods.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    write_atomically(path, render_fits(found))


def render_fits(found: FitComparison) -> str:
    """The page as text."""
    parts = {
        "graph": escape(found.graph.name),
        "cluster": escape(found.cluster.name),
        "advice": escape(found.advice()),
        "charts": "".join(
            [
                _chart(found, "Loss over time", "time", lambda point: point.seconds, format_seconds),
                _chart(found, "Loss over bytes sent", "bytes sent", lambda point: point.bytes, format_bytes),
            ]
        ),
        "rows": "\n".join(_row(found, run) for run in found.runs),
        "notes": _notes(found),
        "facts": _facts(found),
    }
    return page("fits.html", f"{found.graph.name}: methods on {found.cluster.name}", parts)


def write_fit_sweep(found: FitSweep, path: str | PathLike[str]) -> None:
    """Write the report of a sweep.

    Raises:
        OSError: as `write_fits`.
    """
    write_atomically(path, render_fit_sweep(found))


def render_fit_sweep(found: FitSweep) -> str:
    """The page as text."""
    first = found.cases[0]
    pairs = [(method, size, case) for method in found.methods for size, case in _cases(found)]
    parts = {
        "among": found.sweep.kind,
        "graph": escape(first.graph.name),
        "cluster": escape(first.cluster.name),
        "advice": escape(found.advice()),
        "charts": _over_sizes(found, "Time to the loss", lambda run: run.seconds, format_seconds)
        + _over_sizes(found, "Updates to the loss", lambda run: run.updates, lambda count: f"{count:.3g}"),
        "rows": "\n".join(_row(case, case.runs[found.methods.index(method)], size) for method, size, case in pairs),
        "notes": "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in found.sentences()),
        "facts": _facts(replace(first, command=found.command), found.sweep),
    }
    return page("fit_sweep.html", f"{first.graph.name}: methods over {found.sweep.kind}", parts)


def _cases(found: FitSweep) -> list[tuple[int, FitComparison]]:
    return list(zip(found.sweep.sizes, found.cases, strict=True))


def _over_sizes(found: FitSweep, title: str, value: Callable[[FitRun], float], show: Callable[[float], str]) -> str:
    """A curve for each method, of the sizes at which it reaches the loss."""
    curves = [
        Curve(method, f"c{k % COLOURS}", [(float(n), value(run)) for n, run in found.runs(method) if run.reached])
        for k, method in enumerate(found.methods)
    ]
    drawn = plot(curves, Across(found.sweep.kind, [float(size) for size in found.sweep.sizes]), show)
    note = f"Over {found.sweep.kind}; sizes at which a method does not reach it are left out."
    return f'<section class="card"><h2>{escape(title)}</h2>{drawn}<p class="note">{escape(note)}</p></section>'


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
    return f'<section class="card"><h2>{escape(title)}</h2>{drawn}<p class="note">{escape(note)}</p></section>'


def _thinned(run: FitRun) -> list[CurvePoint]:
    """Points that can be told apart, the first and the last among them; none whose loss is no number."""
    points = [point for point in run.points if math.isfinite(point.loss)]
    every = -(-len(points) // _MOST_POINTS)
    return [point for k, point in enumerate(points) if k % every == 0 or k == len(points) - 1]


def _row(found: FitComparison, run: FitRun, size: int | None = None) -> str:
    cells = [
        *([] if size is None else [str(size)]),
        format_seconds(run.seconds),
        f"{run.updates:,}",
        f"{run.updates / run.seconds:.3g}" if run.seconds else "–",
        format_bytes(run.bytes),
        f"{run.loss:.4g}",
        "–" if found.until is None else "yes" if run.reached else "no",
        f"{run.staleness:.3g}",
    ]
    head = f'<th scope="row"><code>{escape(run.method)}</code></th>'
    return f"<tr>{head}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _notes(found: FitComparison) -> str:
    said = [f"<li><code>{escape(run.method)}</code>: {escape(run.note)}</li>" for run in found.runs if run.note]
    return f'<ul class="notes">{"".join(said)}</ul>' if said else ""


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
