"""Room for one step of `env.simulation.kernel`, and the memory that it takes over time.

Memory is summed up after the step, in buckets of time; only buckets that may hold the peak are sorted.
"""

# Letters
# g, s, out   graph, state and output, of bare pointers; x   transfers so far
# i   an op; t, a tensor; e, an edge; d, a device; k, a position

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from env.jit import allocating, entry, inlined, inner
from env.simulation.pieces import MOST_PER_SECOND, clear_buckets, note_change, peak_within, pointers
from env.simulation.step_records import Arrays, Index, Output, StepSizes, StepState

if TYPE_CHECKING:
    pass


@inner
def sizes_of(g: Arrays, n_links: int) -> StepSizes:
    """StepSizes of a problem."""
    n, n_kinds = g.kind_s.shape
    return StepSizes(n, len(g.tensor_bytes), len(g.consumer), len(g.owner), n_kinds, n_links, g.route.shape[2])


@inner
def buckets_for(n: int, n_devices: int) -> int:
    """Buckets of time per device for the memory sum: a few changes of memory in each."""
    return max(16, n // n_devices)


@allocating
def new_state(size: StepSizes) -> StepState:
    """Memory for `run`; reusable."""
    n, e, n_devices = size.n, size.e, size.n_devices
    changes = 2 * n + size.m + 2 * e
    buckets = n_devices * buckets_for(n, n_devices)
    return StepState(
        priority=np.empty(n),
        edge_s=np.empty(e),
        arrival_s=np.empty(e),
        op_s=np.empty(n),
        missing=np.empty(n, np.int32),
        ready_s=np.empty(n),
        copy_of=np.empty(e, np.int32),
        base=np.empty(n_devices + 1, np.int32),
        ready=np.empty(n, np.int32),
        future=np.empty(n, np.int32),
        n_ready=np.empty(n_devices, np.int32),
        n_future=np.empty(n_devices, np.int32),
        running=np.empty(n_devices, np.int32),
        next_s=np.empty(n_devices),
        never=np.empty(n_devices),
        pair_bytes=np.empty(n_devices * n_devices),
        link_free=np.empty(size.n_links + 2),
        sent=np.empty(n_devices + 1, np.int32),
        free_s=np.empty(size.m + e),
        bucket_in=np.empty(buckets, np.int64),
        bucket_out=np.empty(buckets, np.int64),
        bucket_head=np.empty(buckets, np.int32),
        change_s=np.empty(changes),
        change_bytes=np.empty(changes, np.int64),
        change_next=np.empty(changes, np.int32),
        sorted_change=np.empty(changes, np.int32),
    )


@allocating
def new_output(size: StepSizes) -> Output:
    """Memory for the results of `run`; reusable."""
    n, e = size.n, size.e
    return Output(
        busy_s=np.empty(size.n_devices),
        peak_bytes=np.empty(size.n_devices, np.int64),
        link_bytes=np.empty(size.n_links),
        op_start=np.empty(n),
        op_end=np.empty(n),
        op_rank=np.empty(n, np.int32),
        transfer_tensor=np.empty(e + 1, np.int32),
        transfer_pair=np.empty(e + 1, np.int32),
        transfer_start=np.empty(e + 1),
        transfer_end=np.empty(e + 1),
    )


@inlined
def _note_changes(
    g: Arrays,
    s: StepState,
    out: Output,
    device: Index,
    size: StepSizes,
    n_transfers: int,
    buckets: int,
    per_second: float,
) -> None:
    """Fill the buckets of the devices whose memory it is with every allocation and free of the step."""
    n, m, n_devices = size.n, size.m, size.n_devices
    clear_buckets(s, n_devices * buckets)
    # A tensor is held until its producer has ended, it has been sent everywhere, and all on its device have read it.
    for t in range(m):
        s.free_s[t] = out.op_end[g.tensor_producer[t]]
    for x in range(n_transfers):
        t = out.transfer_tensor[x]
        s.free_s[m + x] = out.transfer_end[x]
        s.free_s[t] = max(s.free_s[t], out.transfer_end[x])
    for e in range(size.e):
        end = out.op_end[g.consumer[e]]
        copy = s.copy_of[e]
        s.free_s[copy] = end if end > s.free_s[copy] else s.free_s[copy]
    k = 0
    for i in range(n):
        d = g.owner[device[i]]
        added = g.workspace_bytes[i] + g.output_bytes[i]
        if added > 0:
            k = note_change(s, d * buckets, buckets, per_second, out.op_start[i], added, k)
        if g.workspace_bytes[i] > 0:
            k = note_change(s, d * buckets, buckets, per_second, out.op_end[i], -g.workspace_bytes[i], k)
    for x in range(n_transfers):
        t = out.transfer_tensor[x]
        d = g.owner[out.transfer_pair[x] % n_devices]
        held = g.tensor_bytes[t]
        # Within one memory nothing is copied: who reads it there reads the tensor itself.
        if d == g.owner[device[g.tensor_producer[t]]]:
            s.free_s[t] = max(s.free_s[t], s.free_s[m + x])
        elif held > 0:
            k = note_change(s, d * buckets, buckets, per_second, out.transfer_start[x], held, k)
            k = note_change(s, d * buckets, buckets, per_second, s.free_s[m + x], -held, k)
    for t in range(m):
        if g.memory_bytes[t] > 0:
            d = g.owner[device[g.tensor_producer[t]]]
            k = note_change(s, d * buckets, buckets, per_second, s.free_s[t], -g.memory_bytes[t], k)


@inner
def memory(
    g: Arrays, s: StepState, out: Output, device: Index, size: StepSizes, n_transfers: int, step_s: float
) -> None:
    """Fill ``out.peak_bytes``."""
    n, n_devices = size.n, size.n_devices
    for d in range(n_devices):
        out.peak_bytes[d] = 0
    for i in range(n):
        out.peak_bytes[g.owner[device[i]]] += g.kept_bytes[i]
    if step_s == 0.0:  # nothing has time to be there but what stays
        for i in range(n):
            out.peak_bytes[g.owner[device[i]]] += g.output_bytes[i]
        for t in range(size.m):
            out.peak_bytes[g.owner[device[g.tensor_producer[t]]]] -= g.memory_bytes[t]
        return
    buckets = buckets_for(n, n_devices)
    per_second = min(buckets / step_s, MOST_PER_SECOND)
    _note_changes(g, s, out, device, size, n_transfers, buckets, per_second)
    for d in range(n_devices):
        kept = out.peak_bytes[d]
        peak = kept
        now = kept
        # First pass: the ends of buckets, a lower bound that leaves few buckets to the second.
        for bucket in range(d * buckets, (d + 1) * buckets):
            now += s.bucket_in[bucket] - s.bucket_out[bucket]
            peak = max(peak, now)
        now = kept
        for bucket in range(d * buckets, (d + 1) * buckets):
            if now + s.bucket_in[bucket] > peak:
                peak = peak_within(s, bucket, now, peak)
            now += s.bucket_in[bucket] - s.bucket_out[bucket]
        out.peak_bytes[d] = peak


@inner
def _memory_in(
    graph: Arrays, state: StepState, output: Output, device: Index, size: StepSizes, n_transfers: int, step_s: float
) -> None:
    g = pointers(graph)
    s = pointers(state)
    out = pointers(output)
    memory(g, s, out, device, size, n_transfers, step_s)


@entry
def memory_of(graph: Arrays, output: Output, device: Index, copy_of: Index, n_transfers: int, step_s: float) -> None:
    """Fill ``output.peak_bytes`` from the times in ``output``, which `sequence_kernel` finds its own way.

    Args:
        graph, output: `Arrays` and `Output`.
        device: int32 [n].
        copy_of: int32 [e], as in `StepState`; copy ``m + x`` is the x-th transfer of ``output``.
    """
    size = sizes_of(graph, len(output.link_bytes))
    state = new_state(size)
    for e in range(len(copy_of)):  # an assignment of arrays checks shapes, which takes two seconds to compile
        state.copy_of[e] = copy_of[e]
    # A call of its own: numba would free `state` here before the pointers to it are used.
    _memory_in(graph, state, output, device, size, n_transfers, step_s)
