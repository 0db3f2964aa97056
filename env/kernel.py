"""The compiled event loop behind `env.simulator`. It is docs/score.md, on flat arrays.

Names: an *edge* is a (tensor, consumer) pair; a *copy* is a tensor on one device, numbered by its tensor at the producer
and by ``m + transfer`` at a receiver; a *pair* ``a * D + b`` is an ordered pair of devices.

Why it is fast: a transfer's start and end are known when it is requested (links serve first come, first served), and
transfers of one pair end in the order they were requested. So each pair is a linked list of which only the head is an
event, and the next event is the least of one number per device for ops and one for arrivals: no event heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from graphs.opgraph import FloatArray, IntArray

LONGEST_PATH, FIFO, MSR, EXPLICIT = 0, 1, 2, 3
INF = np.inf


class Arrays(NamedTuple):
    """A `Problem` for the kernel: n ops, m tensors, e edges, D devices, L links."""

    op_s: FloatArray  # [n, D]
    output_ptr: IntArray  # [n + 1]
    tensor_bytes: IntArray  # [m]
    tensor_transfer_s: FloatArray  # [m], NaN where modelled
    consumer_ptr: IntArray  # [m + 1]
    consumers: IntArray  # [e]
    input_ptr: IntArray  # [n + 1]
    input_edge: IntArray  # [e], edges grouped by consumer
    edge_tensor: IntArray  # [e]
    topological: IntArray  # [n]
    kept_bytes: IntArray  # [n]
    workspace_bytes: IntArray  # [n]
    output_bytes: IntArray  # [n], sum over the op's tensors
    latency_s: FloatArray  # [D, D]
    bandwidth: FloatArray  # [D, D]
    route_ptr: IntArray  # [D * D + 1]
    route_link: IntArray  # [...]


class State(NamedTuple):
    """Scratch of one simulation. A *pair* array is indexed [target, source]."""

    priority: FloatArray  # [n], higher first
    edge_s: FloatArray  # [e], transfer time of each edge that crosses devices
    missing: IntArray  # [n], inputs not yet on the op's device
    uses: IntArray  # [m + e], outstanding uses of each copy
    copy_of: IntArray  # [e], the copy each edge reads
    heap: IntArray  # [n], ready ops of device d from base[d] on
    base: IntArray  # [D + 1]
    size: IntArray  # [D], ready ops of each device
    running: IntArray  # [D], op
    running_until: FloatArray  # [D], infinite when idle
    changed: IntArray  # [D], 1 when the device may have something to start
    arrival: FloatArray  # [D], least head_time of each target
    head_time: FloatArray  # [D, D], next event of each pair's first transfer, infinite without one
    waiting: IntArray  # [D, D], 1 when that transfer has not started yet
    head: IntArray  # [D, D], first transfer
    tail: IntArray  # [D, D], last transfer
    following: IntArray  # [e], next transfer of the same pair, or -1
    link_free: FloatArray  # [L], when the last transfer requested so far leaves each link
    sent: IntArray  # [D], last transfer to each target, so that a tensor is sent only once
    now_bytes: IntArray  # [D]
    counted_at: FloatArray  # [D], instant of the last change of now_bytes
    order: FloatArray  # [n], explicit order


@njit(cache=True, nogil=True)
def new_state(n, m, n_edges, n_devices, n_links):  # type: ignore[no-untyped-def]
    """Memory for `run`; reusable."""
    return State(
        np.empty(n),
        np.empty(n_edges),
        np.empty(n, np.int64),
        np.empty(m + n_edges, np.int64),
        np.empty(n_edges, np.int64),
        np.empty(n, np.int64),
        np.empty(n_devices + 1, np.int64),
        np.empty(n_devices, np.int64),
        np.empty(n_devices, np.int64),
        np.empty(n_devices),
        np.empty(n_devices, np.int64),
        np.empty(n_devices),
        np.empty((n_devices, n_devices)),
        np.empty((n_devices, n_devices), np.int64),
        np.empty((n_devices, n_devices), np.int64),
        np.empty((n_devices, n_devices), np.int64),
        np.empty(n_edges, np.int64),
        np.empty(n_links),
        np.empty(n_devices, np.int64),
        np.empty(n_devices, np.int64),
        np.empty(n_devices),
        np.empty(n),
    )


class Output(NamedTuple):
    """What `run` leaves behind (x: up to e transfers, in order of request)."""

    busy_s: FloatArray  # [D]
    peak_bytes: IntArray  # [D]
    link_bytes: FloatArray  # [L]
    op_start: FloatArray  # [n]
    op_end: FloatArray  # [n]
    transfer_tensor: IntArray  # [e]
    transfer_source: IntArray  # [e]
    transfer_target: IntArray  # [e]
    transfer_start: FloatArray  # [e]
    transfer_end: FloatArray  # [e]


@njit(cache=True, nogil=True)
def new_output(n, n_edges, n_devices, n_links):  # type: ignore[no-untyped-def]
    """Memory for the results of `run`; reusable."""
    return Output(
        np.empty(n_devices),
        np.empty(n_devices, np.int64),
        np.empty(n_links),
        np.empty(n),
        np.empty(n),
        np.empty(n_edges, np.int64),
        np.empty(n_edges, np.int64),
        np.empty(n_edges, np.int64),
        np.empty(n_edges),
        np.empty(n_edges),
    )


@intrinsic
def pointers(typing_context, arrays):  # type: ignore[no-untyped-def]
    """The same named tuple holding bare pointers, for the loop below.

    numba counts references to every array it touches, which here costs several times the work itself; it does not count
    pointers. Two-dimensional arrays become flat ones. The caller keeps the arrays alive.
    """
    result = types.NamedTuple([types.CPointer(array.dtype) for array in arrays.types], arrays.instance_class)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        values = []
        for k, array in enumerate(arrays.types):
            value = builder.extract_value(args[0], k)
            values.append(context.make_array(array)(context, builder, value).data)
        return context.make_tuple(builder, result, values)

    return result(arrays), codegen


@njit(inline="always")
def _remaining_path(g, s, device, n, n_devices):  # type: ignore[no-untyped-def]
    """Fill ``s.priority`` with longest remaining paths (s) and ``s.edge_s`` with transfer times under ``device``."""
    for k in range(n - 1, -1, -1):
        i = g.topological[k]
        a = device[i]
        longest = 0.0
        for t in range(g.output_ptr[i], g.output_ptr[i + 1]):
            for e in range(g.consumer_ptr[t], g.consumer_ptr[t + 1]):
                c = g.consumers[e]
                b = device[c]
                rest = s.priority[c]
                if a != b:
                    pair = a * n_devices + b
                    if g.tensor_transfer_s[t] >= 0.0:
                        seconds = g.tensor_transfer_s[t] * (g.route_ptr[pair + 1] - g.route_ptr[pair])
                    else:
                        seconds = g.latency_s[pair] + g.tensor_bytes[t] / g.bandwidth[pair]
                    s.edge_s[e] = seconds
                    rest = seconds + rest
                longest = max(longest, rest)
        s.priority[i] = g.op_s[i * n_devices + a] + longest


@njit(inline="always")
def _push(heap, base, size, key, item):  # type: ignore[no-untyped-def]
    """Add ``item`` to the heap at ``heap[base:base + size]``; the largest key leaves first, then the lower item."""
    k = size
    value = key[item]
    while k > 0:
        parent = (k - 1) >> 1
        other = heap[base + parent]
        if key[other] > value or (key[other] == value and other < item):
            break
        heap[base + k] = other
        k = parent
    heap[base + k] = item


@njit(inline="always")
def _pop(heap, base, size, key):  # type: ignore[no-untyped-def]
    """Remove and return the first item of a heap of ``size`` items."""
    top = heap[base]
    size -= 1
    item = heap[base + size]
    value = key[item]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        first = heap[base + child]
        if child + 1 < size:
            second = heap[base + child + 1]
            if key[second] > key[first] or (key[second] == key[first] and second < first):
                first = second
                child += 1
        if key[first] < value or (key[first] == value and item < first):
            break
        heap[base + k] = first
        k = child
    heap[base + k] = item
    return top


@njit(inline="always")
def _count(s, peak_bytes, d, now, added):  # type: ignore[no-untyped-def]
    """Change a device's memory. The peak only sees what lasts beyond an instant: frees come before allocations."""
    if s.counted_at[d] < now:
        if s.now_bytes[d] > peak_bytes[d]:
            peak_bytes[d] = s.now_bytes[d]
        s.counted_at[d] = now
    s.now_bytes[d] += added


@njit(inline="always")
def _make_ready(s, mode, d, i, now):  # type: ignore[no-untyped-def]
    if mode == FIFO:
        s.priority[i] = -now
    _push(s.heap, s.base[d], s.size[d], s.priority, i)
    s.size[d] += 1


@njit(inline="always")
def _msr_score(g, s, device, i):  # type: ignore[no-untyped-def]
    score = 0
    for e in range(g.consumer_ptr[g.output_ptr[i]], g.consumer_ptr[g.output_ptr[i + 1]]):
        c = g.consumers[e]
        score += 1 + (device[c] != device[i]) + (s.missing[c] == 1) + 5 * (s.running_until[device[c]] == INF)
    return score


@njit(inline="always")
def _take_msr(g, s, device, d):  # type: ignore[no-untyped-def]
    """Remove and return the ready op of ``d`` with the largest MSR score (Mayer et al. 2017)."""
    first = s.base[d]
    last = first + s.size[d] - 1
    best_at = first
    best = s.heap[first]
    best_score = _msr_score(g, s, device, best)
    for at in range(first + 1, last + 1):
        i = s.heap[at]
        score = _msr_score(g, s, device, i)
        if score > best_score or (
            score == best_score
            and (s.priority[i] > s.priority[best] or (s.priority[i] == s.priority[best] and i < best))
        ):
            best_at, best, best_score = at, i, score
    s.heap[best_at] = s.heap[last]
    return best


@njit(inline="always")
def _start_op(g, s, out, device, mode, n_devices, d, now):  # type: ignore[no-untyped-def]
    """An idle device with ready ops starts the best of them; returns when it ends."""
    if mode == MSR:
        i = _take_msr(g, s, device, d)
    else:
        i = _pop(s.heap, s.base[d], s.size[d], s.priority)
    s.size[d] -= 1
    seconds = g.op_s[i * n_devices + d]
    s.running[d] = i
    s.running_until[d] = now + seconds
    out.op_start[i] = now
    out.op_end[i] = now + seconds
    out.busy_s[d] += seconds
    _count(s, out.peak_bytes, d, now, g.workspace_bytes[i] + g.output_bytes[i])
    return now + seconds


@njit(inline="always")
def _request(g, s, out, n_devices, x, t, e, a, b, now):  # type: ignore[no-untyped-def]
    """Transfer ``x`` of tensor ``t`` from ``a`` to ``b`` joins the queues of all links of its route."""
    pair = a * n_devices + b
    start = now
    for k in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
        start = max(start, s.link_free[g.route_link[k]])
    end = start + s.edge_s[e]
    payload = g.tensor_bytes[t]
    for k in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
        s.link_free[g.route_link[k]] = end
        out.link_bytes[g.route_link[k]] += payload
    out.transfer_tensor[x] = t
    out.transfer_source[x] = a
    out.transfer_target[x] = b
    out.transfer_start[x] = start
    out.transfer_end[x] = end
    s.following[x] = -1
    if s.head_time[b * n_devices + a] == INF:
        _set_head(g, s, out, n_devices, x, a, b, now)
        s.arrival[b] = min(s.arrival[b], s.head_time[b * n_devices + a])
    else:
        s.following[s.tail[b * n_devices + a]] = x
    s.tail[b * n_devices + a] = x


@njit(inline="always")
def _set_head(g, s, out, n_devices, x, a, b, now):  # type: ignore[no-untyped-def]
    """Transfer ``x`` becomes the first of its pair: its next event is its start, or, once it has begun, its end."""
    s.head[b * n_devices + a] = x
    if out.transfer_start[x] > now:
        s.waiting[b * n_devices + a] = 1
        s.head_time[b * n_devices + a] = out.transfer_start[x]
    else:
        s.waiting[b * n_devices + a] = 0
        s.head_time[b * n_devices + a] = out.transfer_end[x]
        _count(s, out.peak_bytes, b, now, g.tensor_bytes[out.transfer_tensor[x]])


@njit(inline="always")
def _end_op(g, s, out, device, mode, m, n_devices, d, now, n_transfers):  # type: ignore[no-untyped-def]
    """The op on ``d`` ends: free what only it still used, hand its tensors on; returns the new number of transfers."""
    i = s.running[d]
    s.running_until[d] = INF
    s.changed[d] = 1
    freed = g.workspace_bytes[i]
    for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
        e = g.input_edge[k]
        copy = s.copy_of[e]
        s.uses[copy] -= 1
        if s.uses[copy] == 0:
            freed += g.tensor_bytes[g.edge_tensor[e]]
    for t in range(g.output_ptr[i], g.output_ptr[i + 1]):
        uses = 0
        for e in range(g.consumer_ptr[t], g.consumer_ptr[t + 1]):
            c = g.consumers[e]
            b = device[c]
            if b == d:
                uses += 1
                s.copy_of[e] = t
                s.missing[c] -= 1
                if s.missing[c] == 0:
                    _make_ready(s, mode, d, c, now)
                continue
            x = s.sent[b]
            if x < 0 or out.transfer_tensor[x] != t:
                x = n_transfers
                n_transfers += 1
                uses += 1
                s.sent[b] = x
                s.uses[m + x] = 0
                _request(g, s, out, n_devices, x, t, e, d, b, now)
            s.copy_of[e] = m + x
            s.uses[m + x] += 1
        s.uses[t] = uses
        if uses == 0:
            freed += g.tensor_bytes[t]
    _count(s, out.peak_bytes, d, now, -freed)
    return n_transfers


@njit(inline="always")
def _advance_transfer(g, s, out, device, mode, m, n_devices, b, now):  # type: ignore[no-untyped-def]
    """The first transfer of some pair into ``b`` starts or arrives."""
    a = 0
    while s.head_time[b * n_devices + a] != now:
        a += 1
    x = s.head[b * n_devices + a]
    if s.waiting[b * n_devices + a] == 0:
        t = out.transfer_tensor[x]
        s.uses[t] -= 1
        if s.uses[t] == 0:
            _count(s, out.peak_bytes, a, now, -g.tensor_bytes[t])
        copy = m + x
        for e in range(g.consumer_ptr[t], g.consumer_ptr[t + 1]):
            if s.copy_of[e] == copy:
                c = g.consumers[e]
                s.missing[c] -= 1
                if s.missing[c] == 0:
                    _make_ready(s, mode, b, c, now)
                    s.changed[b] = 1
        x = s.following[x]
        s.head_time[b * n_devices + a] = INF
    if x >= 0:
        _set_head(g, s, out, n_devices, x, a, b, now)
    least = INF
    for k in range(n_devices):
        least = min(least, s.head_time[b * n_devices + k])
    s.arrival[b] = least


@njit(inline="always")
def _prepare(g, s, out, device, mode, n, n_devices, n_links):  # type: ignore[no-untyped-def]
    _remaining_path(g, s, device, n, n_devices)
    for d in range(n_devices):
        s.base[d] = s.size[d] = s.now_bytes[d] = out.peak_bytes[d] = 0
        s.changed[d] = 1
        s.sent[d] = -1
        s.running_until[d] = s.arrival[d] = INF
        s.counted_at[d] = -1.0
        out.busy_s[d] = 0.0
    for pair in range(n_devices * n_devices):
        s.head_time[pair] = INF
    for link in range(n_links):
        s.link_free[link] = out.link_bytes[link] = 0.0
    s.base[n_devices] = 0
    for i in range(n):
        d = device[i]
        s.base[d + 1] += 1
        s.now_bytes[d] += g.kept_bytes[i]
        s.missing[i] = g.input_ptr[i + 1] - g.input_ptr[i]
        if mode == EXPLICIT:
            s.priority[i] = -s.order[i]
        elif mode == FIFO:
            s.priority[i] = 0.0
    for d in range(n_devices):
        s.base[d + 1] += s.base[d]
    for i in range(n):
        if s.missing[i] == 0:
            _make_ready(s, mode, device[i], i, 0.0)


@njit(cache=True, nogil=True)
def run(graph, state, output, device, mode):  # type: ignore[no-untyped-def]
    """Simulate one step. Returns ``(step time s, number of transfers)``; everything else is left in ``output``.

    Args:
        graph, state, output: `Arrays`, `State` (``state.order`` is read in EXPLICIT mode) and `Output`.
        device: int64 [n], device of each op.
        mode: LONGEST_PATH, FIFO, MSR or EXPLICIT.
    """
    n, n_devices = graph.op_s.shape
    m, n_links = len(graph.tensor_bytes), len(output.link_bytes)
    g, s, out = pointers(graph), pointers(state), pointers(output)
    _prepare(g, s, out, device, mode, n, n_devices, n_links)
    n_transfers = 0
    now = -1.0
    while True:
        # The next event: an op's end before an arrival, a lower device first.
        least = INF
        which = -1
        for d in range(n_devices):
            if s.running_until[d] < least:
                least = s.running_until[d]
                which = d
        for d in range(n_devices):
            if s.arrival[d] < least:
                least = s.arrival[d]
                which = n_devices + d
        if least > now:
            # All that happens now has happened: idle devices choose.
            now = max(now, 0.0)
            for d in range(n_devices):
                if s.changed[d] == 1:
                    s.changed[d] = 0
                    if s.size[d] > 0 and s.running_until[d] == INF:
                        end = _start_op(g, s, out, device, mode, n_devices, d, now)
                        if end < least or (end == least and (which >= n_devices or d < which)):
                            least = end
                            which = d
        if which < 0:
            break
        now = least
        if which < n_devices:
            n_transfers = _end_op(g, s, out, device, mode, m, n_devices, which, now, n_transfers)
        else:
            _advance_transfer(g, s, out, device, mode, m, n_devices, which - n_devices, now)
    for d in range(n_devices):
        out.peak_bytes[d] = max(out.peak_bytes[d], s.now_bytes[d])
    return now, n_transfers


@njit(cache=True, parallel=True)
def run_batch(g, devices, mode, orders, step_time_s, busy_s, peak_bytes, link_bytes, bytes_moved):  # type: ignore[no-untyped-def]
    """`run` for every row of ``devices [k, n]``, rows shared out over threads; the last five arrays are outputs [k, ...]."""
    k, n = devices.shape
    m, n_edges, n_links = len(g.tensor_bytes), len(g.consumers), link_bytes.shape[1]
    chunks = min(k, 64)
    for chunk in prange(chunks):
        s = new_state(n, m, n_edges, g.op_s.shape[1], n_links)
        out = new_output(n, n_edges, g.op_s.shape[1], n_links)
        for row in range(chunk, k, chunks):
            if mode == EXPLICIT:
                s.order[:] = orders[row]
            step_time_s[row], count = run(g, s, out, devices[row], mode)
            busy_s[row] = out.busy_s
            peak_bytes[row] = out.peak_bytes
            link_bytes[row] = out.link_bytes
            moved = 0
            for x in range(count):
                moved += g.tensor_bytes[out.transfer_tensor[x]]
            bytes_moved[row] = moved
