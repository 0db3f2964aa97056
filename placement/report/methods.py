"""The methods of a comparison as HTML: rows of the table, and bars against the lower bound."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graphs.formatting import format_bytes, format_seconds
from placement.comparing.rows import NOTHING, format_percent
from placement.report.words import leaders, tied_with

if TYPE_CHECKING:
    from placement.comparing.methods import Comparison
    from placement.results.answer import Answer
    from placement.results.result import Result

LONGEST_BAR = 3.0  # bars stop at this many times the best; the number is still printed


def rows(comparison: Comparison) -> str:
    """A table row for every method, best first; ``data-v`` of a cell is what its column sorts by."""
    best = leaders(comparison)
    return "\n".join(
        _infeasible_row(result)
        if result.answer is None
        else _row(comparison, result, result.answer, any(result is r for r in best))
        for result in comparison.results
    )


def notes(comparison: Comparison) -> str:
    """Notes of the methods, each sentence once; "" where there is none."""
    by_note: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.note:
            by_note.setdefault(result.note, []).append(result.method)
    items = [
        f"<li>{', '.join(f'<code>{escape(method)}</code>' for method in methods)}: {escape(note)}</li>"
        for note, methods in by_note.items()
    ]
    return f'<ul class="notes">{"".join(items)}</ul>' if items else ""


def _row(comparison: Comparison, result: Result, answer: Answer, is_best: bool) -> str:
    speedup = comparison.speedup(result)
    peak = result.fullest_bytes or 0
    cells = [
        _cell(answer.objective_s, format_seconds(answer.objective_s)),
        _cell(speedup, f"{speedup:.2f}×" if speedup is not None else NOTHING),
        _cell(answer.gap, format_percent(answer.gap)),
        _cell(len(answer.used), str(len(answer.used))),
        _cell(peak, format_bytes(peak)),
        _cell(answer.bytes_moved, format_bytes(answer.bytes_moved) if answer.bytes_moved else NOTHING),
        _cell(result.solve_time_s, format_seconds(result.solve_time_s)),
    ]
    tags = '<span class="tag good">best</span>' if is_best else ""
    others = [r.method for r in tied_with(comparison, result) if r is not result]
    if others:
        tags += f'<span class="tag" title="as fast as {escape(", ".join(others))}">tie</span>'
    schedule = escape(comparison.ties.get(result.method, result.method))
    attributes = f'{" class=best" if is_best else ""} data-schedule="{schedule}"'
    return f"<tr{attributes}>{_name(result)}{tags}</th>{''.join(cells)}</tr>"


def _infeasible_row(result: Result) -> str:
    reason = f'<td colspan="6" class="reason">{escape(result.reason or "")}</td>'
    solve = _cell(result.solve_time_s, format_seconds(result.solve_time_s))
    return f'<tr class="infeasible">{_name(result)}<span class="tag bad">infeasible</span></th>{reason}{solve}</tr>'


def _name(result: Result) -> str:
    chosen = f" <small>({escape(result.chosen)})</small>" if result.chosen != result.method else ""
    return f'<th scope="row" data-v="{escape(result.method)}"><code>{escape(result.method)}</code>{chosen}'


def _cell(value: float | None, text: str) -> str:
    return f'<td data-v="{"" if value is None else repr(float(value))}">{escape(text)}</td>'


def bars(comparison: Comparison) -> str:
    """Objective of every feasible method, with the lower bound and one device as lines through all of them."""
    times = [(r, r.answer.objective_s) for r in comparison.results if r.answer is not None]
    if not times:
        return '<p class="empty">No method found a placement that fits.</p>'
    limit = min(max(t for _, t in times), LONGEST_BAR * times[0][1]) or 1.0
    best = leaders(comparison)
    listed = "".join(_bar(result, time_s, limit, any(result is r for r in best)) for result, time_s in times)
    lines = _line("bound", "lower bound", comparison.lower_bound_s / limit)
    if comparison.single_device_s is not None and comparison.single_device_s <= limit:
        lines += _line("single", "one device", comparison.single_device_s / limit)
    return f'<div class="plot">{listed}<div class="lines" aria-hidden="true">{lines}</div></div>'


def _bar(result: Result, time_s: float, limit_s: float, is_best: bool) -> str:
    kind = "bar" + (" best" if is_best else "") + (" cut" if time_s > limit_s else "")
    width = 100 * min(time_s / limit_s, 1.0)
    return (
        f'<div class="{kind}"><code>{escape(result.method)}</code>'
        f'<span class="track"><span style="width:{width:.2f}%"></span></span>'
        f"<span>{format_seconds(time_s)}</span></div>"
    )


def _line(kind: str, label: str, where: float) -> str:
    """A line at a fraction of the plot's width, its label kept inside the plot; the bound shades what is left of it."""
    side = " start" if where < 0.12 else " end" if where > 0.85 else ""
    shade = f'<span style="width:{100 * where:.2f}%"></span>' if kind == "bound" else ""
    at = f'style="left:{100 * where:.2f}%"'
    return f'{shade}<i class="{kind}" {at}></i><b class="{kind}{side}" {at}>{label}</b>'
