"""Compiled bookkeeping of the hierarchical policy: what groups weigh, what placing one would cost, orders of ops."""

# Letters
# G, D, U   numbers of groups, devices and units; m, of groupings, or of tensors
# k   a sample; w, its grouping; g, a group; d, q, devices; p, t, positions in the sequence of groups
# i   an op; c, a consumer; x, an edge

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from env.jit import entry, parallel_entry, prange

if TYPE_CHECKING:
    from graphs.opgraph import FloatArray, IntArray

N_FEATURES = 6  # of a device, when a group is to be placed (see `device_features`)


@entry
def group_totals(
    group: IntArray,
    unit_of: IntArray,
    op_s: FloatArray,
    kept_bytes: IntArray,
    tensor_producer: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    transfer_s: FloatArray,
    n_groups: int,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of every group on each device [G, D], bytes kept [G], seconds of transfers from group to group [G, G].

    A tensor counts once for each group that reads it. ``group`` is int64 [U], ``unit_of`` int64 [n].
    """
    n, n_devices = op_s.shape
    seconds = np.zeros((n_groups, n_devices))
    kept = np.zeros(n_groups)
    wire_s = np.zeros((n_groups, n_groups))
    # Ops first, then tensors: neither is in order of groups.
    for i in range(n):
        g = group[unit_of[i]]
        kept[g] += kept_bytes[i]
        for d in range(n_devices):
            seconds[g, d] += op_s[i, d]
    # The last tensor counted for each group, which need not be cleared between tensors.
    last = np.full(n_groups, -1, np.int64)
    for t in range(len(tensor_producer)):
        source = group[unit_of[tensor_producer[t]]]
        for x in range(consumer_ptr[t], consumer_ptr[t + 1]):
            target = group[unit_of[consumers[x]]]
            # A tensor is sent to a group once, whichever of its ops read it.
            if target != source and last[target] != t:
                last[target] = t
                wire_s[source, target] += transfer_s[t]
    return seconds, kept, wire_s


@entry
def device_features(
    t: int,
    which: IntArray,
    sequence: IntArray,
    seconds: FloatArray,
    kept: FloatArray,
    wire_s: FloatArray,
    capacity: FloatArray,
    scale_s: float,
    device: IntArray,
    finish: FloatArray,
    free: FloatArray,
    load: FloatArray,
    used: FloatArray,
    out: NDArray[np.float32],
) -> None:
    """Features of placing the next group on each device, for k partial placements: ``out`` float32 [k, D, 6].

    Features: the device of the group before; the share of the group's transfers that already are there; the estimated
    finish, and the time of the group, over those of the best device; load so far over the mean load; memory used.

    Args:
        t: how many groups are placed.
        which: int64 [k], the grouping (of m) of each sample.
        sequence: int64 [m, G], the groups as they are placed.
        seconds, kept, wire_s: as `group_totals` gives them, each with a leading axis [m].
        capacity: float64 [D], bytes.
        scale_s: what seconds are divided by.
        device: int64 [k, G], the devices of the first t groups of the sequence.
        finish: float64 [k, G], their estimated ends.
        free, load, used: float64 [k, D]: when each device is free, its seconds of work and its bytes.
    """
    n_devices = seconds.shape[2]
    there, ready = np.empty(n_devices), np.empty(n_devices)
    for k in range(len(device)):
        w = which[k]
        g = sequence[w, t]
        there[:] = 0.0
        ready[:] = 0.0
        # Not 0, by which it divides.
        share = 1e-30
        for p in range(t):
            before, q = sequence[w, p], device[k, p]
            # Either way: a placed group may read from this one as well.
            both = wire_s[w, before, g] + wire_s[w, g, before]
            if both > 0:
                share += both
                there[q] += both
                # But only what this one reads can make it wait.
                if wire_s[w, before, g] > 0:
                    # It is there at once, or after a transfer of mean length.
                    for d in range(n_devices):
                        ready[d] = max(ready[d], finish[k, p] + (0.0 if d == q else wire_s[w, before, g]))
        best, fastest, mean_load = np.inf, np.inf, 0.0
        # First what the features are relative to, then the features.
        for d in range(n_devices):
            best = min(best, max(free[k, d], ready[d]) + seconds[w, g, d])
            fastest = min(fastest, seconds[w, g, d])
            mean_load += load[k, d] / n_devices
        for d in range(n_devices):
            # Clipped, so that one bad device does not drown the others.
            end = max(free[k, d], ready[d]) + seconds[w, g, d]
            out[k, d, 0] = 1.0 if t > 0 and device[k, t - 1] == d else 0.0
            out[k, d, 1] = there[d] / share
            out[k, d, 2] = min(3.0, (end - best) / scale_s)
            out[k, d, 3] = min(3.0, (seconds[w, g, d] - fastest) / scale_s)
            out[k, d, 4] = max(-3.0, min(3.0, (load[k, d] - mean_load) / (4 * scale_s)))
            out[k, d, 5] = min(2.0, (used[k, d] + kept[w, g]) / capacity[d])


@entry
def place(
    t: int,
    chosen: IntArray,
    which: IntArray,
    sequence: IntArray,
    seconds: FloatArray,
    kept: FloatArray,
    wire_s: FloatArray,
    device: IntArray,
    finish: FloatArray,
    free: FloatArray,
    load: FloatArray,
    used: FloatArray,
) -> None:
    """Note in every partial placement that its next group goes to ``chosen`` int64 [k]."""
    # The same estimate as `device_features`, for the one device that was chosen.
    for k in range(len(device)):
        w, d = which[k], chosen[k]
        g = sequence[w, t]
        start = free[k, d]
        for p in range(t):
            wire = wire_s[w, sequence[w, p], g]
            if wire > 0:
                start = max(start, finish[k, p] + (0.0 if device[k, p] == d else wire))
        finish[k, t] = start + seconds[w, g, d]
        free[k, d] = finish[k, t]
        load[k, d] += seconds[w, g, d]
        used[k, d] += kept[w, g]
        device[k, t] = d


@entry
def path(
    device: IntArray,
    topological: IntArray,
    op_s: FloatArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    transfer_s: FloatArray,
    path_s: FloatArray,
) -> None:
    """Seconds from the start of each op to the end of the graph, float64 [n], on ``device`` int64 [n]."""
    # Consumers first.
    for at in range(len(topological) - 1, -1, -1):
        i = topological[at]
        longest = 0.0
        for t in range(output_ptr[i], output_ptr[i + 1]):
            for x in range(consumer_ptr[t], consumer_ptr[t + 1]):
                c = consumers[x]
                longest = max(longest, path_s[c] + (0.0 if device[c] == device[i] else transfer_s[t]))
        path_s[i] = longest + op_s[i, device[i]]


@parallel_entry
def orders(
    device: IntArray,
    shift_s: FloatArray,
    topological: IntArray,
    op_s: FloatArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    transfer_s: FloatArray,
    out: IntArray,
) -> None:
    """Places in line, int64 [k, n]: ops by falling `path` on their devices, moved by a shift.

    Args:
        device: int64 [k, n].
        shift_s: float64 [k, n], seconds added to the path of each op.
        transfer_s: float64 [m], seconds of each tensor between two devices.
    """
    n = len(topological)
    for k in prange(len(device)):
        # Scratch of its own for each turn, which may run on any thread.
        path_s = np.empty(n)
        path(device[k], topological, op_s, output_ptr, consumer_ptr, consumers, transfer_s, path_s)
        # A stable sort: equal ops stay in order of their numbers.
        for place_in_line, i in enumerate(np.argsort(-(path_s + shift_s[k]), kind="mergesort")):
            out[k, i] = place_in_line
