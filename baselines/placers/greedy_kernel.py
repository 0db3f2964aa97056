"""Compiled loop of MITE and DFS: unit by unit, each to the device with the smallest product of terms."""

# Letters
# m, D, U   numbers of tensors, devices and units (ops that share a device)
# d   a device; t, a tensor; j, k, positions; _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baselines.kernel_records import Inputs, Members, Room, Wire
from env.jit import entry, inner

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray

SMALLEST = 1e-3  # terms below this count as this, so that one of them cannot erase the others


@inner
def transfer(tensor: int, source: int, target: int, wire: Wire) -> float:
    """`Problem.transfer_s`."""
    if source == target:
        return 0.0
    if not np.isnan(wire.measured_s[tensor]):
        return float(wire.measured_s[tensor] * wire.hops[source, target])
    return float(wire.latency_s[source, target] + wire.tensor_bytes[tensor] / wire.bandwidth[source, target])


@inner
def fits(unit: int, device: int, room: Room) -> bool:
    """True if the unit may run on the device and has room beside what is there; `baselines.memory.Allowance`."""
    needed = room.unit_bytes[unit] + max(room.largest_bytes[device], room.working_bytes[unit])
    return bool(room.allowed[unit, device] and room.used_bytes[device] + needed <= room.capacity_bytes[device])


@inner
def charge(unit: int, device: int, room: Room) -> None:
    """Place the unit on the device."""
    for d in range(len(room.memory_owner)):
        if room.memory_owner[d] == room.memory_owner[device]:
            room.used_bytes[d] += room.unit_bytes[unit]
            room.largest_bytes[d] = max(room.largest_bytes[d], room.working_bytes[unit])


@inner
def added_transfer(
    unit: int,
    device: IntArray,
    present: BoolArray,
    units: Members,
    inputs: Inputs,
    output_ptr: IntArray,
    wire: Wire,
    seen: IntArray,
    result: FloatArray,
) -> None:
    """Seconds of transfers between the unit on each device, float64 [D], and what is placed.

    ``present`` (bool [m, D]) says where a placed op reads a tensor: it is sent there once, whoever reads it. ``seen``
    [m] is the last unit whose reading of a tensor was counted.
    """
    for d in range(len(result)):
        result[d] = 0.0
    for k in range(units.ptr[unit], units.ptr[unit + 1]):
        op = units.op[k]
        for j in range(inputs.ptr[op], inputs.ptr[op + 1]):
            t = inputs.tensor[j]
            maker = units.unit_of[inputs.producer[t]]
            # Not placed yet, of the unit itself, or read by another of its ops too: each tensor comes once.
            if device[maker] < 0 or maker == unit or seen[t] == unit:
                continue
            seen[t] = unit
            for d in range(len(result)):
                if not present[t, d]:
                    result[d] += transfer(t, device[maker], d, wire)
        # Tensors of the unit that placed ops read would have to be sent to them.
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for target in range(len(result)):
                if present[t, target]:
                    for d in range(len(result)):
                        result[d] += transfer(t, d, target, wire)


@entry
def place(
    order: IntArray,
    multi_objective: bool,
    units: Members,
    inputs: Inputs,
    output_ptr: IntArray,
    wire: Wire,
    unit_s: FloatArray,
    importance: FloatArray,
    slowness: FloatArray,
    room: Room,
    device: IntArray,
) -> int:
    """Fill ``device`` (int64 [U]); returns the first unit without a feasible device, or -1.

    Terms: Traffic and Execution, and where ``multi_objective`` is set Memory and Importance too.
    """
    n_devices, n_tensors = len(slowness), len(inputs.producer)
    present = np.zeros((n_tensors, n_devices), np.bool_)
    seen = np.full(n_tensors, -1, np.int64)
    # All scratch is made here: the loop allocates nothing.
    traffic, load_s = np.empty(n_devices), np.zeros(n_devices)
    feasible = np.empty(n_devices, np.bool_)
    for unit in range(len(device)):
        device[unit] = -1
    for unit in order:
        added_transfer(unit, device, present, units, inputs, output_ptr, wire, seen, traffic)
        # Terms are relative to the largest over the devices that come into question.
        most_traffic, most_s, least_slow = 0.0, 0.0, np.inf
        for d in range(n_devices):
            feasible[d] = fits(unit, d, room)
            if feasible[d]:
                most_traffic = max(most_traffic, traffic[d])
                most_s = max(most_s, load_s[d] + unit_s[unit, d])
                least_slow = min(least_slow, slowness[d])
        best, best_product = -1, np.inf
        for d in range(n_devices):
            if not feasible[d]:
                continue
            # Where all devices are alike in a term it must not decide: SMALLEST for each.
            product = max(SMALLEST, traffic[d] / most_traffic) if most_traffic > 0 else SMALLEST
            product *= max(SMALLEST, (load_s[d] + unit_s[unit, d]) / most_s) if most_s > 0 else SMALLEST
            if multi_objective:
                full = (room.used_bytes[d] + room.unit_bytes[unit]) / max(1, room.capacity_bytes[d])
                product *= max(SMALLEST, full)
                relative_speed = least_slow / slowness[d] if slowness[d] > 0 else 1.0
                product *= max(SMALLEST, 1.0 - importance[unit] * relative_speed)
            # The first device wins among equals.
            if product < best_product:
                best, best_product = d, product
        # The caller tightens or relaxes the account, and tries again.
        if best < 0:
            return int(unit)
        device[unit] = best
        charge(unit, best, room)
        load_s[best] += unit_s[unit, best]
        # From now on what it reads is there, for whoever else reads it.
        for k in range(units.ptr[unit], units.ptr[unit + 1]):
            for j in range(inputs.ptr[units.op[k]], inputs.ptr[units.op[k] + 1]):
                present[inputs.tensor[j], best] = True
    return -1
