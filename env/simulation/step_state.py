"""Records of one step for the compiled loops, room for them, and the memory that the step takes over time.

Memory is summed up after the step, in buckets of time; only buckets that may hold the peak are sorted.
"""

# Letters
# g, s, out   graph, state and output, of bare pointers; x   transfers so far
# i   an op; t, a tensor; e, an edge; d, a device; k, a position

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.jit import allocating, entry, inlined, inner
from env.problem import Problem
from env.simulation.pieces import MOST_PER_SECOND, clear_buckets, note_change, peak_within, pointers
from graphs.opgraph import FloatArray, IntArray

Index = NDArray[np.int32]


class Arrays(NamedTuple):
    """A `Problem` for the kernel: n ops, m tensors, e edges, D devices of K kinds, L links, H in the longest route."""

    kind_s: FloatArray  # [n, K], seconds of each op on each kind of device
    kind_of: Index  # [D]
    owner: Index  # [D], device in whose memory each works
    edge_ptr: Index  # [n + 1], edges an op feeds
    consumer: Index  # [e]
    edge_tensor: Index  # [e]
    input_ptr: Index  # [n + 1]
    input_edge: Index  # [e], edges grouped by consumer
    edge_bytes: FloatArray  # [e], 0 where the transfer time is measured
    edge_latency: FloatArray  # [e], 0 where the transfer time is measured, else 1
    edge_measured_s: FloatArray  # [e], per link of the route; 0 where modelled
    topological: Index  # [n]
    tensor_bytes: IntArray  # [m], sent
    memory_bytes: IntArray  # [m], held by the producer's device: 0 in place
    tensor_producer: IntArray  # [m]
    kept_bytes: IntArray  # [n], from the beginning
    workspace_bytes: IntArray  # [n]
    output_bytes: IntArray  # [n], sum over the op's tensors, and what comes with its start to stay
    latency_s: FloatArray  # [D, D]
    bandwidth: FloatArray  # [D, D]
    hops: FloatArray  # [D, D], links of the route
    route: Index  # [D, D, H], links to wait for, padded by repeating; L (always free) where there is none
    route_held: Index  # [D, D, H], links to occupy likewise; L + 1 (never waited for) where there is none
    route_ptr: IntArray  # [D * D + 1], routes without padding
    route_link: IntArray  # [...]


class StepState(NamedTuple):
    """Scratch of one simulation."""

    priority: FloatArray  # [n], higher first
    edge_s: FloatArray  # [e], transfer time of each edge, 0 on one device
    arrival_s: FloatArray  # [e], when the tensor is (or will be) on its consumer's device; infinite until requested
    op_s: FloatArray  # [n], time of each op where it is placed
    missing: Index  # [n], inputs not requested yet
    ready_s: FloatArray  # [n], arrival of the last input requested so far
    copy_of: Index  # [e], the copy each edge reads
    base: Index  # [D + 1], where a device's ops begin in the next two
    ready: Index  # [n], heap by priority (under MSR a list) of the ops that may start
    future: Index  # [n], heap by ready time of those whose inputs are all on their way
    n_ready: Index  # [D]
    n_future: Index  # [D]
    running: Index  # [D], op or -1
    next_s: FloatArray  # [D], end of the running op, or, idle, when the next op may be ready
    never: FloatArray  # [D], infinite while an op runs, else 0
    pair_bytes: FloatArray  # [D * D]
    link_free: FloatArray  # [L + 2], when the last transfer requested so far leaves each link
    sent: Index  # [D + 1], last transfer to each device, so that a tensor is sent only once
    free_s: FloatArray  # [m + e], last use of each copy
    bucket_in: IntArray  # [D * buckets], bytes allocated
    bucket_out: IntArray  # [D * buckets], bytes freed
    bucket_head: Index  # [D * buckets], last change of memory in the bucket, or -1
    change_s: FloatArray  # [2 n + m + 2 e], instants of changes of memory
    change_bytes: IntArray  # [2 n + m + 2 e]
    change_next: Index  # [2 n + m + 2 e], previous change of the same bucket, or -1
    sorted_change: Index  # [2 n + m + 2 e]


class Output(NamedTuple):
    """Arrays that `run` leaves behind (x: up to e transfers, in order of request)."""

    busy_s: FloatArray  # [D]
    peak_bytes: IntArray  # [D]
    link_bytes: FloatArray  # [L]
    op_start: FloatArray  # [n]
    op_end: FloatArray  # [n]
    op_rank: Index  # [n], place in the sequence of starts
    transfer_tensor: Index  # [e + 1]
    transfer_pair: Index  # [e + 1]
    transfer_start: FloatArray  # [e + 1]
    transfer_end: FloatArray  # [e + 1]


class StepSizes(NamedTuple):
    """Numbers of ops, tensors, edges, devices, kinds of devices, links, and links of the longest route."""

    n: int
    m: int
    e: int
    n_devices: int
    n_kinds: int
    n_links: int
    n_hops: int


def arrays_of(problem: Problem) -> Arrays:
    """A problem as the kernels take it."""
    graph = problem.graph
    edge_tensor = graph.edge_list[2]
    measured_s = graph.tensor_transfer_s[edge_tensor]
    modelled = np.isnan(measured_s)
    route_ptr, route_link = problem.route
    waited, held = _padded_routes(problem)
    return Arrays(
        kind_s=problem.kind_s,
        kind_of=problem.kind_of.astype(np.int32),
        owner=problem.memory_owner.astype(np.int32),
        edge_ptr=graph.consumer_ptr[graph.output_ptr].astype(np.int32),
        consumer=graph.consumers.astype(np.int32),
        edge_tensor=edge_tensor.astype(np.int32),
        input_ptr=graph.inputs[0].astype(np.int32),
        input_edge=np.lexsort((edge_tensor, graph.consumers)).astype(np.int32),
        edge_bytes=np.where(modelled, graph.tensor_bytes[edge_tensor], 0).astype(np.float64),
        edge_latency=modelled.astype(np.float64),
        edge_measured_s=np.where(modelled, 0.0, measured_s),
        topological=graph.topological_order.astype(np.int32),
        tensor_bytes=graph.tensor_bytes,
        memory_bytes=graph.tensor_memory_bytes,
        tensor_producer=graph.tensor_producer,
        kept_bytes=graph.standing_bytes,
        workspace_bytes=graph.workspace_bytes,
        output_bytes=graph.output_bytes + graph.coming_bytes,
        latency_s=problem.latency_s,
        bandwidth=problem.bandwidth_bytes_per_s,
        hops=problem.hops.reshape(-1).astype(np.float64),
        route=waited,
        route_held=held,
        route_ptr=route_ptr,
        route_link=route_link,
    )


def _padded_routes(problem: Problem) -> tuple[Index, Index]:
    """``(route, route_held)`` of `Arrays`: all of one length, so that the loop over them never mispredicts."""
    links, n_devices = problem.cluster.links, problem.cluster.n_devices
    ptr, route_link = problem.route
    pair = np.repeat(np.arange(n_devices * n_devices), np.diff(ptr))
    waits = np.array([link.exclusive for link in links], dtype=np.bool_)[route_link]
    pair, link = pair[waits], route_link[waits]
    count = np.bincount(pair, minlength=n_devices * n_devices)
    longest = max(1, int(count.max()))
    waited = np.full((n_devices * n_devices, longest), len(links), np.int32)
    held = waited + np.int32(1)
    some = np.flatnonzero(count)
    last = link[np.cumsum(count)[some] - 1]
    waited[some] = held[some] = last[:, None]
    place = np.arange(len(pair)) - (np.cumsum(count) - count)[pair]
    waited[pair, place] = held[pair, place] = link
    shape = (n_devices, n_devices, longest)
    return waited.reshape(shape), held.reshape(shape)


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
