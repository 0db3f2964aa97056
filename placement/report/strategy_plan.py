"""A strategy as a drawing: its stages, the mesh inside each, which device is where, and what is split."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from graphs.opgraph import Phase
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.recomputing.selecting import parted
from graphs.transforms.strategy import MeshRule, Strategy
from placement.results.result import Result
from placement.results.strategy_words import in_words

CELL, ROW, GAP, HEAD, SIDE = 92, 26, 18, 44, 64
MOST_STAGES, MOST_ROWS, MOST_COLUMNS = 8, 16, 8
_ZERO = {
    1: "the optimizer's state",
    2: "parameters, gathered once a step, gradients and the optimizer's state",
    3: "parameters, gathered for each use, gradients and the optimizer's state",
}


def plan_drawing(result: Result) -> str:
    """The card with the drawing of a strategy; nothing of a placement of the graph as it is."""
    if result.strategy.is_none or result.answer is None:
        return ""
    strategy = result.strategy
    listed = "".join(f"<li>{escape(line)}</li>" for line in split_lines(strategy))
    return (
        f'<section class="card" id="plan"><h2>{escape(_first_upper(in_words(strategy)))}</h2>'
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


def _first_upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def _drawing(result: Result, strategy: Strategy) -> str:
    """A column for each stage, in it a grid of devices: the innermost axis to the right, the others downwards."""
    inner = strategy.mesh[-1] if strategy.mesh else MeshRule("", 1)
    places = strategy.devices // strategy.stages
    rows, columns = places // inner.size, inner.size
    shown = min(strategy.stages, MOST_STAGES), min(rows, MOST_ROWS), min(columns, MOST_COLUMNS)
    names, held = _devices(result, strategy), _modules(result)
    width, parts = shown[2] * CELL, [*_side(strategy, shown[1])]
    for stage in range(shown[0]):
        x = SIDE + stage * (width + GAP)
        first = names[stage * places]
        what = "device" if strategy.is_placed else "stage"
        title = f"{what} {stage + 1}: {held.get(first, '')}" if strategy.stages > 1 else held.get(first, "")
        parts.append(f'<text x="{x}" y="14"><title>{escape(title)}</title>{escape(_short(title, width + GAP))}</text>')
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
    return f'{box}{mark}<text x="{x + 10}" y="{y + 15}">{escape(_short(name, CELL - 16))}</text>'


def _short(text: str, width: int) -> str:
    room = max(4, width // 7)
    half = (room - 1) // 2
    return text if len(text) <= room else f"{text[:half]}…{text[-half:]}"


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
