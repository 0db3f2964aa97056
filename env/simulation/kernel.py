"""The compiled event loop behind `env.simulation.simulator`. It is docs/score.md, on flat arrays.

Names: an *edge* is a (tensor, consumer) pair; a *copy* is a tensor on one device, numbered by its tensor at the
producer and by ``m + transfer`` at a receiver; a *pair* ``a * D + b`` is an ordered pair of devices, or ``a`` twice.

Why it is fast. Links serve first come, first served, so a transfer's start and end are known when it is requested, and
an op's ready time is known when its last input is requested: only ends of ops are events, one number per device, and no
event queue exists. The loop is limited by mispredicted branches, so a local hand-over is written as a transfer over a
link that is always free, and every route is padded to the same number of links.
"""

# Letters
# g, s, out   graph, state and output, of bare pointers; x   transfers so far
# i   an op; c, a consumer; t, a tensor; e, an edge; d, b, devices; k, a position

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from env.jit import entry, inlined, inner, parallel_entry, prange
from env.simulation.pieces import edge_s, pointers, pop, push
from env.simulation.step_state import (
    Arrays,
    Index,
    Output,
    StepSizes,
    StepState,
    memory,
    new_output,
    new_state,
    sizes_of,
)

if TYPE_CHECKING:
    from graphs.opgraph import FloatArray, IntArray

# Priorities of ready ops, as `env.plan.Priority` numbers them.
LONGEST_PATH, FIFO, MSR, EXPLICIT = 0, 1, 2, 3
INF = np.inf


@inner
def prepare(g: Arrays, s: StepState, out: Output, device: Index, size: StepSizes) -> None:
    """Reset the scratch; fill op and transfer times, and the priorities with the longest remaining paths."""
    n_devices = size.n_devices
    for d in range(n_devices + 1):
        s.base[d] = 0
        s.sent[d] = size.e
    # Row `size.e` stands for no transfer: `sent` points to it until a tensor has arrived on the device.
    out.transfer_tensor[size.e] = -1
    # Consumers first, so that longest paths to the end can be summed up on the way.
    for k in range(size.n - 1, -1, -1):
        i = g.topological[k]
        d = device[i]
        longest = 0.0
        for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
            c = g.consumer[e]
            pair = d * n_devices + device[c]
            seconds = edge_s(g, e, pair)
            s.edge_s[e] = seconds
            s.arrival_s[e] = INF
            rest = seconds + s.priority[c]
            longest = rest if rest > longest else longest
        s.op_s[i] = g.kind_s[i * size.n_kinds + g.kind_of[d]]
        s.priority[i] = s.op_s[i] + longest
        s.missing[i] = g.input_ptr[i + 1] - g.input_ptr[i]
        s.ready_s[i] = 0.0
        s.base[d + 1] += 1
    # The queues of a device lie behind each other in one array, as long as its ops are many.
    for d in range(n_devices):
        s.base[d + 1] += s.base[d]
        s.n_ready[d] = s.n_future[d] = 0
        s.running[d] = -1
        s.next_s[d] = INF
        s.never[d] = 0.0  # infinite while an op runs: what becomes ready cannot start then
        out.busy_s[d] = 0.0
    for pair in range(n_devices * n_devices):
        s.pair_bytes[pair] = 0.0
    for link in range(size.n_links + 2):
        s.link_free[link] = 0.0


@inlined
def _add(s: StepState, mode: int, d: int, i: int, now: float) -> None:
    """The ready time of ``i`` is known now, and may lie in the future."""
    ready_s = s.ready_s[i]
    if mode == FIFO:
        s.priority[i] = -ready_s
    if ready_s <= now:
        _add_ready(s, mode, d, i)
    else:
        push(s.future, s.base[d], s.n_future[d], s.ready_s, -1.0, i)
        s.n_future[d] += 1
    # An idle device wakes up for it; a busy one looks when its op ends.
    start = ready_s + s.never[d]
    s.next_s[d] = start if start < s.next_s[d] else s.next_s[d]


@inlined
def _add_ready(s: StepState, mode: int, d: int, i: int) -> None:
    if mode == MSR:
        # Scores change with time, so that there is nothing to sort by.
        s.ready[s.base[d] + s.n_ready[d]] = i
    else:
        push(s.ready, s.base[d], s.n_ready[d], s.priority, 1.0, i)
    s.n_ready[d] += 1


@inlined
def _end_op(
    g: Arrays,
    s: StepState,
    out: Output,
    device: Index,
    mode: int,
    size: StepSizes,
    d: int,
    now: float,
    x: int,
    tail: FloatArray,
    limit: float,
) -> tuple[int, bool, bool]:
    """The op on ``d`` ends and its tensors are requested where they are needed.

    Returns the number of transfers so far, whether some other device can start something at this same instant, and
    whether the step will end after the limit.
    """
    n_devices, n_hops, m = size.n_devices, size.n_hops, size.m
    i = s.running[d]
    s.running[d] = -1
    s.never[d] = 0.0
    woke = False
    late = False
    for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
        c = g.consumer[e]
        t = g.edge_tensor[e]
        b = device[c]
        # Branches that go either way at random are turned into arithmetic from here on.
        remote = b != d
        earlier = s.sent[b]
        if out.transfer_tensor[earlier] == t:  # never so on its own device, where no tensor of it arrives
            end = out.transfer_end[earlier]
            s.copy_of[e] = m + earlier
        else:
            pair = d * n_devices + b
            # It waits for the link of its route that is free last, and holds all of them while it is sent.
            start = now
            for k in range(pair * n_hops, (pair + 1) * n_hops):
                free = s.link_free[g.route[k]]
                start = free if free > start else start
            end = start + s.edge_s[e]
            for k in range(pair * n_hops, (pair + 1) * n_hops):
                s.link_free[g.route_held[k]] = end
            # A local hand-over fills the same record, which the next transfer overwrites.
            out.transfer_tensor[x] = t
            out.transfer_pair[x] = pair
            out.transfer_start[x] = start
            out.transfer_end[x] = end
            s.pair_bytes[pair] += g.tensor_bytes[t]
            s.copy_of[e] = m + x if remote else t
            s.sent[b if remote else n_devices] = x
            x += 1 if remote else 0
        # Its ready time is that of its last input.
        s.arrival_s[e] = end
        s.ready_s[c] = end if end > s.ready_s[c] else s.ready_s[c]
        late = late | (end + tail[c] > limit)
        s.missing[c] -= 1
        if s.missing[c] == 0:
            _add(s, mode, b, c, now)
            woke = woke | (remote & (s.ready_s[c] <= now))
    return x, woke, late


@inlined
def _msr_score(g: Arrays, s: StepState, device: Index, i: int, now: float) -> int:
    score = 0
    for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
        c = g.consumer[e]
        # Inputs that the consumer still waits for: if this op's is the only one, its end lets the consumer start.
        waits_for = 0
        for k in range(g.input_ptr[c], g.input_ptr[c + 1]):
            waits_for += s.arrival_s[g.input_edge[k]] > now
        score += 1 + (device[c] != device[i]) + (waits_for == 1) + 5 * (s.running[device[c]] < 0)
    return score


@inlined
def _take_msr(g: Arrays, s: StepState, device: Index, d: int, now: float) -> int:
    """Remove and return the ready op with the largest score; equal scores by priority, then the lower op."""
    first = s.base[d]
    last = first + s.n_ready[d] - 1
    # The queue is not sorted: every ready op is scored anew.
    best_at = first
    best = s.ready[first]
    best_score = _msr_score(g, s, device, best, now)
    for at in range(first + 1, last + 1):
        i = s.ready[at]
        score = _msr_score(g, s, device, i, now)
        more = s.priority[i] - s.priority[best]
        if score > best_score or (score == best_score and (more > 0.0 or (more == 0.0 and i < best))):
            best_at = at
            best = i
            best_score = score
    s.ready[best_at] = s.ready[last]  # the last one fills the gap
    return int(best)


@inlined
def _dispatch(
    g: Arrays,
    s: StepState,
    out: Output,
    device: Index,
    mode: int,
    d: int,
    now: float,
    n_started: int,
    tail: FloatArray,
    work_s: FloatArray,
    limit: float,
) -> int:
    """The idle device ``d`` starts its best ready op, or learns when there may be one.

    Returns the number of starts, or -1 if the step will end after the limit.
    """
    # What has become ready by now moves from one queue to the other.
    base = s.base[d]
    while s.n_future[d] > 0 and s.ready_s[s.future[base]] <= now:
        i = pop(s.future, base, s.n_future[d], s.ready_s, -1.0)
        s.n_future[d] -= 1
        _add_ready(s, mode, d, i)
    if s.n_ready[d] == 0:
        s.next_s[d] = s.ready_s[s.future[base]] if s.n_future[d] > 0 else INF
        return n_started
    best = _take_msr(g, s, device, d, now) if mode == MSR else pop(s.ready, base, s.n_ready[d], s.priority, 1.0)
    s.n_ready[d] -= 1
    # Its longest remaining path cannot end sooner than from now on, nor can the work left on its device.
    if now + tail[best] > limit or now + (work_s[d] - out.busy_s[d]) > limit:
        return -1
    end = now + s.op_s[best]
    s.running[d] = best
    s.next_s[d] = end
    s.never[d] = INF
    out.op_start[best] = now
    out.op_end[best] = end
    out.op_rank[best] = n_started
    out.busy_s[d] += s.op_s[best]
    return n_started + 1


@inlined
def loop(
    g: Arrays,
    s: StepState,
    out: Output,
    device: Index,
    mode: int,
    size: StepSizes,
    tail: FloatArray,
    work_s: FloatArray,
    limit: float,
) -> tuple[float, int, int]:
    """Run a prepared step: ``(step time, number of transfers, number of instants)``; infinite if it is given up.

    Args:
        tail, work_s: float64 [n] and [D], longest remaining paths, and work of each device. They are sums in another
            sequence than times, so that the limit needs a little slack.
        limit: seconds; a step that must take longer is given up. Infinite: compiled as if there were none.
    """
    n_devices = size.n_devices
    # After everything is reset and given its priority: queues compare an op with others.
    for i in range(size.n):
        if s.missing[i] == 0:
            _add(s, mode, device[i], i, 0.0)
    n_transfers = 0
    n_started = 0
    instants = 0
    step_s = -1.0
    now = 0.0
    while step_s < 0.0:
        instants += 1
        # The next instant at which any device has something to do, and how many have then.
        least = INF
        first = 0
        ties = 0
        for d in range(n_devices):
            next_s = s.next_s[d]
            ties = 1 if next_s < least else ties + (next_s == least)
            first = d if next_s < least else first
            least = next_s if next_s < least else least
        # Nothing runs and nothing will: the step is over.
        if least == INF:
            step_s = now
            break
        now = least
        # Usually one device has something to do now. If several have, all ends come before any start.
        last = first + 1
        if ties > 1:
            first = 0
            last = n_devices
        # Under MSR any end may change what an idle device would rather start.
        woke = mode == MSR
        for d in range(first, last):
            if s.running[d] >= 0 and s.next_s[d] == now:
                n_transfers, others, late = _end_op(g, s, out, device, mode, size, d, now, n_transfers, tail, limit)
                if late:
                    step_s = INF
                woke = woke or others
                s.next_s[d] = now
        # A transfer that takes no time has made an op ready on a device that was not looked at.
        if woke:
            first = 0
            last = n_devices
        # All ends are known, so every idle device can choose among all that is ready.
        for d in range(first, last):
            if s.running[d] < 0 and s.next_s[d] <= now:
                n_started = _dispatch(g, s, out, device, mode, d, now, n_started, tail, work_s, limit)
                if n_started < 0:
                    step_s = INF
                    n_started = 0
    return step_s, n_transfers, instants


@inner
def run(
    graph: Arrays, state: StepState, output: Output, device: Index, size: StepSizes, mode: int, order: FloatArray
) -> tuple[float, int, float]:
    """Simulate one step. Returns ``(step time s, number of transfers, bytes transferred)``; the rest is in ``output``.

    Args:
        graph, state, output: `Arrays`, `StepState` and `Output`.
        device: int32 [n], device of each op.
        mode: LONGEST_PATH, FIFO, MSR or EXPLICIT.
        order: float64 [n], lower first; read in EXPLICIT mode only.
    """
    n_devices = size.n_devices
    g = pointers(graph)
    s = pointers(state)
    out = pointers(output)
    prepare(g, s, out, device, size)
    if mode == EXPLICIT:
        for i in range(size.n):
            s.priority[i] = -order[i]
    elif mode == FIFO:
        for i in range(size.n):
            s.priority[i] = 0.0
    step_s, n_transfers, _ = loop(g, s, out, device, mode, size, s.priority, out.busy_s, INF)
    memory(g, s, out, device, size, n_transfers, step_s)
    # Bytes were summed up by pair of devices, of which there are fewer than transfers.
    for link in range(size.n_links):
        out.link_bytes[link] = 0.0
    moved = 0.0
    for pair in range(n_devices * n_devices):
        for k in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
            out.link_bytes[g.route_link[k]] += s.pair_bytes[pair]
        if pair % (n_devices + 1) != 0:
            moved += s.pair_bytes[pair]
    return step_s, n_transfers, moved


@entry
def run_one(
    graph: Arrays, n_links: int, device: Index, mode: int, order: FloatArray
) -> tuple[float, int, float, Output]:
    """`run` with memory of its own: ``(step time s, number of transfers, bytes transferred, Output)``."""
    size = sizes_of(graph, n_links)
    state, output = new_state(size), new_output(size)
    step_s, n_transfers, moved = run(graph, state, output, device, size, mode, order)
    return step_s, n_transfers, moved, output


@parallel_entry
def run_batch(
    g: Arrays,
    devices: Index,
    mode: int,
    orders: FloatArray,
    step_time_s: FloatArray,
    busy_s: FloatArray,
    peak_bytes: IntArray,
    link_bytes: FloatArray,
    bytes_moved: IntArray,
) -> None:
    """`run` for every row of ``devices int32 [k, n]``, shared out over threads; the last five are outputs [k, ...].

    ``orders`` is float64 [k, n] in EXPLICIT mode, else any [1, ...].
    """
    k = len(devices)
    chunks = min(k, 64)  # each has one scratch for all of its rows
    for chunk in prange(chunks):
        size = sizes_of(g, link_bytes.shape[1])  # here, since numba hands no record on to its threads
        s = new_state(size)
        out = new_output(size)
        for row in range(chunk, k, chunks):
            order = orders[row if mode == EXPLICIT else 0]
            step_time_s[row], _, bytes_moved[row] = run(g, s, out, devices[row], size, mode, order)
            busy_s[row] = out.busy_s
            peak_bytes[row] = out.peak_bytes
            link_bytes[row] = out.link_bytes
