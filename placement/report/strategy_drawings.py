"""Timeline and memory of a strategy as SVG; colours are those known from papers on pipelines, in the style sheet."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from env.cluster import UNLIMITED_BYTES
from graphs.formatting import format_bytes, format_seconds

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied
    from baselines.strategies.timeline import DeviceTimeline

PARTS = ("parameters", "gradients", "optimizer", "activations")
LEFT, COLUMNS, TOP = 120, 960, 44
WIDTH = LEFT + COLUMNS + 10
DEVICE, LANE = 24, 8  # heights of rows
MOST_ROWS = 64
DIGIT = 8  # width of a digit of a number of a micro-batch


def timeline(what: Applied) -> str:
    """Work of every device over time: an SVG."""
    from baselines.strategies.timeline import KINDS, timelines  # loads the simulator
    from env.simulation.simulator import Simulator

    _, schedule = Simulator(what.problem).schedule(what.plan)
    every = timelines(what, schedule, COLUMNS)
    rows = every[:MOST_ROWS]
    parts, y = [_key({s.kind: KINDS[s.kind] for row in rows for s in row.stretches}), _axis(schedule.step_time_s)], TOP
    for row in rows:
        height = LANE if row.is_lane else DEVICE
        parts.append(_row(row, y, height))
        y += height + (1 if not row.is_lane else 5)
    more = f'<p class="note">The first {len(rows)} of {len(every)} rows.</p>' if len(every) > len(rows) else ""
    label = 'role="img" aria-label="passes of micro-batches on devices over time"'
    return f'<svg class="passes" viewBox="0 0 {WIDTH} {y + 4}" {label}>{"".join(parts)}</svg>{more}'


def _key(kinds: Mapping[int, str]) -> str:
    parts, x = [], LEFT
    for kind, words in sorted(kinds.items()):
        parts.append(f'<rect class="k{kind}" x="{x}" y="2" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="12">{words}</text>')
        x += 40 + 7 * len(words)
    return "".join(parts)


def _axis(step_s: float) -> str:
    parts = []
    for k in range(5):
        x = LEFT + COLUMNS * k / 4
        anchor = "end" if k == 4 else "start"
        parts.append(
            f'<text class="tick" x="{x:.0f}" y="32" text-anchor="{anchor}">{format_seconds(step_s * k / 4)}</text>'
        )
    return "".join(parts)


def _row(row: DeviceTimeline, y: int, height: int) -> str:
    """A device or its lane: one path for all stretches of a kind, so that many of them take little room."""
    name = "" if row.is_lane else f'<text x="0" y="{y + height - 7}">{escape(row.device[-16:])}</text>'
    title = f"<title>{escape(row.device)}</title>"
    parts = [f'{name}<rect class="idle" x="{LEFT}" y="{y}" width="{COLUMNS}" height="{height}">{title}</rect>']
    for kind in sorted({s.kind for s in row.stretches}):
        boxes = "".join(
            f"M{LEFT + s.first} {y}h{s.last - s.first}v{height}h{s.first - s.last}z"
            for s in row.stretches
            if s.kind == kind
        )
        parts.append(f'<path class="k{kind}" d="{boxes}"/>')
    for block in row.blocks if not row.is_lane else ():
        text = str(block.micro_batch)
        parts.append(f'<path class="edge" d="M{LEFT + block.first} {y}v{height}"/>')
        if block.last - block.first >= DIGIT * len(text) + 2:
            middle = LEFT + (block.first + block.last) / 2
            parts.append(f'<text class="number" x="{middle:g}" y="{y + height - 8}">{text}</text>')
    return "".join(parts)


def memory_bars(memory: Mapping[str, Mapping[str, int]], capacity: Mapping[str, int]) -> str:
    """Contents of each device at its peak, as stacked bars under a mark for its capacity: an SVG."""
    rows = list(memory.items())[:MOST_ROWS]
    limits = {name: capacity[name] for name, _ in rows if capacity[name] < UNLIMITED_BYTES}
    peaks = {name: sum(parts.values()) for name, parts in rows}
    most = max(peaks.values(), default=0)
    # The limit is on the picture where memory is anything like full.
    top = max([most, *(limit for limit in limits.values() if limit < 3 * most)]) or 1
    wide, y, parts = 330, 24, [_memory_key()]
    for name, sizes in rows:
        x = 110.0
        parts.append(f'<text x="0" y="{y + 13}">{escape(name[-14:])}</text>')
        for part in PARTS:
            width = wide * sizes[part] / top
            title = f"<title>{part} {format_bytes(sizes[part])}</title>"
            parts.append(f'<rect class="m-{part}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="16">{title}</rect>')
            x += width
        if limits.get(name, top + 1) <= top:
            parts.append(f'<path class="limit" d="M{110 + wide * limits[name] / top:.1f} {y - 2}v20"/>')
        limit = f" of {format_bytes(limits[name])}" if name in limits else ""
        parts.append(f'<text x="{110 + wide + 10}" y="{y + 13}">{format_bytes(peaks[name])}{limit}</text>')
        y += 21
    label = 'role="img" aria-label="memory of each device by what fills it"'
    return f'<svg class="passes" viewBox="0 0 590 {y + 4}" {label}>{"".join(parts)}</svg>'


def _memory_key() -> str:
    return "".join(
        f'<rect class="m-{part}" x="{110 + 105 * k}" y="2" width="12" height="12"/>'
        f'<text x="{127 + 105 * k}" y="12">{part}</text>'
        for k, part in enumerate(PARTS)
    )
