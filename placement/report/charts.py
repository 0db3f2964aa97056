"""Charts as SVG: bars by name, curves over an axis, points by time and memory; colours come from the style sheet.

Drawings are narrow, so that their text can be read on a phone, and grow with the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from graphs.formatting import format_bytes, format_seconds

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 26, 34
MOST_TICKS = 12
LONGEST_BAR = 3.0  # bars stop at this many times the best; the number is still printed
_NAMES, _VALUES, _ROW, _ABOVE = 126, 84, 24, 22  # of bars
_MARGIN = 1.15  # of a logarithmic axis beyond the outermost points
_Place = Callable[[float], float]
_Words = Callable[[float], str]


def svg(parts: Sequence[str], label: str, height: float = HEIGHT, kind: str = "curves", width: float = WIDTH) -> str:
    """A drawing of its parts; `label` says what it shows."""
    head = f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def shortened(text: str, room: int) -> str:
    """The text, or its begin and end where it has more characters than there is room for."""
    half = (max(room, 4) - 1) // 2
    return text if len(text) <= max(room, 4) else f"{text[:half]}…{text[-half:]}"


# -- bars -------------------------------------------------------------------------------------------------------


class MeanBar(NamedTuple):
    """One bar.

    Attributes:
        name: beside it.
        seconds: its length; None where nothing fits.
        half_s: half of an interval around that; 0 for none.
        extremes_s: the least and the most; None for none.
        bound_s: a mark of its own; None for none.
    """

    name: str
    seconds: float | None
    half_s: float = 0.0
    extremes_s: tuple[float, float] | None = None
    bound_s: float | None = None


def bar_chart(bars: Sequence[MeanBar], label: str, bound_s: float | None = None, single_s: float | None = None) -> str:
    """Bars from 0, the shortest as the best.

    Args:
        bound_s: the lower bound of all, a line; what is left of it is shaded.
        single_s: one device, a line where it is not longer than the bars.
    """
    times = [bar.seconds for bar in bars if bar.seconds is not None]
    if not times:
        return '<p class="empty">Nothing fits.</p>'
    ends = [max(bar.seconds or 0.0, *(bar.extremes_s or (0.0,))) for bar in bars]
    limit = min(max(ends), max(LONGEST_BAR * min(times), bound_s or 0.0)) or 1.0
    bottom = _ABOVE + _ROW * len(bars)

    def at_x(seconds: float) -> float:
        return _NAMES + min(max(seconds, 0.0) / limit, 1.0) * (WIDTH - _NAMES - _VALUES)

    parts = []
    if bound_s is not None:
        size = f'width="{at_x(bound_s) - _NAMES:.1f}" height="{bottom - _ABOVE}"'
        parts.append(f'<rect class="unfit" x="{_NAMES}" y="{_ABOVE}" {size}/>')
    lines = [("bound", "lower bound", bound_s, 14), ("single", "one device", single_s, bottom + 14)]
    for kind, name, value, y in lines:
        if value is not None and value <= limit:
            x = at_x(value)
            anchor = "start" if x < _NAMES + 40 else "middle"
            parts.append(f'<path class="{kind}" d="M{x:.1f} {_ABOVE - 4}V{bottom + 2}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y}" style="text-anchor:{anchor}">{name}</text>')
    for number, (bar, end_s) in enumerate(zip(bars, ends, strict=True)):
        parts += _bar(bar, _ABOVE + _ROW * (number + 0.5), at_x, end_s > limit, bar.seconds == min(times))
    return svg(parts, label, bottom + 20)


def _bar(bar: MeanBar, y: float, at_x: _Place, is_cut: bool, is_best: bool) -> list[str]:
    name = f'<text class="left" x="{_NAMES - 8}" y="{y + 4:g}">{escape(shortened(bar.name, 18))}</text>'
    parts = [f"<g><title>{escape(bar.name)}</title>{name}</g>"]
    if bar.seconds is None:
        return [*parts, f'<text class="beside" x="{_NAMES + 4}" y="{y + 4:g}">does not fit</text>']
    kind, told = "best" if is_best else "other", format_seconds(bar.seconds)
    told += f" ± {format_seconds(bar.half_s)}" if bar.half_s else ""
    box = f'x="{_NAMES}" y="{y - 7:g}" width="{max(at_x(bar.seconds) - _NAMES, 1.0):.1f}" height="14"'
    parts.append(f'<rect class="{kind}" {box}><title>{escape(bar.name)}: {escape(told)}</title></rect>')
    if bar.extremes_s:
        low, high = map(at_x, bar.extremes_s)
        parts.append(f'<path class="bound" d="M{low:.1f} {y:g}H{high:.1f}"/>')
    if bar.half_s:
        low, high = at_x(bar.seconds - bar.half_s), at_x(bar.seconds + bar.half_s)
        parts.append(f'<rect class="unfit" x="{low:.1f}" y="{y - 4:g}" width="{high - low:.1f}" height="8"/>')
    if bar.bound_s is not None:
        parts.append(f'<path class="bound" d="M{at_x(bar.bound_s):.1f} {y - 9:g}v18"/>')
    end = max(at_x(bar.seconds), at_x(bar.extremes_s[1]) if bar.extremes_s else 0.0)
    return [
        *parts,
        f'<text class="beside" x="{end + 6:.1f}" y="{y + 4:g}">{"› " if is_cut else ""}{escape(told)}</text>',
    ]


# -- curves -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in ascending x under a name, drawn as the style sheet says for `kind`; labels beside the points."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Across:
    """The horizontal axis.

    Attributes:
        name: what it is.
        ticks: where it has numbers, ascending; curves lie between the first and the last.
        show: a number of it as text.
        margin: what is left free on both sides.
    """

    name: str
    ticks: Sequence[float]
    show: Callable[[float], str] = "{:g}".format
    margin: float = 0.5


def evenly(last: float, name: str, show: Callable[[float], str]) -> Across:
    """An axis from 0 to what is at most `last`, in equal parts."""
    return Across(name, [last * k / 4 for k in range(5)], show, margin=last * 0.02)


def plot(curves: Sequence[Curve], across: Across, show: Callable[[float], str], unfit: Sequence[float] = ()) -> str:
    """An SVG of curves, from 0 up; the values of x where nothing fits are shaded."""
    xs = across.ticks
    top = max((y for curve in curves for _, y in curve.points), default=0.0) * 1.08 or 1.0
    low, high = min(xs) - across.margin, max(xs) + across.margin

    def at_x(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [_shaded(at_x(x - 0.5), at_x(x + 0.5)) for x in unfit]
    for k in range(5):
        y = top * k / 4 / 1.08
        parts += _level(at_y(y), show(y))
    every = -(-len(xs) // MOST_TICKS)
    parts += [f'<text x="{at_x(x):.1f}" y="{HEIGHT - 14}">{escape(across.show(x))}</text>' for x in xs[::every]]
    parts += [_line(curve, (at_x, at_y), (across.show, show)) for curve in curves]
    place = LEFT
    for curve in curves:
        if curve.points:
            parts.append(f'<path class="{curve.kind}" d="M{place} 12h18"/>')
            parts.append(f'<text class="key" x="{place + 24}" y="16">{escape(curve.name)}</text>')
            place += 40 + 7 * len(curve.name)
    if unfit:
        parts.append(f'<text class="key" x="{place}" y="16">shaded: does not fit</text>')
    return svg(parts, f"{', '.join(curve.name for curve in curves)} over {across.name}")


def _level(y: float, text: str) -> list[str]:
    line = f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    return [line, f'<text class="left" x="{LEFT - 8}" y="{y + 4:.1f}">{escape(text)}</text>']


def _shaded(left: float, right: float) -> str:
    size = f'width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
    return f'<rect class="unfit" x="{left:.1f}" y="{TOP}" {size}><title>does not fit</title></rect>'


def _line(curve: Curve, at: tuple[_Place, _Place], show: tuple[_Words, _Words]) -> str:
    """A curve with its points, by the place and the words of a number of each axis."""
    (at_x, at_y), (show_x, show_y) = at, show
    if not curve.points:
        return ""
    path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in curve.points)
    dots = [
        f'<circle class="{curve.kind}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3.5">'
        f"<title>{escape(curve.name)} with {escape(show_x(x))}: {escape(show_y(y))}</title></circle>"
        for x, y in curve.points
    ]
    texts = [
        f'<text class="beside" x="{at_x(x) + 7:.1f}" y="{at_y(y) + 15:.1f}">{escape(text)}</text>'
        for (x, y), text in zip(curve.points, curve.labels, strict=False)
    ]
    return f'<path class="{curve.kind}" d="M{path}"/>{"".join(dots)}{"".join(texts)}'


# -- time against memory ----------------------------------------------------------------------------------------


class MapPoint(NamedTuple):
    """A way to run a model; its number, from 1, if no other one beats it in both time and memory, else 0."""

    said: str
    seconds: float
    size_bytes: int
    number: int = 0


def time_and_memory(points: Sequence[MapPoint]) -> str:
    """Time over memory of the fullest device, both logarithmic; a line joins the points with numbers."""
    if not points:
        return '<p class="empty">Nothing fits.</p>'
    sizes, times = [float(p.size_bytes or 1) for p in points], [p.seconds or 1e-12 for p in points]
    at_x, at_y = _axis(sizes, LEFT, WIDTH - RIGHT), _axis(times, HEIGHT - BOTTOM, TOP)
    parts = []
    for x in _between(sizes):
        parts.append(f'<path class="grid" d="M{at_x(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - 14}">{escape(format_bytes(x))}</text>')
    for y in _between(times):
        parts += _level(at_y(y), format_seconds(y))
    places = sorted(zip(points, map(at_x, sizes), map(at_y, times), strict=True), key=lambda each: each[0].number > 0)
    line = sorted((point.number, f"{x:.1f} {y:.1f}") for point, x, y in places if point.number)
    parts.append(f'<path class="best" d="M{"L".join(place for _, place in line)}"/>' if line else "")
    for point, x, y in places:  # numbers are not to be covered
        kind, radius = ("best", 8) if point.number else ("other", 4)
        title = f"<title>{escape(point.said)}</title>"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>')
        if point.number:
            parts.append(f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}">{point.number}</text>')
    return svg(parts, "step time of strategies over memory of the fullest device")


def _axis(values: Sequence[float], begin: float, end: float) -> _Place:
    """A logarithmic axis that holds these values."""
    low, high = math.log(min(values) / _MARGIN), math.log(max(values) * _MARGIN)
    return lambda value: begin + (math.log(value) - low) / (high - low) * (end - begin)


def _between(values: Sequence[float]) -> list[float]:
    """The least and the largest value and, evenly between them, two more; one where they are near."""
    least, ratio = min(values), max(values) / min(values)
    return [least * ratio ** (k / 3) for k in range(4)] if ratio > _MARGIN else [least]
