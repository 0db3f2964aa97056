"""Memory in steady state (docs/score.md, "Throughput"): what the steps in flight hold at once.

`env.checking.reference_memory` works it out a second time in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from env.simulation.timeline import GRADIENT, Intervals, levels, memory_intervals
from graphs.formatting import exact_bytes

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from env.simulation.simulator import Schedule
    from graphs.opgraph import FloatArray, IntArray

_ROUNDING = 1e-9  # relative: so much above a whole number of periods is none more
_MOST_BYTES = 2**62  # more than any memory, and int64 still adds it up


@dataclass(frozen=True, eq=False)
class Steady:
    """Bytes that devices hold in steady state, and who put it there (D devices, x entries).

    Attributes:
        problem: graph and cluster.
        device: int64 [n], the placement.
        held_bytes: int64 [D]; of devices on one memory at its owner, and 0 at the others.
        entry_op, entry_device, entry_bytes: int64 [x], what is there beside kept bytes when a device is at its
            fullest: an output for its producer, a copy from elsewhere for its first reader there. The device is the
            owner of the memory.
    """

    problem: Problem
    device: IntArray
    held_bytes: IntArray
    entry_op: IntArray
    entry_device: IntArray
    entry_bytes: IntArray

    @property
    def fits(self) -> bool:
        """True if no device holds more than its memory."""
        return bool((self.held_bytes <= self.problem.capacity_bytes).all())

    @property
    def reason(self) -> str | None:
        """One sentence about the device that lacks most memory; None if all fits."""
        if self.fits:
            return None
        graph, capacity_bytes = self.problem.graph, self.problem.capacity_bytes
        d = int((self.held_bytes - capacity_bytes).argmax())
        own = np.where(self.problem.memory_owner[self.device] == d, graph.standing_bytes, 0) + self.held_by(
            self.entry_device == d
        )
        largest, needed = int(own.argmax()), int(own.max())
        others = int(self.held_bytes[d]) - needed
        return (
            f"op {graph.op_names[largest]!r} needs {exact_bytes(needed)} on {self.problem.cluster.devices[d].name} "
            f"in steady state, where {exact_bytes(max(0, int(capacity_bytes[d]) - others))} are free beside the "
            f"{exact_bytes(others)} of the other ops placed there."
        )

    def held_by(self, entries: BoolArray) -> IntArray:
        """int64 [n]: bytes of these entries, bool [x], by op."""
        result = np.zeros(self.problem.graph.n_ops, dtype=np.int64)
        np.add.at(result, self.entry_op[entries], self.entry_bytes[entries])
        return result


def steady_memory(problem: Problem, schedule: Schedule, period_s: float) -> Steady:
    """Memory where a step like ``schedule`` begins every ``period_s`` seconds. O(i log i) for i tensors and copies."""
    parts = memory_intervals(problem, schedule)
    parts = parts.chosen(parts.start_s < parts.end_s)
    waits = ~_within_a_turn(schedule, parts)
    lasts = (parts.end_s[waits] - parts.start_s[waits]) / period_s if period_s > 0 else np.ones(int(waits.sum()))
    copies = np.maximum(1.0, np.ceil(lasts * (1 - _ROUNDING)))
    copies[parts.cause[waits] == GRADIENT] = 1.0  # those of the step before are gone
    waiting, turns = parts.chosen(waits), parts.chosen(~waits)
    # As Python's integers: no sum of them wraps around.
    sizes = [int(copy) * size for copy, size in zip(copies.tolist(), waiting.size_bytes.tolist(), strict=True)]
    owner, held = problem.memory_owner, [0] * problem.cluster.n_devices
    for d, size in zip(owner[waiting.device].tolist(), sizes, strict=True):
        held[d] += size
    fullest_s = []
    for d, (times_s, size_bytes) in zip(owner.tolist(), levels(problem, schedule.device, turns), strict=True):
        fullest_s.append(times_s[size_bytes.argmax()])
        held[d] += int(size_bytes.max())
    at_s = np.array(fullest_s)[turns.device]
    live = turns.chosen((turns.start_s <= at_s) & (at_s < turns.end_s))
    return Steady(
        problem=problem,
        device=schedule.device,
        held_bytes=np.array([min(size, _MOST_BYTES) for size in held], dtype=np.int64),
        entry_op=np.concatenate([live.op, waiting.op]),
        entry_device=owner[np.concatenate([live.device, waiting.device])],
        entry_bytes=np.concatenate([live.size_bytes, np.minimum(sizes, _MOST_BYTES).astype(np.int64)]),
    )


def _within_a_turn(schedule: Schedule, parts: Intervals) -> BoolArray:
    """bool [i]: whether the device runs ops without a pause for as long as an interval lasts."""
    runs = np.flatnonzero(schedule.op_start_s < schedule.op_end_s)
    result = np.zeros(len(parts.device), dtype=np.bool_)
    for d in np.unique(schedule.device[runs]).tolist():
        here = runs[schedule.device[runs] == d]
        here = here[np.argsort(schedule.op_start_s[here])]
        start_s, end_s = _turns(schedule.op_start_s[here], schedule.op_end_s[here])
        mine = np.flatnonzero(parts.device == d)
        turn = np.searchsorted(start_s, parts.start_s[mine], side="right") - 1
        result[mine] = (turn >= 0) & (parts.end_s[mine] <= end_s[np.maximum(turn, 0)])
    return result


def _turns(start_s: FloatArray, end_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ops of one device by start, as the times during which it never pauses."""
    first = np.concatenate([[True], start_s[1:] > end_s[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start_s[first], end_s[last]
