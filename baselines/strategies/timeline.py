"""`timelines`: which pass of which micro-batch each device works on, and when, as stretches to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.figures import communicating
from env.simulation.simulator import Schedule
from graphs.arrays import FloatArray, IntArray
from graphs.records import LANE, Phase
from graphs.transforms.sequencing import block_map

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied

FORWARD, RECOMPUTED, BACKWARD, WEIGHTS, COMMUNICATION, UPDATE = range(6)
KINDS = ("forward", "recomputed", "backward", "weight gradient", "communication", "update")
_PASS = np.array([0, 1, 1, 1, 2, 3])  # what is one block: forward, backward with all that it needs, ...
_BUSY = 0.2  # of a column: less computing is not drawn, so that gaps between ops are seen


@dataclass(frozen=True)
class Bar:
    """A time in which a device does one thing, to be drawn.

    Attributes:
        first, last: the first of the timeline's columns, and the one after the last.
        kind: a number of `KINDS`; of a label, that of its first stretch.
        micro_batch: -1 for none.
    """

    first: int
    last: int
    kind: int
    micro_batch: int


@dataclass(frozen=True)
class DeviceTimeline:
    """One row of the timeline.

    Attributes:
        device: the name of the device.
        is_lane: whether it shows the device's communication: its lanes' ops, and transfers from it and to it.
        stretches: what it does, in order of time.
        blocks: one micro-batch's pass with nothing else between, for its number; of a lane none.
    """

    device: str
    is_lane: bool
    stretches: tuple[Bar, ...]
    blocks: tuple[Bar, ...]


def op_kinds(what: Applied) -> IntArray:
    """int64 [n]: a number of `KINDS` for every op; barriers, which take no time, count as backward."""
    graph, plain = what.derived.graph, what.unordered
    n = plain.graph.n_ops
    stage = np.zeros(plain.source.n_ops, dtype=np.int64)
    stage[plain.origin] = what.stage[:n]
    # A step that was not chunked is one micro-batch.
    blocks = block_map(replace(plain, micro_batch=np.maximum(plain.micro_batch, 0)), stage)
    again = (what.derived.source.phase[what.derived.origin] == Phase.FORWARD) & (graph.phase == Phase.BACKWARD)
    kind = np.full(graph.n_ops, BACKWARD, dtype=np.int64)
    kind[:n][blocks.kind == 2] = WEIGHTS
    kind[again] = RECOMPUTED
    kind[graph.phase == Phase.FORWARD] = FORWARD
    kind[graph.phase == Phase.UPDATE] = UPDATE
    kind[:n][blocks.in_lane] = COMMUNICATION
    return kind


def timelines(what: Applied, schedule: Schedule, columns: int) -> tuple[DeviceTimeline, ...]:
    """A row for every device that does something, and right below it one for its communication. O(n log n + D columns).

    Pieces narrower than a column share it: the column shows the one that takes most of it.

    Args:
        columns: into how many the time of the step is cut.
    """
    kind, cluster = op_kinds(what), what.problem.cluster
    base = what.derived.n_micro_batches + 1
    code = kind * base + what.derived.micro_batch + 1
    takes = schedule.op_end_s > schedule.op_start_s
    borders = np.linspace(0.0, schedule.step_time_s, columns + 1)
    rows = []
    for d, device in enumerate(cluster.devices):
        if device.kind == LANE:
            continue
        ops = np.flatnonzero(takes & (schedule.device == d))
        shown = _columns(schedule.op_start_s[ops], schedule.op_end_s[ops], code[ops], borders)
        busy = communicating(schedule, cluster, d)
        exchange = _columns(*busy, np.full(len(busy[0]), COMMUNICATION * base), borders, least=0.0)
        for columns_, is_lane in ((shown, False), (exchange, True)):
            stretches = _runs(columns_, base)
            if stretches:
                blocks = () if is_lane else tuple(_blocks(stretches))
                rows.append(DeviceTimeline(device.name, is_lane, tuple(stretches), blocks))
    return tuple(rows)


def _columns(
    start_s: FloatArray, end_s: FloatArray, code: IntArray, borders: FloatArray, least: float = _BUSY
) -> IntArray:
    """int64 [columns]: the code on which most of each column is spent, -1 where no more than `least` of it is busy."""
    codes, of = np.unique(code, return_inverse=True)
    best, spent, busy = np.full(len(borders) - 1, -1), np.zeros(len(borders) - 1), np.zeros(len(borders) - 1)
    for number, value in enumerate(codes.tolist()):
        mine = np.flatnonzero(of.reshape(-1) == number)
        mine = mine[np.argsort(start_s[mine], kind="stable")]
        done = np.concatenate([[0.0], np.cumsum(end_s[mine] - start_s[mine])])
        times = np.column_stack([start_s[mine], end_s[mine]]).reshape(-1)
        here = np.diff(np.interp(borders, times, np.column_stack([done[:-1], done[1:]]).reshape(-1)))
        better = here > spent
        best[better], spent[better] = value, here[better]
        busy += here
    best[busy <= least * np.diff(borders)] = -1
    return best.astype(np.int64)


def _runs(shown: IntArray, base: int) -> list[Bar]:
    """Columns of one code that stand side by side, joined."""
    change = np.flatnonzero(np.diff(shown, prepend=-2, append=-2))
    return [
        Bar(first, last, int(shown[first]) // base, int(shown[first]) % base - 1)
        for first, last in zip(change[:-1].tolist(), change[1:].tolist(), strict=True)
        if shown[first] >= 0
    ]


def _blocks(stretches: list[Bar]) -> list[Bar]:
    """Stretches of one pass of one micro-batch with nothing else between them, joined."""
    result: list[Bar] = []
    for stretch in stretches:
        before = result[-1] if result else None
        if (
            before is not None
            and before.micro_batch == stretch.micro_batch
            and _PASS[before.kind] == _PASS[stretch.kind]
        ):
            result[-1] = replace(before, last=stretch.last)
        elif stretch.micro_batch >= 0:
            result.append(stretch)
    return result
