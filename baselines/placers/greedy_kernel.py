"""Compiled loop of MITE and DFS: unit by unit, each to the device with the smallest product of terms."""

from __future__ import annotations

import numpy as np

from env.jit import njit
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray

SMALLEST = 1e-3  # terms below this count as this, so that one of them cannot erase the others


@njit(cache=True)
def transfer(
    tensor: int,
    source: int,
    target: int,
    tensor_bytes: IntArray,
    measured_s: FloatArray,
    hops: IntArray,
    latency_s: FloatArray,
    bandwidth: FloatArray,
) -> float:
    """`Problem.transfer_s`."""
    if source == target:
        return 0.0
    if not np.isnan(measured_s[tensor]):
        return float(measured_s[tensor] * hops[source, target])
    return float(latency_s[source, target] + tensor_bytes[tensor] / bandwidth[source, target])


@njit(cache=True)
def added_transfer(
    unit: int,
    device: IntArray,
    present: BoolArray,
    units: tuple[IntArray, IntArray, IntArray],
    graph: tuple[IntArray, IntArray, IntArray, IntArray],
    wire: tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray],
    seen: IntArray,
    result: FloatArray,
) -> None:
    """Seconds of transfers between the unit on each device, float64 [D], and what is placed.

    ``present`` (bool [m, D]) says where a placed op reads a tensor: it is sent there once, whoever reads it.
    """
    ptr, members, unit_of = units
    input_ptr, inputs, output_ptr, producer = graph
    result[:] = 0.0
    for k in range(ptr[unit], ptr[unit + 1]):
        op = members[k]
        for j in range(input_ptr[op], input_ptr[op + 1]):
            t = inputs[j]
            source = device[unit_of[producer[t]]]
            if source < 0 or unit_of[producer[t]] == unit or seen[t] == unit:
                continue
            seen[t] = unit
            for d in range(len(result)):
                if not present[t, d]:
                    result[d] += transfer(t, source, d, *wire)
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for target in range(len(result)):
                if present[t, target]:
                    for d in range(len(result)):
                        result[d] += transfer(t, d, target, *wire)


@njit(cache=True)
def place(
    order: IntArray,
    multi_objective: bool,
    units: tuple[IntArray, IntArray, IntArray],
    graph: tuple[IntArray, IntArray, IntArray, IntArray],
    wire: tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray],
    unit_s: FloatArray,
    importance: FloatArray,
    slowness: FloatArray,
    allowed: BoolArray,
    memory: tuple[IntArray, IntArray, IntArray],
    device: IntArray,
    used_bytes: IntArray,
    largest_bytes: IntArray,
) -> int:
    """Fill ``device`` (int64 [U]); returns the first unit without a feasible device, or -1.

    Terms: Traffic and Execution, and where ``multi_objective`` is set Memory and Importance too.
    """
    n_devices = len(slowness)
    ptr, members, _ = units
    input_ptr, inputs, _, producer = graph
    unit_bytes, working_bytes, capacity = memory
    present = np.zeros((len(producer), n_devices), dtype=np.bool_)
    seen = np.full(len(producer), -1, dtype=np.int64)
    traffic, load_s = np.empty(n_devices), np.zeros(n_devices)
    feasible = np.empty(n_devices, dtype=np.bool_)
    device[:] = -1
    used_bytes[:] = 0
    largest_bytes[:] = 0
    for unit in order:
        added_transfer(unit, device, present, units, graph, wire, seen, traffic)
        most_traffic, most_s, least_slow = 0.0, 0.0, np.inf
        for d in range(n_devices):
            needed = unit_bytes[unit] + max(largest_bytes[d], working_bytes[unit])
            feasible[d] = allowed[unit, d] and used_bytes[d] + needed <= capacity[d]
            if feasible[d]:
                most_traffic = max(most_traffic, traffic[d])
                most_s = max(most_s, load_s[d] + unit_s[unit, d])
                least_slow = min(least_slow, slowness[d])
        best, best_product = -1, np.inf
        for d in range(n_devices):
            if not feasible[d]:
                continue
            product = max(SMALLEST, traffic[d] / most_traffic) if most_traffic > 0 else SMALLEST
            product *= max(SMALLEST, (load_s[d] + unit_s[unit, d]) / most_s) if most_s > 0 else SMALLEST
            if multi_objective:
                product *= max(SMALLEST, (used_bytes[d] + unit_bytes[unit]) / max(1, capacity[d]))
                relative_speed = least_slow / slowness[d] if slowness[d] > 0 else 1.0
                product *= max(SMALLEST, 1.0 - importance[unit] * relative_speed)
            if product < best_product:
                best, best_product = d, product
        if best < 0:
            return int(unit)
        device[unit] = best
        used_bytes[best] += unit_bytes[unit]
        largest_bytes[best] = max(largest_bytes[best], working_bytes[unit])
        load_s[best] += unit_s[unit, best]
        for k in range(ptr[unit], ptr[unit + 1]):
            for j in range(input_ptr[members[k]], input_ptr[members[k] + 1]):
                present[inputs[j], best] = True
    return -1
