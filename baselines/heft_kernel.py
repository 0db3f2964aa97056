"""Compiled loop of HEFT; `baselines.heft` says what it computes."""

from __future__ import annotations

import numpy as np

from baselines.greedy_kernel import transfer
from env.jit import njit
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray


@njit(cache=True)
def earliest_start(
    op: int,
    op_device: IntArray,
    finish_s: FloatArray,
    graph: tuple[IntArray, IntArray, IntArray],
    wire: tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray],
    result: FloatArray,
) -> None:
    """When the last input of an op arrives at each device, float64 [D]: the maximum over its predecessors."""
    input_ptr, inputs, producer = graph
    result[:] = 0.0
    for j in range(input_ptr[op], input_ptr[op + 1]):
        t = inputs[j]
        source, ready_s = op_device[producer[t]], finish_s[producer[t]]
        for d in range(len(result)):
            result[d] = max(result[d], ready_s + transfer(t, source, d, *wire))


@njit(cache=True)
def find_gap(
    gap_start: FloatArray, gap_end: FloatArray, count: int, ready_s: float, op_s: float, limit_s: float
) -> int:
    """The first idle interval that holds the op; -1 where it would start after ``limit_s``.

    Idle intervals are sorted and disjoint, the last one never ends.
    """
    low, high = 0, count - 1
    while low < high:  # the first interval that ends after the op may start
        middle = (low + high) // 2
        if gap_end[middle] > ready_s:
            high = middle
        else:
            low = middle + 1
    while gap_start[low] <= limit_s:
        if max(gap_start[low], ready_s) + op_s <= gap_end[low]:
            return low
        low += 1
    return -1


@njit(cache=True)
def occupy(gap_start: FloatArray, gap_end: FloatArray, count: int, gap: int, start_s: float, end_s: float) -> int:
    """Take [start_s, end_s) out of an idle interval; returns the new number of intervals."""
    before, after = gap_start[gap] < start_s, end_s < gap_end[gap]
    if before and after:
        for k in range(count, gap, -1):
            gap_start[k], gap_end[k] = gap_start[k - 1], gap_end[k - 1]
        gap_end[gap], gap_start[gap + 1] = start_s, end_s
        return count + 1
    if before:
        gap_end[gap] = start_s
        return count
    if after:
        gap_start[gap] = end_s
        return count
    for k in range(gap, count - 1):
        gap_start[k], gap_end[k] = gap_start[k + 1], gap_end[k + 1]
    return count - 1


@njit(cache=True)
def schedule(
    order: IntArray,
    unit_of: IntArray,
    graph: tuple[IntArray, IntArray, IntArray],
    wire: tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray],
    op_s: FloatArray,
    unit_s: FloatArray,
    allowed: BoolArray,
    memory: tuple[IntArray, IntArray, IntArray],
    device: IntArray,
    start_s: FloatArray,
    finish_s: FloatArray,
    used_bytes: IntArray,
    largest_bytes: IntArray,
) -> int:
    """Fill ``device``, ``start_s`` and ``finish_s`` [n]; returns the first unit without a feasible device, or -1."""
    n, n_devices = op_s.shape
    unit_bytes, working_bytes, capacity = memory
    gap_start, gap_end = np.empty((n_devices, n + 2)), np.empty((n_devices, n + 2))
    gaps = np.ones(n_devices, dtype=np.int64)
    gap_start[:, 0], gap_end[:, 0] = 0.0, np.inf
    ready_s = np.empty(n_devices)
    fixed = np.full(len(unit_s), -1, dtype=np.int64)
    used_bytes[:] = 0
    largest_bytes[:] = 0
    for op in order:
        unit = unit_of[op]
        earliest_start(op, device, finish_s, graph, wire, ready_s)
        best, best_gap, best_start, best_key = -1, -1, 0.0, np.inf
        for d in range(n_devices):
            later_s = 0.0
            if fixed[unit] >= 0:
                if d != fixed[unit]:
                    continue
            else:
                needed = unit_bytes[unit] + max(largest_bytes[d], working_bytes[unit])
                if not allowed[unit, d] or used_bytes[d] + needed > capacity[d]:
                    continue
                later_s = unit_s[unit, d] - op_s[op, d]
            gap, start = -1, ready_s[d]
            if op_s[op, d] > 0:  # an op without time needs no room
                limit = best_key - later_s - op_s[op, d]
                gap = find_gap(gap_start[d], gap_end[d], gaps[d], ready_s[d], op_s[op, d], limit)
                if gap < 0:
                    continue
                start = max(gap_start[d, gap], ready_s[d])
            if start + op_s[op, d] + later_s < best_key:
                best, best_gap, best_start, best_key = d, gap, start, start + op_s[op, d] + later_s
        if best < 0:
            return int(unit)
        if fixed[unit] < 0:
            fixed[unit] = best
            used_bytes[best] += unit_bytes[unit]
            largest_bytes[best] = max(largest_bytes[best], working_bytes[unit])
        device[op], start_s[op], finish_s[op] = best, best_start, best_start + op_s[op, best]
        if best_gap >= 0:
            gaps[best] = occupy(gap_start[best], gap_end[best], gaps[best], best_gap, best_start, finish_s[op])
    return -1
