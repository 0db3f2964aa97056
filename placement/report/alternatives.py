"""Findings of a search over strategies, as HTML: the best of each family, a map of time against memory, the drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from graphs.formatting import format_bytes, format_seconds
from placement.report.strategy_plan import plan_drawing
from placement.results.alternatives import Alternative, best_of_each, front, single_s
from placement.results.result import Result
from placement.results.strategy_words import family_in_words, in_words

NOTHING = "–"
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 18, 40
_MARGIN = 1.15  # of a logarithmic axis beyond the outermost points


def alternatives_cards(result: Result) -> str:
    """The cards of a page; nothing where strategies were not searched."""
    if not result.alternatives:
        return ""
    table = (
        f'<section class="card" id="alternatives"><h2>Best of each family</h2>'
        f'<div class="scroll">{_table(result)}</div><p class="note">'
        f"Bold: no other one beats it both in time and in memory. No strategy takes less than "
        f"{format_seconds(result.lower_bound_s)}. {escape(result.note)}</p></section>"
    )
    picture = (
        '<section class="card" id="time-and-memory"><h2>Time against memory</h2>'
        f"{time_and_memory(result.alternatives)}{_front(result.alternatives)}"
        '<p class="note">The line joins those that no other one beats in both; their numbers are in the list. '
        "Both axes are logarithmic.</p></section>"
    )
    drawn = plan_drawing(result)
    return f'<div class="two uneven">{table}{picture}</div>{drawn}'


def _table(result: Result) -> str:
    heads = ("", "strategy", "step time", "vs one device", "peak memory")
    kinds = (' class="text"' if name == "strategy" else "" for name in heads)
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    on_front, one_s = set(front(result.alternatives)), single_s(result.alternatives)
    rows = "".join(_row(one, one_s, one in on_front) for one in best_of_each(result.alternatives))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(one: Alternative, one_s: float | None, is_on_front: bool) -> str:
    is_as_it_is = one.strategy.is_none
    code = "" if is_as_it_is else f"<code>{escape(one.strategy.text)}</code>"
    words = "" if is_as_it_is else f' title="{escape(in_words(one.strategy))}"'
    head = f'<th scope="row"{words}>{escape(family_in_words(one.name))}</th><td class="text">{code}</td>'
    if one.step_time_s is None:
        return f'<tr class="infeasible">{head}<td>does not fit</td><td></td><td></td></tr>'
    speedup = one.speedup(one_s)
    cells = [
        format_seconds(one.step_time_s),
        NOTHING if speedup is None else f"{speedup:.2f}×",
        format_bytes(one.peak_bytes or 0),
    ]
    kind = ' class="best"' if is_on_front else ""
    return f"<tr{kind}>{head}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


# -- time against memory ----------------------------------------------------------------------------------------


def time_and_memory(found: Sequence[Alternative]) -> str:
    """Every alternative that fits as a point, and the front as a line: an SVG."""
    points = [(one, one.peak_bytes or 1, one.step_time_s or 1e-12) for one in found if one.step_time_s is not None]
    if not points:
        return '<p class="empty">Nothing fits.</p>'
    at_x = _axis([x for _, x, _ in points], LEFT, WIDTH - RIGHT)
    at_y = _axis([y for _, _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [*_ticks([x for _, x, _ in points], at_x, format_bytes, is_below=True)]
    parts += _ticks([y for _, _, y in points], at_y, format_seconds, is_below=False)
    numbers = {one: number for number, one in enumerate(front(found), 1)}
    line = [f"{at_x(x):.1f} {at_y(y):.1f}" for one, x, y in points if one in numbers]
    parts.append(f'<path class="best" d="M{"L".join(line)}"/>')
    for one, x, y in sorted(points, key=lambda point: point[0] in numbers):  # numbers are not to be covered
        kind, radius = ("best", 8) if one in numbers else ("other", 4)
        place = f'cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{radius}"'
        parts.append(f'<circle class="{kind}" {place}><title>{escape(_said(one))}</title></circle>')
        if one in numbers:
            parts.append(f'<text class="number" x="{at_x(x):.1f}" y="{at_y(y) + 4:.1f}">{numbers[one]}</text>')
    label = 'role="img" aria-label="step time of strategies over memory of the fullest device"'
    return f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(parts)}</svg>'


def _front(found: Sequence[Alternative]) -> str:
    """Those on the front as a list, numbered as in the drawing."""
    return f'<ol class="front">{"".join(f"<li>{escape(_said(one))}</li>" for one in front(found))}</ol>'


def _said(one: Alternative) -> str:
    name = family_in_words(one.name) if one.strategy.is_none else one.strategy.text
    return f"{name}: {format_seconds(one.step_time_s or 0)}, {format_bytes(one.peak_bytes or 0)}"


def _axis(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    """A logarithmic axis that holds these values."""
    low, high = math.log(min(values) / _MARGIN), math.log(max(values) * _MARGIN)
    return lambda value: begin + (math.log(value) - low) / (high - low) * (end - begin)


def _ticks(
    values: Sequence[float], at: Callable[[float], float], show: Callable[[float], str], is_below: bool
) -> list[str]:
    """Lines at the least and the largest value and, evenly between them, two more."""
    least, ratio = min(values), max(values) / min(values)
    parts = []
    for k in range(4) if ratio > _MARGIN else (0,):
        value = least * ratio ** (k / 3)
        if is_below:
            parts.append(f'<path class="grid" d="M{at(value):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{at(value):.1f}" y="{HEIGHT - 16}">{escape(show(value))}</text>')
        else:
            parts.append(f'<path class="grid" d="M{LEFT} {at(value):.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="left" x="{LEFT - 8}" y="{at(value) + 4:.1f}">{escape(show(value))}</text>')
    return parts
