"""Strategies as HTML: cards of a search, a drawing of stages and meshes, and the timeline and memory of a strategy.

Colours of timelines are those known from papers on pipelines; they stand in the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from env.cluster import UNLIMITED_BYTES
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import Phase
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.recomputing.selecting import parted
from graphs.transforms.strategy import MeshRule, Strategy
from placement.comparing.rows import PEAK_PARTS, Column, Row, RowTable
from placement.report.charts import MapPoint, shortened, svg, time_and_memory
from placement.results.alternatives import Alternative, best_of_each, front, single_s
from placement.results.result import Result
from placement.results.strategy_words import family_in_words, in_words

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied
    from baselines.strategies.timeline import DeviceTimeline
    from placement.solving.strategy_row import StrategyRow

LEFT, COLUMNS, TOP = 120, 960, 44
WIDTH = LEFT + COLUMNS + 10
DEVICE, LANE = 24, 8  # heights of rows
MOST_ROWS = 64
DIGIT = 8  # width of a digit of a number of a micro-batch
CELL, ROW, GAP, HEAD, SIDE = 92, 26, 18, 44, 64
MOST_STAGES, MOST_PLACES, MOST_COLUMNS = 8, 16, 8
_ZERO = {
    1: "the optimizer's state",
    2: "parameters, gathered once a step, gradients and the optimizer's state",
    3: "parameters, gathered for each use, gradients and the optimizer's state",
}


# -- a search ---------------------------------------------------------------------------------------------------


def alternatives_cards(result: Result) -> str:
    """Cards of a search over strategies: the best of each family, time against memory, and the answer drawn."""
    if not result.alternatives:
        return ""
    listed = "".join(f"<li>{escape(_said(one))}</li>" for one in front(result.alternatives))
    bound = format_seconds(result.lower_bound_s)
    return (
        '<div class="two uneven"><section class="card" id="alternatives"><h2>Best of each family</h2>'
        f'<div class="scroll"><table>{_table(result).html()}</table></div>'
        '<p class="note">Bold: no other one beats it both in time and in memory. No strategy takes less than '
        f"{bound}. {escape(result.note)}</p></section>"
        '<section class="card" id="time-and-memory"><h2>Time against memory</h2>'
        f'{time_and_memory(points_of(result.alternatives))}<ol class="front">{listed}</ol>'
        '<p class="note">The line joins those that no other one beats in both; their numbers are in the list. '
        f"Both axes are logarithmic.</p></section></div>{plan_drawing(result)}"
    )


def points_of(found: Sequence[Alternative]) -> list[MapPoint]:
    """Alternatives that fit, as points; those on the front of time and memory are numbered."""
    numbers = {one: number for number, one in enumerate(front(found), 1)}
    return [
        MapPoint(_said(one), one.step_time_s, one.peak_bytes or 1, numbers.get(one, 0))
        for one in found
        if one.step_time_s is not None
    ]


def _table(result: Result) -> RowTable:
    """The best of each family; bold those that no other one beats in both time and memory."""
    columns = (
        Column("family", "", is_text=True),
        Column("strategy", "strategy", is_text=True),
        Column("step_time_s", "step time", "s"),
        Column("speedup", "vs one device", "x"),
        Column("peak_bytes", "peak memory", "bytes"),
    )
    on_front, one_s, rows = front(result.alternatives), single_s(result.alternatives), list[Row]()
    for one in best_of_each(result.alternatives):
        strategy = "" if one.strategy.is_none else one.strategy.text
        fields = {"family": family_in_words(one.name), "strategy": strategy, "speedup": one.speedup(one_s)}
        fields |= {"step_time_s": one.step_time_s, "peak_bytes": one.peak_bytes}
        if one.step_time_s is None:
            rows.append(Row(fields, "unfit", f"{strategy} does not fit".strip()))
        else:
            rows.append(Row(fields, "best" if one in on_front else ""))
    return RowTable(columns, tuple(rows))


def _said(one: Alternative) -> str:
    name = family_in_words(one.name) if one.strategy.is_none else one.strategy.text
    return f"{name}: {format_seconds(one.step_time_s or 0)}, {format_bytes(one.peak_bytes or 0)}"


# -- stages and meshes ------------------------------------------------------------------------------------------


def plan_drawing(result: Result) -> str:
    """The card with the drawing of a strategy; nothing of a placement of the graph as it is."""
    if result.strategy.is_none or result.answer is None:
        return ""
    strategy, words = result.strategy, in_words(result.strategy)
    listed = "".join(f"<li>{escape(line)}</li>" for line in split_lines(strategy))
    return (
        f'<section class="card" id="plan"><h2>{escape(words[:1].upper() + words[1:])}</h2>'
        f'<p class="note"><code>{escape(strategy.text)}</code></p>'
        f'<div class="scroll">{_drawing(result, strategy)}</div>'
        f'<ul class="notes">{listed}</ul></section>'
    )


def split_lines(strategy: Strategy) -> Iterator[str]:
    """Splits and where they apply, a line each."""
    for rule in strategy.mesh:
        where = f" in {', '.join(rule.modules)}" if rule.modules else ""
        rest = "; what it leaves whole is cut along the sequence" if rule.sequence else ""
        rest += "; attention by heads, between two all-to-alls" if rule.by_heads else ""
        rest += "; keys and values go round, a block at a time" if rule.is_ring else ""
        rest += "; of mixtures the experts" if rule.has_experts else ""
        rest += "; a token goes to a host once" if rule.once_a_host else ""
        rest += f"; in {', '.join(rule.tensor_modules)} {AXES['tp'].cuts}" if rule.tensor_modules else ""
        shares = f" in shares of {':'.join(map(str, rule.shares))}" if rule.shares else ""
        yield f"{rule.name}, {rule.size} parts: {AXES[rule.name].cuts}{shares}{where}{rest}."
    if strategy.zero:
        parts, replicas = strategy.storage_parts, {rule.name: rule.size for rule in strategy.mesh}
        where = "one on each replica" if parts == replicas.get("dp", 1) else "one on each device with other data"
        where += " of a group" if GROUPS in replicas else ""
        but = "; experts among their replicas" if replicas.get("ep", 1) > 1 else ""
        yield f"zero{strategy.zero}: {_ZERO[strategy.zero]} in {parts} parts, {where}{but}."
    if strategy.is_placed:
        yield f"placed: the ops of each part of the mesh on {strategy.stages} devices, every part in the same way."
    elif strategy.stages > 1:
        yield f"pp, {strategy.stages} stages: the layers; {strategy.micro_batches} micro-batches follow each other."
    elif strategy.micro_batches > 1:
        yield f"mb: {strategy.micro_batches} micro-batches one after the other, gradients added up."
    if strategy.recompute:
        again, kept = parted(strategy.recompute)
        but = f", but for {', '.join(kept)}, which is kept" if kept else ""
        yield f"recompute: {', '.join(again)} a second time for the backward pass{but}."
    if strategy.offloads_parameters:
        yield "offload: parameters, gradients and updates on each device's host; parameters copied in for each use."
    elif strategy.offloads_optimizer:
        yield "offload: updates and the state of the optimizer on the host of each device."
    if strategy.offloaded_activations:
        names = ", ".join(strategy.offloaded_activations)
        yield f"offload: {names} on the host of each device from forward to backward pass."


def _drawing(result: Result, strategy: Strategy) -> str:
    """A column for each stage, in it a grid of devices: the innermost axis to the right, the others downwards."""
    inner = strategy.mesh[-1] if strategy.mesh else MeshRule("", 1)
    places = strategy.devices // strategy.stages
    rows, columns = places // inner.size, inner.size
    shown = min(strategy.stages, MOST_STAGES), min(rows, MOST_PLACES), min(columns, MOST_COLUMNS)
    names, held = _devices(result, strategy), _modules(result)
    width, parts = shown[2] * CELL, [*_side(strategy, shown[1])]
    for stage in range(shown[0]):
        x = SIDE + stage * (width + GAP)
        first = names[stage * places]
        what = "device" if strategy.is_placed else "stage"
        title = f"{what} {stage + 1}: {held.get(first, '')}" if strategy.stages > 1 else held.get(first, "")
        parts.append(
            f'<text x="{x}" y="14"><title>{escape(title)}</title>{escape(shortened(title, (width + GAP) // 7))}</text>'
        )
        for column in range(shown[2]):
            label = f"{inner.name} {column + 1}" if inner.size > 1 else ""
            parts.append(f'<text class="tick" x="{x + column * CELL + 4}" y="{HEAD - 8}">{label}</text>')
            for row in range(shown[1]):
                name = names[stage * places + row * columns + column]
                parts.append(_cell(name, x + column * CELL, HEAD + row * ROW, row))
    wide, high = SIDE + shown[0] * (width + GAP), HEAD + shown[1] * ROW + 6
    label = 'role="img" aria-label="devices of each stage by their place in the mesh"'
    size = f'style="width:{wide}px;max-width:none" viewBox="0 0 {wide} {high}"'
    more = "" if shown == (strategy.stages, rows, columns) else '<p class="note">The first of each are drawn.</p>'
    return f'<svg class="passes" {size} {label}>{"".join(parts)}</svg>{more}'


def _side(strategy: Strategy, rows: int) -> Iterator[str]:
    """Places along the axes that go downwards."""
    outer = strategy.mesh[:-1]
    for row in range(rows):
        words, rest = [], row
        for rule in reversed(outer):
            rest, place = divmod(rest, rule.size)
            words.append(f"{rule.name} {place + 1}")
        yield f'<text class="tick" x="0" y="{HEAD + row * ROW + 17}">{escape(" ".join(reversed(words)))}</text>'


def _cell(name: str, x: int, y: int, row: int) -> str:
    title = f"<title>{escape(name)}</title>"
    box = f'<rect class="idle" x="{x}" y="{y}" width="{CELL - 4}" height="{ROW - 4}" rx="4">{title}</rect>'
    mark = f'<rect class="k{row % 6}" x="{x}" y="{y}" width="5" height="{ROW - 4}"/>'
    return f'{box}{mark}<text x="{x + 10}" y="{y + 15}">{escape(shortened(name, (CELL - 16) // 7))}</text>'


def _devices(result: Result, strategy: Strategy) -> list[str]:
    """Names of the devices by stage and place: those that are named, or the cluster's in its order."""
    cluster = result.cluster
    if strategy.device_names:
        return list(strategy.device_names)
    return [cluster.devices[d].name for d in cluster.compute_devices.tolist()][: strategy.devices]


def _modules(result: Result) -> dict[str, str]:
    """First and last module of the forward pass on each device."""
    graph, device = result.graph, result.device_numbers()
    found: dict[str, str] = {}
    forward = np.flatnonzero(graph.phase == Phase.FORWARD)
    for d in np.unique(device[forward]).tolist():
        modules = [graph.modules[op] for op in forward[device[forward] == d].tolist() if graph.modules[op]]
        if modules:
            ends = dict.fromkeys((modules[0], modules[-1]))
            found[result.cluster.devices[d].name] = " … ".join(ends)
    return found


# -- one strategy -----------------------------------------------------------------------------------------------


def strategy_card(row: StrategyRow) -> str:
    """One strategy: when each device does what, what fills its memory, and what is exchanged."""
    what, given = row.applied, row.figures
    if what is None or given is None:
        return ""
    time = "does not fit" if row.result.answer is None else format_seconds(row.result.answer.step_time_s)
    capacity = {d.name: d.usable_bytes for d in what.problem.cluster.devices}
    sent = [(kind.replace("_", "-"), size) for kind, size in sorted(given.exchanged_bytes.items())]
    return (
        f'<section class="card strategy"><h2><code>{escape(row.strategy.text)}</code> <small>{time}, '
        f"{what.derived.graph.n_ops:,} ops</small></h2>"
        f'<div class="scroll">{timeline(what)}</div>'
        '<div class="two"><div><h3>Memory at the peak</h3>'
        f"{memory_bars(given.memory, capacity)}</div><div><h3>Exchanged in a step</h3>"
        f"{_sizes(sent or [('no collectives', 0)])}"
        f"<h3>Fullest device</h3>{_sizes((name, given.peak_bytes[name]) for name in PEAK_PARTS)}</div></div></section>"
    )


def _sizes(rows: Iterable[tuple[str, int]]) -> str:
    cells = (f'<tr><th scope="row">{escape(name)}</th><td>{format_bytes(size)}</td></tr>' for name, size in rows)
    return f"<table>{''.join(cells)}</table>"


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
        parts.append(_device(row, y, height))
        y += height + (1 if not row.is_lane else 5)
    more = f'<p class="note">The first {len(rows)} of {len(every)} rows.</p>' if len(every) > len(rows) else ""
    return svg(parts, "passes of micro-batches on devices over time", y + 4, "passes wide", WIDTH) + more


def _key(kinds: Mapping[int, str]) -> str:
    parts, x = [], LEFT
    for kind, words in sorted(kinds.items()):
        parts.append(f'<rect class="k{kind}" x="{x}" y="2" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="12">{words}</text>')
        x += 40 + 7 * len(words)
    return "".join(parts)


def _axis(step_s: float) -> str:
    return "".join(
        f'<text class="tick" x="{LEFT + COLUMNS * k / 4:.0f}" y="32" text-anchor="{"end" if k == 4 else "start"}">'
        f"{format_seconds(step_s * k / 4)}</text>"
        for k in range(5)
    )


def _device(row: DeviceTimeline, y: int, height: int) -> str:
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
        for part in PEAK_PARTS:
            width = wide * sizes[part] / top
            title = f"<title>{part} {format_bytes(sizes[part])}</title>"
            parts.append(f'<rect class="m-{part}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="16">{title}</rect>')
            x += width
        if limits.get(name, top + 1) <= top:
            parts.append(f'<path class="limit" d="M{110 + wide * limits[name] / top:.1f} {y - 2}v20"/>')
        limit = f" of {format_bytes(limits[name])}" if name in limits else ""
        parts.append(f'<text x="{110 + wide + 10}" y="{y + 13}">{format_bytes(peaks[name])}{limit}</text>')
        y += 21
    return svg(parts, "memory of each device by what fills it", y + 4, "passes", 590)


def _memory_key() -> str:
    return "".join(
        f'<rect class="m-{part}" x="{110 + 105 * k}" y="2" width="12" height="12"/>'
        f'<text x="{127 + 105 * k}" y="12">{part}</text>'
        for k, part in enumerate(PEAK_PARTS)
    )
