"""`bar_chart`: a bar for each name, with an interval and extremes if it has some, as SVG that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from graphs.formatting import format_seconds

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _BOTTOM = 720, 200, 90, 24, 12, 30


class MeanBar(NamedTuple):
    """One bar.

    Attributes:
        name: beside it.
        seconds: its length.
        half_s: half of an interval around that; 0 for none.
        extremes_s: the least and the most; None for none.
    """

    name: str
    seconds: float
    half_s: float = 0.0
    extremes_s: tuple[float, float] | None = None


def bar_chart(bars: Sequence[MeanBar], label: str) -> str:
    """An SVG of bars from 0, the first one as the best."""
    ends = [max(bar.seconds, *(bar.extremes_s or ())) if bar.extremes_s else bar.seconds for bar in bars]
    most, height = max(ends, default=0.0) * 1.02 or 1.0, _TOP + _ROW * len(bars) + _BOTTOM

    def at_x(seconds: float) -> float:
        return _LEFT + min(max(seconds, 0.0) / most, 1.0) * (_WIDTH - _LEFT - _RIGHT)

    parts = []
    for k in range(5):
        x, bottom = at_x(most * k / 4), height - _BOTTOM
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}">{escape(format_seconds(most * k / 4))}</text>')
    for number, (bar, end_s) in enumerate(zip(bars, ends, strict=True)):
        y, kind = _TOP + _ROW * (number + 0.5), "best" if number == 0 else "bound"
        parts.append(f'<text class="left" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(bar.name)}</text>')
        parts.append(_box(at_x(0.0), at_x(bar.seconds), y, 12))
        if bar.extremes_s:
            low, high = map(at_x, bar.extremes_s)
            parts.append(f'<path class="{kind}" d="M{low:.1f} {y:.1f}H{high:.1f}"/>')
        if bar.half_s:
            parts.append(_box(at_x(bar.seconds - bar.half_s), at_x(bar.seconds + bar.half_s), y, 6))
        told = format_seconds(bar.seconds) + (f" ± {format_seconds(bar.half_s)}" if bar.half_s else "")
        dot = f'<circle class="{kind}" cx="{at_x(bar.seconds):.1f}" cy="{y:.1f}" r="3">'
        parts.append(f"{dot}<title>{escape(bar.name)}: {escape(told)}</title></circle>")
        parts.append(f'<text class="beside" x="{at_x(end_s) + 8:.1f}" y="{y + 4:.1f}">{escape(told)}</text>')
    head = f'<svg class="curves" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _box(left: float, right: float, y: float, height: float) -> str:
    size = f'width="{max(right - left, 1.0):.1f}" height="{height}"'
    return f'<rect class="unfit" x="{left:.1f}" y="{y - height / 2:.1f}" {size}/>'
