"""Gantt charts of placements as text and as pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from env.plan import Plan
from env.problem import Problem
from graphs.formatting import format_seconds
from graphs.opgraph import FloatArray, IntArray, OpGraph

if TYPE_CHECKING:
    from env.gym.batch import EnvBatch
    from env.gym.task import Task

RENDER_MODES = ("ansi", "rgb_array")

COLUMNS = 72  # of the text
WIDTH, LANE, GAP = 720, 24, 4  # pixels


@dataclass(frozen=True, eq=False)
class Chart:
    """Times of ops on devices (r ops that are placed).

    Attributes:
        devices: names.
        op, device: int64 [r].
        start_s, end_s: float64 [r].
        n_ops: ops of the graph, placed or not.
        step_time_s: end of the last op; 0 if none is placed.
    """

    devices: tuple[str, ...]
    op: IntArray
    device: IntArray
    start_s: FloatArray
    end_s: FloatArray
    n_ops: int
    step_time_s: float


def render(batch: EnvBatch, row: int, mode: str) -> str | NDArray[np.uint8]:
    """The chart of what a row last placed, as text (``"ansi"``) or pixels uint8 [H, W, 3] (``"rgb_array"``)."""
    task = batch.possible[int(batch.task[row])]
    assert task is not None, "an impossible task is refused at reset"
    made = chart(task, *batch.shown(row))
    return text(made) if mode == "ansi" else pixels(made)


def chart(task: Task, unit_device: IntArray, order: FloatArray | None) -> Chart:
    """Simulate a placement of units, int64 [U]; of a partial one, with -1s, the graph of the ops that are placed."""
    from env.simulation.simulator import Simulator

    device = unit_device[: task.n_units][task.unit_of]
    op = np.flatnonzero(device >= 0)
    problem = task.problem
    names = tuple(d.name for d in problem.cluster.devices)
    if not len(op):
        nothing = np.zeros(0)
        return Chart(names, op, op, nothing, nothing, task.n_ops, 0.0)
    if len(op) < task.n_ops:
        problem = Problem(_without_the_rest(problem.graph, op), problem.cluster)
        order = None
    _, found = Simulator(problem).schedule(Plan(device[op], None if order is None else order[op]))
    return Chart(names, op, device[op], found.op_start_s, found.op_end_s, task.n_ops, found.step_time_s)


def text(made: Chart) -> str:
    """A line for each device: ``#`` where it works for most of a column's time, ``-`` for some of it."""
    head = f"{len(made.op)} of {made.n_ops} ops placed, {format_seconds(made.step_time_s)}"
    width = max(map(len, made.devices))
    lines = [head]
    for d, name in enumerate(made.devices):
        share = _busy(made, d, COLUMNS)
        marks = "".join("#" if s > 0.5 else "-" if s > 0 else "." for s in share.tolist())
        lines.append(f"{name.ljust(width)} |{marks}| {(made.device == d).sum()} ops")
    return "\n".join(lines) + "\n"


def pixels(made: Chart) -> NDArray[np.uint8]:
    """A lane for each device, time from left to right, a colour for each op."""
    height = GAP + len(made.devices) * (LANE + GAP)
    image = np.full((height, WIDTH, 3), 255, dtype=np.uint8)
    scale = WIDTH / made.step_time_s if made.step_time_s > 0 else 0.0
    for d in range(len(made.devices)):
        top = GAP + d * (LANE + GAP)
        image[top : top + LANE] = 235
        mine = np.flatnonzero(made.device == d)
        left = np.minimum((made.start_s[mine] * scale).astype(np.int64), WIDTH - 1)
        right = np.maximum(left + 1, np.ceil(made.end_s[mine] * scale).astype(np.int64))
        for k, a, b in zip(made.op[mine].tolist(), left.tolist(), right.tolist(), strict=True):
            image[top : top + LANE, a:b] = _colour(k)
    return image


def _busy(made: Chart, device: int, columns: int) -> FloatArray:
    """float64 [columns]: share of each column's time in which a device works."""
    if made.step_time_s == 0:
        return np.zeros(columns)
    mine = made.device == device
    edges = np.linspace(0.0, made.step_time_s, columns + 1)
    start, end = made.start_s[mine, np.newaxis], made.end_s[mine, np.newaxis]
    inside = np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])
    worked_s: FloatArray = np.maximum(inside, 0.0).sum(axis=0)
    return worked_s * columns / made.step_time_s


def _colour(op: int) -> tuple[int, int, int]:
    """Neighbouring numbers get colours that are far apart."""
    hue = op * 0.618034 % 1.0 * 6.0
    ramp = [abs((hue + shift) % 6.0 - 3.0) - 1.0 for shift in (0.0, 4.0, 2.0)]
    red, green, blue = (int(70 + 150 * min(1.0, max(0.0, value))) for value in ramp)
    return red, green, blue


def _without_the_rest(graph: OpGraph, kept: IntArray) -> OpGraph:
    """The graph of these ops alone, with the tensors they make."""
    ops, tensors = graph.records()
    names = {graph.op_names[i] for i in kept.tolist()}
    return OpGraph.build(
        [replace(ops[i], forward_of=None) for i in kept.tolist()],
        [
            replace(tensor, consumers=tuple(c for c in tensor.consumers if c in names))
            for tensor in tensors
            if tensor.producer in names
        ],
        graph.name,
    )
