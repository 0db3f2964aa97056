"""Curves over an axis, numbers of devices or time, as SVG; colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 26, 34
MOST_TICKS = 16
_Place = Callable[[float], float]
_Words = Callable[[float], str]


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
        parts.append(f'<path class="grid" d="M{LEFT} {at_y(y):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="left" x="{LEFT - 8}" y="{at_y(y) + 4:.1f}">{escape(show(y))}</text>')
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
    names = ", ".join(curve.name for curve in curves)
    label = f'role="img" aria-label="{escape(names)} over {escape(across.name)}"'
    return f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(parts)}</svg>'


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
