"""Memory over time, and the sentence that says where it runs out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphs.formatting import exact_bytes

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from env.simulation.simulator import Schedule
    from graphs.opgraph import FloatArray, IntArray

OP, TRANSFER, GRADIENT = 0, 1, 2


@dataclass(frozen=True)
class Intervals:
    """Bytes that are on a device for part of the step; i intervals.

    Attributes:
        device: int64 [i], the op's, or the one that receives the transfer; it may work in another's memory.
        start_s, end_s: float64 [i]; half-open.
        size_bytes: int64 [i].
        cause: int64 [i], `OP`, `TRANSFER` or `GRADIENT`: what puts them there, `GRADIENT` until the step ends.
        number: int64 [i], which op or transfer.
        op: int64 [i], the op itself or, of a transfer, its first reader.
    """

    device: IntArray
    start_s: FloatArray
    end_s: FloatArray
    size_bytes: IntArray
    cause: IntArray
    number: IntArray
    op: IntArray

    def chosen(self, which: BoolArray) -> Intervals:
        """Some of them, bool [i]."""
        return Intervals(*(getattr(self, field.name)[which] for field in fields(self)))


def memory_steps(problem: Problem, schedule: Schedule) -> list[tuple[FloatArray, IntArray]]:
    """Bytes on each device over time: ``(times_s, bytes)`` per device, a step function.

    From ``times_s[k]`` until the next time (the last one: for good) the device holds ``bytes[k]``. The first time is
    0; the largest value is the device's peak. Devices on one memory have theirs at its owner.
    """
    owner, found = problem.memory_owner, memory_intervals(problem, schedule)
    return levels(problem, owner[schedule.device], replace(found, device=owner[found.device]))


def overflow_reason(problem: Problem, schedule: Schedule) -> str | None:
    """One sentence about the first instant at which a device holds more than its memory; None if none does."""
    intervals, owner = memory_intervals(problem, schedule), problem.memory_owner
    first: tuple[float, int] | None = None
    for d, (times_s, size_bytes) in enumerate(memory_steps(problem, schedule)):
        over = np.flatnonzero(size_bytes > problem.capacity_bytes[d])
        if len(over) and (first is None or times_s[over[0]] < first[0]):
            first = float(times_s[over[0]]), d
    if first is None:
        return None
    now, d = first
    here, is_there = owner[schedule.device] == d, (owner[intervals.device] == d) & (intervals.end_s > now)
    free = int(problem.capacity_bytes[d]) - int(problem.graph.standing_bytes[here].sum())
    if free < 0:
        return _kept_overflow(problem, here, d)
    free -= int(intervals.size_bytes[is_there & (intervals.start_s < now)].sum())
    begins = np.flatnonzero(is_there & (intervals.start_s == now))
    for who, number, needed in _needs(intervals, begins):
        if needed > free:
            return _sentence(problem, schedule, who, number, d, needed, free, now)
        free -= needed
    raise AssertionError("memory overflows without anything arriving")


def _needs(intervals: Intervals, begins: NDArray[np.intp]) -> list[tuple[int, int, int]]:
    """``(cause, number, bytes)`` of all that begins at one instant: ops first, then transfers as requested."""
    total: dict[tuple[int, int], int] = {}
    for k in begins.tolist():
        cause = OP if intervals.cause[k] == GRADIENT else int(intervals.cause[k])  # it comes with its op
        key = cause, int(intervals.number[k])
        total[key] = total.get(key, 0) + int(intervals.size_bytes[k])
    return [(cause, number, size) for (cause, number), size in sorted(total.items())]


def _kept_overflow(problem: Problem, here: BoolArray, d: int) -> str:
    graph, device = problem.graph, problem.cluster.devices[d]
    free = device.usable_bytes
    total = int(graph.standing_bytes[here].sum())
    for i in np.flatnonzero(here).tolist():
        needed = int(graph.standing_bytes[i])
        if needed > free:
            return (
                f"op {graph.op_names[i]!r} keeps {exact_bytes(needed)} for the whole step on {device.name}, "
                f"where {exact_bytes(free)} are free; all that is placed there keeps {exact_bytes(total)}."
            )
        free -= needed
    raise AssertionError("kept bytes overflow without an op that keeps them")


def _sentence(
    problem: Problem, schedule: Schedule, cause: int, number: int, d: int, needed: int, free: int, now: float
) -> str:
    graph, device = problem.graph, problem.cluster.devices[d].name
    room = f"{exact_bytes(needed)} on {device}, where {exact_bytes(free)} are free {now:.6g} s into the step."
    if cause == OP:
        return f"op {graph.op_names[number]!r} needs {room}"
    tensor = int(schedule.transfer_tensor[number])
    readers = graph.consumers_of(tensor)
    reader = graph.op_names[readers[schedule.device[readers] == schedule.transfer_target[number]][0]]
    producer = graph.op_names[graph.tensor_producer[tensor]]
    return f"an output of op {producer!r}, arriving for op {reader!r}, needs {room}"


def memory_intervals(problem: Problem, schedule: Schedule) -> Intervals:
    """Workspaces, tensors where they are made, copies in other memories, and gradients that come. O(e log e)."""
    graph, n_devices, owner = problem.graph, problem.cluster.n_devices, problem.memory_owner
    producer, consumer, tensor = graph.edge_list
    step_s = schedule.op_end_s.max(initial=0.0)
    sent, target = schedule.transfer_tensor, schedule.transfer_target
    here = schedule.device[graph.tensor_producer]
    last_use_s = schedule.op_end_s[graph.tensor_producer].copy()
    local = schedule.device[consumer] == schedule.device[producer]
    within = owner[schedule.device[consumer]] == owner[schedule.device[producer]]
    np.maximum.at(last_use_s, tensor[within], schedule.op_end_s[consumer[within]])
    np.maximum.at(last_use_s, sent, schedule.transfer_end_s)

    # Each remote read belongs to the one transfer of its tensor to its device.
    key = sent * n_devices + target
    by_key = np.argsort(key)
    read_key = tensor[~local] * n_devices + schedule.device[consumer[~local]]
    transfer = by_key[np.searchsorted(key[by_key], read_key)]
    copy_end_s = schedule.transfer_end_s.copy()
    np.maximum.at(copy_end_s, transfer, schedule.op_end_s[consumer[~local]])
    first_reader = np.full(len(sent), graph.n_ops)
    np.minimum.at(first_reader, transfer, consumer[~local])

    n, x, makers = graph.n_ops, len(sent), np.flatnonzero(graph.coming_bytes)
    is_copied = owner[here[sent]] != owner[target]
    found = Intervals(
        device=np.concatenate([schedule.device, here, schedule.device[makers], target]),
        start_s=np.concatenate(
            [
                schedule.op_start_s,
                *(schedule.op_start_s[ops] for ops in (graph.tensor_producer, makers)),
                schedule.transfer_start_s,
            ]
        ),
        end_s=np.concatenate([schedule.op_end_s, last_use_s, np.full(len(makers), step_s), copy_end_s]),
        size_bytes=np.concatenate(
            [
                graph.workspace_bytes,
                graph.tensor_memory_bytes,
                graph.coming_bytes[makers],
                graph.tensor_bytes[sent],
            ]
        ),
        cause=np.repeat([OP, OP, GRADIENT, TRANSFER], [n, graph.n_tensors, len(makers), x]),
        number=np.concatenate([np.arange(n), graph.tensor_producer, makers, np.arange(x)]),
        op=np.concatenate([np.arange(n), graph.tensor_producer, makers, first_reader]),
    )
    return found.chosen(np.concatenate([np.ones(n + graph.n_tensors + len(makers), np.bool_), is_copied]))


def levels(problem: Problem, device: IntArray, intervals: Intervals) -> list[tuple[FloatArray, IntArray]]:
    """Per device, a step function as of `memory_steps`: what its ops keep, ``device`` int64 [n], and its intervals."""
    result = []
    kept = problem.graph.standing_bytes
    for d in range(problem.cluster.n_devices):
        mine = intervals.device == d
        size = intervals.size_bytes[mine]
        instants, at = np.unique(
            np.concatenate([[0.0], intervals.start_s[mine], intervals.end_s[mine]]), return_inverse=True
        )
        change = np.zeros(len(instants), dtype=np.int64)
        np.add.at(change, at, np.concatenate([[kept[device == d].sum()], size, -size]))
        level = change.cumsum()
        changes = np.concatenate([[True], np.diff(level) != 0])
        result.append((instants[changes], level[changes]))
    return result
