"""The event loop of `baselines.local_search.makespan_search`: what a change does to the step time.

Why not `env.simulation.kernel`: a search scores changes of one schedule and rejects most of them, so that this loop,
which gives the same times (docs/score.md) to the last bit, can leave out most of the work.

* It stops as soon as an op starts so late that its longest remaining path, or the work left on its device, ends beyond
  what would be accepted.
* It starts at the last of a few snapshots of the accepted schedule that the change cannot have touched.
* Longest remaining paths are updated upwards from what changed. Memory is looked at only where the time is accepted,
  and exactly only where the sum of everything ever on a device exceeds its memory.

Names: *edge*, *pair* as in `env.simulation.kernel`; *key*, what devices choose their next op by, higher first; *tail*,
the longest remaining path; *unit*, ops that share a device; *group*, units that are moved together; *trial*, a change
and what it leads to, as opposed to the *accepted* or current schedule. Functions take ``g``, a `MakespanInstance`, and
``s``, a `MakespanState`, of bare pointers (`env.simulation.pieces.pointers`), and sizes. The trial's half of doubled
arrays begins at ``n_o``, ``e_o``, ``x_o``.
"""

# Letters
# g   the problem, a `MakespanInstance` of bare pointers; s, the chain, a `MakespanState` likewise
# n, m, e   numbers of ops, tensors and edges; n_devices, n_links, n_units likewise
# i, j   ops; c, a consumer; p, a producer; t, a tensor; d, b, devices; u, a unit
# x   a transfer, in order of request; k, at   positions in a list
# n_o, e_o, x_o   where the trial's half of what is doubled begins, by op, edge and transfer
# base   where a device's part of the queues begins; row, a snapshot

from __future__ import annotations

from baselines.local_search.makespan_state import (
    BY_TAIL,
    CURRENT,
    INF,
    INSTANTS,
    SLACK,
    SNAPSHOTS,
    MakespanInstance,
    MakespanState,
    wide,
)
from env.jit import inlined, inner
from env.simulation.pieces import edge_s, pop, push
from graphs.opgraph import FloatArray


@inlined
def _add(s: MakespanState, key: FloatArray, d: int, i: int, now: float) -> None:
    ready_s = s.ready_s[i]
    if ready_s <= now:
        push(s.ready, s.base[d], s.n_ready[d], key, 1.0, i)
        s.n_ready[d] += 1
    else:
        push(s.future, s.base[d], s.n_future[d], s.ready_s, -1.0, i)
        s.n_future[d] += 1
    # A running device keeps its `next_s`, the end of its op: until then it looks at no queue.
    if s.running[d] < 0 and ready_s < s.next_s[d]:
        s.next_s[d] = ready_s


@inlined
def _lay_out(s: MakespanState, n: int, n_devices: int) -> None:
    """Starts of each device's queues."""
    for d in range(n_devices + 1):
        s.base[d] = 0
    # A device's queues hold as many ops as are placed there: count them, then sum up.
    for i in range(n):
        s.base[s.device[i] + 1] += 1
    for d in range(n_devices):
        s.base[d + 1] += s.base[d]


@inlined
def _begin(g: MakespanInstance, s: MakespanState, key: FloatArray, n: int, n_devices: int, n_links: int) -> None:
    """The state before the first event."""
    for d in range(n_devices):
        s.n_ready[d] = s.n_future[d] = 0
        s.running[d] = s.last_op[d] = s.sent[d] = -1
        s.next_s[d] = INF
        s.left_s[d] = s.work[d]
    for link in range(n_links):
        s.link_free[link] = 0.0
        s.link_last[link] = -1
    for i in range(n):
        s.missing[i] = g.input_ptr[i + 1] - g.input_ptr[i]
        s.ready_s[i] = 0.0
    # Only now: what is added may have to look at other ops' ready times, which all must be reset.
    for i in range(n):
        if s.missing[i] == 0:
            _add(s, key, s.device[i], i, 0.0)


@inlined
def _save(s: MakespanState, row: int, n: int, n_devices: int, n_links: int, now: float, n_started: int, x: int) -> None:
    s.snap_now[row] = now
    s.snap_started[row] = n_started
    s.snap_transfers[row] = x
    # Numbers of a row are laid out one kind behind the other, so that a snapshot is a few plain copies.
    at = row * n
    for i in range(n):
        s.snap_missing[at + i] = s.missing[i]
        s.snap_ready_s[at + i] = s.ready_s[i]
    ints = row * (5 * n_devices + n_links)
    floats = row * (2 * n_devices + n_links)
    for d in range(n_devices):
        # Heaps are saved as they lie. Each op is in one queue at most, so n places are enough for all of them.
        for k in range(s.n_ready[d]):
            s.snap_queue[at] = s.ready[s.base[d] + k]
            at += 1
        for k in range(s.n_future[d]):
            s.snap_queue[at] = s.future[s.base[d] + k]
            at += 1
        s.snap_ints[ints + 5 * d] = s.n_ready[d]
        s.snap_ints[ints + 5 * d + 1] = s.n_future[d]
        s.snap_ints[ints + 5 * d + 2] = s.running[d]
        s.snap_ints[ints + 5 * d + 3] = s.last_op[d]
        s.snap_ints[ints + 5 * d + 4] = s.sent[d]
        s.snap_floats[floats + 2 * d] = s.next_s[d]
        # Less the sum of all work: the trial that starts from here may have moved ops that have not started.
        s.snap_floats[floats + 2 * d + 1] = s.left_s[d] - s.work[d]
    for link in range(n_links):
        s.snap_ints[ints + 5 * n_devices + link] = s.link_last[link]
        s.snap_floats[floats + 2 * n_devices + link] = s.link_free[link]


@inlined
def _restore(s: MakespanState, row: int, n: int, n_devices: int, n_links: int) -> None:
    at = row * n
    for i in range(n):
        s.missing[i] = s.snap_missing[at + i]
        s.ready_s[i] = s.snap_ready_s[at + i]
    ints = row * (5 * n_devices + n_links)
    floats = row * (2 * n_devices + n_links)
    for d in range(n_devices):
        s.n_ready[d] = s.snap_ints[ints + 5 * d]
        s.n_future[d] = s.snap_ints[ints + 5 * d + 1]
        s.running[d] = s.snap_ints[ints + 5 * d + 2]
        s.last_op[d] = s.snap_ints[ints + 5 * d + 3]
        s.sent[d] = s.snap_ints[ints + 5 * d + 4]
        s.next_s[d] = s.snap_floats[floats + 2 * d]
        # See `_save`; `work` is the trial's already.
        s.left_s[d] = s.snap_floats[floats + 2 * d + 1] + s.work[d]
        for k in range(s.n_ready[d]):
            s.ready[s.base[d] + k] = s.snap_queue[at]
            at += 1
        for k in range(s.n_future[d]):
            s.future[s.base[d] + k] = s.snap_queue[at]
            at += 1
    for link in range(n_links):
        s.link_last[link] = s.snap_ints[ints + 5 * n_devices + link]
        s.link_free[link] = s.snap_floats[floats + 2 * n_devices + link]


@inlined
def _end_op(
    g: MakespanInstance,
    s: MakespanState,
    key: FloatArray,
    n_devices: int,
    d: int,
    now: float,
    x: int,
    n_o: int,
    e_o: int,
    x_o: int,
    limit: float,
) -> int:
    """The op on ``d`` ends. Returns the number of transfers so far, or -1 if the step will end after the limit."""
    i = s.running[d]
    s.running[d] = -1
    late = False
    for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
        c = g.consumer[e]
        b = s.device[c]
        end = now
        if b == d:
            # Handed over in place, with no transfer.
            s.edge_transfer[e_o + e] = -1
        else:
            earlier = s.sent[b]
            t = g.edge_tensor[e]
            # Edges of an op are sorted by tensor, so that only the last transfer to a device can be of the same.
            if earlier >= 0 and g.edge_tensor[s.transfer_edge[x_o + earlier]] == t:
                end = s.transfer_end[x_o + earlier]
                s.edge_transfer[e_o + e] = earlier
            else:
                pair = d * n_devices + b
                start = now
                # The transfer waits for the last link to become free, from which the critical path goes on.
                behind = -1
                for k in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
                    link = g.route_link[k]
                    if s.link_free[link] > start:
                        start = s.link_free[link]
                        behind = s.link_last[link]
                end = start + edge_s(g, e, pair)
                for k in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
                    s.link_free[g.route_link[k]] = end
                    s.link_last[g.route_link[k]] = x
                s.transfer_edge[x_o + x] = e
                s.transfer_target[x_o + x] = b
                s.transfer_start[x_o + x] = start
                s.transfer_end[x_o + x] = end
                s.transfer_behind[x_o + x] = behind
                s.edge_transfer[e_o + e] = x
                s.sent[b] = x
                x += 1
        if end > s.ready_s[c]:
            s.ready_s[c] = end
        # Collected, and looked at once after the loop: a branch for every edge would cost more than it saves.
        late |= end + s.tail[c] > limit
        s.missing[c] -= 1
        if s.missing[c] == 0:
            _add(s, key, b, c, now)
    return -1 if late else x


@inlined
def _dispatch(
    g: MakespanInstance,
    s: MakespanState,
    key: FloatArray,
    n_devices: int,
    d: int,
    now: float,
    n_started: int,
    n_o: int,
    limit: float,
) -> int:
    """The idle device ``d`` starts its best ready op. Returns the number of starts, or -1: beyond the limit."""
    # Ops that have become ready in the meantime go from one heap to the other.
    base = s.base[d]
    while s.n_future[d] > 0 and s.ready_s[s.future[base]] <= now:
        i = pop(s.future, base, s.n_future[d], s.ready_s, -1.0)
        s.n_future[d] -= 1
        push(s.ready, base, s.n_ready[d], key, 1.0, i)
        s.n_ready[d] += 1
    if s.n_ready[d] == 0:
        s.next_s[d] = s.ready_s[s.future[base]] if s.n_future[d] > 0 else INF
        return n_started
    i = pop(s.ready, base, s.n_ready[d], key, 1.0)
    s.n_ready[d] -= 1
    # The op starts now. Its tail cannot end sooner than that allows, nor can the work left on its device.
    if now + s.tail[i] > limit or now + s.left_s[d] > limit:
        return -1
    seconds = g.op_s[wide(i) * n_devices + d]
    s.left_s[d] -= seconds
    s.running[d] = i
    s.next_s[d] = now + seconds
    s.start_s[n_o + i] = now
    s.end_s[n_o + i] = now + seconds
    s.rank[n_o + i] = n_started
    s.before[n_o + i] = s.last_op[d]
    s.last_op[d] = i
    return n_started + 1


@inlined
def _resume(s: MakespanState, row: int, n: int, n_devices: int, n_links: int, e: int) -> None:
    """Go back to a snapshot of the accepted schedule; its transfers are needed where ``sent`` refers to them."""
    _restore(s, row, n, n_devices, n_links)
    # The loop still reads only transfers in ``sent`` of those before the snapshot; `merge_prefix` adds the rest.
    old, new = s.counts[CURRENT] * (e + 1), (1 - s.counts[CURRENT]) * (e + 1)
    for d in range(n_devices):
        x = s.sent[d]
        if x >= 0:
            s.transfer_edge[new + x] = s.transfer_edge[old + x]
            s.transfer_end[new + x] = s.transfer_end[old + x]


@inlined
def _next(s: MakespanState, n_devices: int) -> tuple[float, int, int]:
    """``(instant of the next event, first device, end of the devices)`` that may have one then."""
    least = INF
    at = 0
    ties = 0
    for d in range(n_devices):
        next_s = s.next_s[d]
        if next_s < least:
            least = next_s
            at = d
            ties = 1
        elif next_s == least:
            ties += 1
    # Usually one device has something to do. If several have, all ends come before any start.
    return least, at if ties == 1 else 0, at + 1 if ties == 1 else n_devices


@inner
def simulate(
    g: MakespanInstance, s: MakespanState, n: int, e: int, n_devices: int, n_links: int, first: int, limit: float
) -> float:
    """Run the trial from snapshot ``first`` (-1: from the start); returns its step time, infinite beyond ``limit``."""
    # Pointers, so that a choice between two arrays costs nothing in the loop.
    key = s.tail if s.counts[BY_TAIL] else s.key
    trial = 1 - s.counts[CURRENT]
    n_o, e_o, x_o = trial * n, trial * e, trial * (e + 1)
    # Bounds are sums in another sequence than times; the last comparison, below, is exact.
    bound = limit * SLACK
    now, n_started, x = 0.0, wide(0), wide(0)
    _lay_out(s, n, n_devices)
    if first < 0:
        _begin(g, s, key, n, n_devices, n_links)
    else:
        row = s.snap_row[first]
        now, n_started, x = s.snap_now[row], wide(s.snap_started[row]), wide(s.snap_transfers[row])
        _resume(s, row, n, n_devices, n_links, e)
    snap = first + 1
    # The trial's later snapshots are not taken yet. One of rows 2 k and 2 k + 1 belongs to the accepted schedule, the
    # other to the trial: 4 k + 1 less the one is the other.
    for k in range(snap, SNAPSHOTS):
        s.snap_now[4 * k + 1 - s.snap_row[k]] = INF
    # Snapshots are due at equal shares of the starts.
    due = (snap + 1) * n // (SNAPSHOTS + 1)
    while True:
        s.counts[INSTANTS] += 1
        least, at, last = _next(s, n_devices)
        if least == INF:
            break
        # Between instants only: at one, some of its events would be in the snapshot and some not.
        if n_started >= due and least > now and snap < SNAPSHOTS:
            _save(s, 4 * snap + 1 - s.snap_row[snap], n, n_devices, n_links, now, n_started, x)
            while snap < SNAPSHOTS and n_started >= due:
                snap += 1
                due = (snap + 1) * n // (SNAPSHOTS + 1)
        # All ends of an instant come before any start (docs/score.md).
        now = least
        ended = False
        for d in range(at, last):
            if s.running[d] >= 0 and s.next_s[d] == now:
                x = _end_op(g, s, key, n_devices, d, now, x, n_o, e_o, x_o, bound)
                if x < 0:
                    return INF
                s.next_s[d] = now
                ended = True
        # A transfer that takes no time may have woken any other device.
        for d in range(0 if ended else at, n_devices if ended else last):
            if s.running[d] < 0 and s.next_s[d] <= now:
                n_started = _dispatch(g, s, key, n_devices, d, now, n_started, n_o, bound)
                if n_started < 0:
                    return INF
    s.n_transfers[trial] = x
    return now if now <= limit else INF
