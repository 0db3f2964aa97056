"""One self-contained HTML page for a what-if: a table, and plots drawn here, so that it needs no script."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from graphs.formatting import format_seconds
from placement.report.curves import Across, Curve, plot
from placement.report.page import page, repeating
from placement.results.utilisation import format_rate
from placement.sizing.sweeps import BATCH, DEVICES
from placement.solving.methods import measure

if TYPE_CHECKING:
    from placement.comparing.cases import Case, WhatIf


def render_what_if(found: WhatIf) -> str:
    """The page as text."""
    graph = found.graph
    parts = {
        "graph": escape(graph.name),
        "among": escape(_among(found)),
        "verdict": escape(found.advice()),
        "cases": "Batches" if found.sweep == BATCH else "Numbers of devices" if found.sweep else "Clusters",
        "charts": _charts(found),
        "notes": escape(" ".join(_notes(found))),
        "table": found.table().html(),
        "facts": _facts(found),
    }
    return page("what_if.html", f"{graph.name}: what if", parts)


def _among(found: WhatIf) -> str:
    if not found.sweep:
        return f"{len(found.cases)} clusters"
    if found.sweep != DEVICES:
        return f"{found.cases[0].cluster.name}, {len(found.cases)} batches"
    name = found.cases[-1].cluster.name
    return f"more and more devices of {name.rpartition(' with ')[0] or name}"


def _notes(found: WhatIf) -> list[str]:
    """Sentences below the table."""
    priced = ["A step costs so much in the currency of the price."] * found.is_priced
    return [*priced, *(f"Step times are {basis}." for basis in found.bases()), *found.laws()]


def _charts(found: WhatIf) -> str:
    return {DEVICES: _sweep, BATCH: _batches}.get(found.sweep, _bars)(found)


def _batches(found: WhatIf) -> str:
    """Samples a second and step time over the batch."""
    across = Across("samples of the batch", [float(case.samples or 0) for case in found.cases])
    unfit = [float(case.samples or 0) for case in found.cases if case.objective_s is None]
    times = [(float(case.samples or 0), case.objective_s) for case in found.cases if case.objective_s]
    rates = Curve("samples/s", "best", [(n, n / time_s) for n, time_s in times])
    what = measure(found.objective)
    return (
        '<div class="two">'
        + _card("Samples a second over the batch", plot([rates], across, format_rate, unfit), "The best found.")
        + _card(
            f"{what.capitalize()} over the batch",
            plot([Curve(what, "best", times)], across, format_seconds, unfit),
            "The best found.",
        )
        + "</div>"
    )


def _lower_bound_s(case: Case) -> float | None:
    if case.best is not None:
        return case.best.lower_bound_s
    return None if case.comparison is None else case.comparison.lower_bound_s


def _single_s(case: Case) -> float | None:
    return None if case.comparison is None else case.comparison.single_device_s


def _sweep(found: WhatIf) -> str:
    """Time over devices with the bound below it, and speed-up over devices with the ideal above it."""
    what = measure(found.objective)
    counts = [float(case.devices) for case in found.cases]
    across = Across("number of devices", counts)
    times = Curve(what, "best", _points(found, lambda case: case.objective_s))
    bound = Curve("lower bound", "bound", _points(found, _lower_bound_s))
    single = Curve("one device", "single", _points(found, _single_s))
    unfit = [float(case.devices) for case in found.cases if case.objective_s is None]
    first = plot([single, bound, times], across, format_seconds, unfit)
    cards = [_card(f"{what.capitalize()} over devices", first, "No placement can be below the lower bound.")]
    speedups = _points(found, lambda case: case.speedup)
    if speedups:
        ideal = Curve("ideal", "single", [(n, n) for n in counts])
        efficiency = {case.devices: value for case in found.cases if (value := case.efficiency) is not None}
        labelled = Curve("speed-up", "best", speedups, [f"{efficiency[int(n)]:.0%}" for n, _ in speedups])
        second = plot([ideal, labelled], across, lambda value: f"{value:.3g}×", unfit)
        under = "Over the best single device. Beside each point its efficiency: speed-up for each device."
        cards.append(_card("Speed-up over devices", second, under))
    return f'<div class="two">{"".join(cards)}</div>'


def _points(found: WhatIf, value: Callable[[Case], float | None]) -> list[tuple[float, float]]:
    pairs = [(float(case.devices), value(case)) for case in found.cases]
    return [(n, y) for n, y in pairs if y is not None and math.isfinite(y)]


def _bars(found: WhatIf) -> str:
    """A bar for each cluster, its own lower bound as a mark."""
    longest = max((case.objective_s or 0.0 for case in found.cases), default=0.0) or 1.0
    fastest = min((case.objective_s for case in found.cases if case.objective_s is not None), default=None)
    listed = []
    for case in found.cases:
        bound_s = _lower_bound_s(case)
        width = 100 * (case.objective_s or 0.0) / longest
        mark = "" if bound_s is None else f'<i class="mark" style="left:{100 * min(1.0, bound_s / longest):.2f}%"></i>'
        text = "does not fit" if case.objective_s is None else format_seconds(case.objective_s)
        best = " best" if case.objective_s is not None and case.objective_s == fastest else ""
        listed.append(
            f'<div class="bar{best}"><code>{escape(found.label(case))}</code>'
            f'<span class="track"><span style="width:{width:.2f}%"></span>{mark}</span><span>{text}</span></div>'
        )
    plotted = f'<div class="plot clusters">{"".join(listed)}</div>'
    return _card(f"{measure(found.objective).capitalize()} on each cluster", plotted, "Marks: the lower bound of each.")


def _card(title: str, body: str, note: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}<p class="note">{escape(note)}</p></section>'


def _facts(found: WhatIf) -> str:
    """Versions, hashes and the command that repeat it."""
    versions = next((case.comparison.versions for case in found.cases if case.comparison is not None), {})
    facts = {
        "graph": f"{found.graph.name}: {found.graph.n_ops:,} ops, {found.graph.n_edges:,} edges",
        "graph hash": found.graph.hash,
        "objective": found.objective,
    }
    return repeating(found.command, facts, versions)
