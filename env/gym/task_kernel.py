"""Compiled loops of the environments: longest paths, placing one unit in every row, bounds of partial placements.

A *row* is one of k environments that are stepped together. Tasks are padded to U units, D devices and E edges between
units, so that one call serves rows of different tasks.
"""

# Letters
# s, p   the tasks and how far their rows are; g, one problem
# r   a row; t, its task; u, a unit; d, a device; e, an edge between units; a, b, devices at its ends

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.jit import entry, inner

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


GOING, COMPLETE, FORBIDDEN = 0, 1, 2  # what `place` leaves a row in
CLIP = 100.0  # no observed number is larger
DEVICE_STATE = ("load", "memory", "fetch", "time")  # columns that `observe` writes

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


class StepArrays(NamedTuple):
    """T tasks as the kernel reads them, padded; F features of a unit."""

    n_units: IntArray  # [T]
    sequence: IntArray  # [T, U]
    allowed: BoolArray  # [T, U, D], false where padded
    kept_bytes: IntArray  # [T, U]
    working_bytes: IntArray  # [T, U]
    capacity_bytes: IntArray  # [T, D]
    memory_owner: IntArray  # [T, D], device in whose memory each works
    op_s: FloatArray  # [T, U, D]
    in_ptr: IntArray  # [T, U + 1], edges by the unit they lead to
    in_unit: IntArray  # [T, E], where they come from
    in_bytes: FloatArray  # [T, E], of tensors whose transfer time is modelled
    in_tensors: FloatArray  # [T, E], their number
    in_measured_s: FloatArray  # [T, E], measured transfer times, per link
    latency_s: FloatArray  # [T, D, D]
    s_per_byte: FloatArray  # [T, D, D]
    hops: FloatArray  # [T, D, D]
    tick_s: FloatArray  # [T], mean seconds of a unit
    reference_s: FloatArray  # [T]
    features: Float32  # [T, U, F]


class Progress(NamedTuple):
    """How far k rows have come; written by the kernel."""

    task: IntArray  # [k]
    step: IntArray  # [k], units placed
    placement: Int32  # [k, U], -1 where not placed
    kept_bytes: IntArray  # [k, D], of the units placed, in the memory where each device works
    working_bytes: IntArray  # [k, D], the largest among them
    load_s: FloatArray  # [k, D], seconds of work placed


@entry
def longest_paths(
    order: IntArray, ptr: IntArray, before: IntArray, edge_s: FloatArray, op_s: FloatArray, result: FloatArray
) -> None:
    """Fill ``result``, float64 [n]: the longest path that leads to each op, which is not counted itself.

    Args:
        order: int64 [n], every op after those it waits for.
        ptr, before, edge_s: op i waits for ``before[ptr[i]:ptr[i + 1]]``, and then for these seconds.
        op_s: float64 [n].
    """
    for op in order:
        longest = 0.0
        for e in range(ptr[op], ptr[op + 1]):
            longest = max(longest, result[before[e]] + op_s[before[e]] + edge_s[e])
        result[op] = longest


class StepObservation(NamedTuple):
    """Observations of k rows; written by the kernel."""

    next_unit: Int32  # [k, 1], -1 if all are placed
    next_features: Float32  # [k, F]
    device_state: Float32  # [k, D, 4]
    mask: BoolArray  # [k, D], where the next unit may go


@entry
def observe(s: StepArrays, p: Progress, seen: StepObservation) -> None:
    """Fill ``seen``.

    The mask holds the devices that pins allow and where the kept bytes and the largest working set fit; if that leaves
    none, those that pins allow.
    """
    n_devices = seen.mask.shape[1]
    for r in range(len(p.task)):
        t = p.task[r]
        done = p.step[r] == s.n_units[t]
        u = -1 if done else s.sequence[t, p.step[r]]
        seen.next_unit[r, 0] = u
        if done:
            seen.next_features[r] = 0.0
        else:
            seen.next_features[r] = s.features[t, u]
        fits = False
        for d in range(n_devices):
            capacity, kept = s.capacity_bytes[t, d], p.kept_bytes[r, d]
            seen.device_state[r, d, 0] = min(CLIP, p.load_s[r, d] / s.reference_s[t])
            seen.device_state[r, d, 1] = min(CLIP, kept / capacity) if capacity > 0 else 0.0
            seen.device_state[r, d, 2] = 0.0
            seen.device_state[r, d, 3] = 0.0
            seen.mask[r, d] = False
            if not done and s.allowed[t, u, d]:
                fetch_s = _fetch_s(s, p, r, t, u, d)
                seen.device_state[r, d, 2] = min(CLIP, np.log1p(fetch_s / s.tick_s[t]))
                seen.device_state[r, d, 3] = min(CLIP, np.log1p(s.op_s[t, u, d] / s.tick_s[t]))
                needed = kept + s.kept_bytes[t, u] + max(p.working_bytes[r, d], s.working_bytes[t, u])
                seen.mask[r, d] = needed <= capacity
                fits = fits or seen.mask[r, d]
        if not fits and not done:
            seen.mask[r] = s.allowed[t, u]


@inner
def _fetch_s(s: StepArrays, p: Progress, r: int, t: int, u: int, d: int) -> float:
    """Seconds to bring to device ``d`` what unit ``u`` reads from units placed elsewhere."""
    seconds = 0.0
    for e in range(s.in_ptr[t, u], s.in_ptr[t, u + 1]):
        a = p.placement[r, s.in_unit[t, e]]
        if a >= 0 and a != d:
            seconds += s.in_tensors[t, e] * s.latency_s[t, a, d] + s.in_bytes[t, e] * s.s_per_byte[t, a, d]
            seconds += s.in_measured_s[t, e] * s.hops[t, a, d]
    return seconds


@entry
def advance(s: StepArrays, p: Progress, seen: StepObservation, action: IntArray, ended: NDArray[np.int8]) -> int:
    """Put the next unit of every row on device ``action [k]`` and `observe`; returns how many rows have ended.

    ``ended [k]`` becomes GOING, COMPLETE or FORBIDDEN.
    """
    going = 0
    for r in range(len(action)):
        t, d = p.task[r], action[r]
        u = s.sequence[t, p.step[r]]
        if not s.allowed[t, u, d]:
            ended[r] = FORBIDDEN
            continue
        p.placement[r, u] = d
        for b in range(p.kept_bytes.shape[1]):
            if s.memory_owner[t, b] == s.memory_owner[t, d]:
                p.kept_bytes[r, b] += s.kept_bytes[t, u]
                p.working_bytes[r, b] = max(p.working_bytes[r, b], s.working_bytes[t, u])
        p.load_s[r, d] += s.op_s[t, u, d]
        p.step[r] += 1
        ended[r] = COMPLETE if p.step[r] == s.n_units[t] else GOING
        going += ended[r] == GOING
    observe(s, p, seen)
    return len(action) - going


class Paths(NamedTuple):
    """One problem as `partial_bounds` reads it (n ops, e edges, D devices)."""

    order: IntArray  # [n], topological
    ptr: IntArray  # [n + 1], edges by consumer
    before: IntArray  # [e], producers
    bytes: FloatArray  # [e], 0 where the transfer time is measured
    modelled: FloatArray  # [e], 0 where the transfer time is measured, else 1
    measured_s: FloatArray  # [e], per link; 0 where modelled
    op_s: FloatArray  # [n, D]
    fastest_s: FloatArray  # [n], on the fastest allowed device
    latency_s: FloatArray  # [D, D]
    s_per_byte: FloatArray  # [D, D]
    hops: FloatArray  # [D, D]


@entry
def partial_bounds(g: Paths, device: IntArray, bound_s: FloatArray) -> None:
    """Fill ``bound_s``, float64 [k]: no way to complete the placement ``device``, int64 [k, n], is faster.

    -1 is an op not placed yet, which may still run on its fastest device and needs no transfers. The bound is the
    longest path, or the work of the busiest device.
    """
    n, n_devices = g.op_s.shape
    end_s, load_s = np.empty(n), np.empty(n_devices)
    for r in range(len(device)):
        load_s[:] = 0.0
        best = 0.0
        for op in g.order:
            b = device[r, op]
            start = 0.0
            for e in range(g.ptr[op], g.ptr[op + 1]):
                a = device[r, g.before[e]]
                arrives = end_s[g.before[e]]
                if a >= 0 and b >= 0 and a != b:
                    arrives += g.modelled[e] * g.latency_s[a, b] + g.bytes[e] * g.s_per_byte[a, b]
                    arrives += g.measured_s[e] * g.hops[a, b]
                start = max(start, arrives)
            seconds = g.op_s[op, b] if b >= 0 else g.fastest_s[op]
            end_s[op] = start + seconds
            best = max(best, end_s[op])
            if b >= 0:
                load_s[b] += seconds
                best = max(best, load_s[b])
        bound_s[r] = best
