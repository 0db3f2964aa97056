"""What one trial does to a chain of the makespan search, and how it is taken back or kept.

Compiled functions without a cache of their own: `baselines.local_search.makespan_moves` compiles them into its own.
"""

from __future__ import annotations

import numpy as np

from baselines.local_search.makespan_kernel import compiled, edge_s, inlined
from baselines.local_search.makespan_state import (
    AFFECTED,
    BEST,
    BY_TAIL,
    CURRENT,
    DIRTY,
    HOT,
    INF,
    LOGGED,
    LOGGED_KEYS,
    LOGGED_TAILS,
    NOW,
    PATH,
    PICKED,
    SNAPSHOTS,
    TOP,
)


@inlined
def uniform(s):  # type: ignore[no-untyped-def]
    """In [0, 1), by xorshift64* (S. Vigna, 2016, doi:10.1145/2845077): the same on every thread and machine.

    Of 52 bits, so that its product with a whole number k is never rounded up to k.
    """
    x = s.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    s.random[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(12)) * 2.0**-52


@inlined
def below(s, k):  # type: ignore[no-untyped-def]
    """Any of 0 .. k - 1."""
    return np.int64(uniform(s) * k)


@inlined
def _touch(g, s, i):  # type: ignore[no-untyped-def]
    """The tail of an op must be looked at again."""
    at = g.position[i]
    if s.dirty[at] == 0:
        s.dirty[at] = 1
        s.counts[DIRTY] += 1
        if at > s.counts[TOP]:
            s.counts[TOP] = at


@inlined
def _affects(s, instant):  # type: ignore[no-untyped-def]
    """The trial and the accepted schedule may differ from this instant on."""
    if instant < s.values[AFFECTED]:
        s.values[AFFECTED] = instant


@compiled
def place(g, s, n, n_devices, i, d):  # type: ignore[no-untyped-def]
    """Move op ``i`` to device ``d``."""
    old = s.device[i]
    if old == d:
        return
    s.log_op[s.counts[LOGGED]] = i
    s.log_device[s.counts[LOGGED]] = old
    s.counts[LOGGED] += 1
    s.device[i] = d
    s.work[old] -= g.op_s[np.int64(i) * n_devices + old]
    s.work[d] += g.op_s[np.int64(i) * n_devices + d]
    _touch(g, s, i)
    end_s = s.counts[CURRENT] * n
    if g.input_ptr[i] == g.input_ptr[i + 1]:
        s.values[AFFECTED] = -1.0
    for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
        p = g.producer[g.input_edge[k]]
        _touch(g, s, p)
        _affects(s, s.end_s[end_s + p])


@inlined
def set_key(s, i, key):  # type: ignore[no-untyped-def]
    """Change the key of op ``i``, which matters from when its inputs have arrived."""
    if key != s.key[i]:
        s.log_key_op[s.counts[LOGGED_KEYS]] = i
        s.log_key[s.counts[LOGGED_KEYS]] = s.key[i]
        s.counts[LOGGED_KEYS] += 1
        s.key[i] = key
        _affects(s, s.arrived_s[i])


@inlined
def tail_of(g, s, n_devices, i):  # type: ignore[no-untyped-def]
    """Longest remaining path, by the same arithmetic as `env.simulation.kernel`."""
    d = s.device[i]
    longest = 0.0
    for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
        c = g.consumer[e]
        b = s.device[c]
        rest = s.tail[c]
        if b != d:
            rest = edge_s(g, e, np.int64(d) * n_devices + b) + rest
        longest = rest if rest > longest else longest
    return g.op_s[np.int64(i) * n_devices + d] + longest


@compiled
def update_tails(g, s, n_devices):  # type: ignore[no-untyped-def]
    """Work out the touched tails again, consumers first, and those that follow from what changed."""
    at = s.counts[TOP]
    while s.counts[DIRTY] > 0:
        if s.dirty[at] == 1:
            s.dirty[at] = 0
            s.counts[DIRTY] -= 1
            i = g.topological[at]
            tail = tail_of(g, s, n_devices, i)
            if tail != s.tail[i]:
                s.log_tail_op[s.counts[LOGGED_TAILS]] = i
                s.log_tail[s.counts[LOGGED_TAILS]] = s.tail[i]
                s.counts[LOGGED_TAILS] += 1
                s.tail[i] = tail
                if s.counts[BY_TAIL]:
                    _affects(s, s.arrived_s[i])
                for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
                    _touch(g, s, g.producer[g.input_edge[k]])
        at -= 1
    s.counts[TOP] = -1


@compiled
def undo(g, s, n_devices):  # type: ignore[no-untyped-def]
    """Take the trial's changes back, the last one first."""
    for k in range(s.counts[LOGGED] - 1, -1, -1):
        i = s.log_op[k]
        s.work[s.device[i]] -= g.op_s[np.int64(i) * n_devices + s.device[i]]
        s.device[i] = s.log_device[k]
        s.work[s.device[i]] += g.op_s[np.int64(i) * n_devices + s.device[i]]
    for k in range(s.counts[LOGGED_TAILS] - 1, -1, -1):
        s.tail[s.log_tail_op[k]] = s.log_tail[k]
    for k in range(s.counts[LOGGED_KEYS] - 1, -1, -1):
        s.key[s.log_key_op[k]] = s.log_key[k]


@compiled
def merge_prefix(g, s, n, e, first):  # type: ignore[no-untyped-def]
    """Complete the trial's schedule by what came before the snapshot it started from."""
    old = s.counts[CURRENT]
    new = 1 - old
    row = s.snap_row[first]
    started, now = s.snap_started[row], s.snap_now[row]
    for i in range(n):
        if s.rank[old * n + i] < started:
            s.start_s[new * n + i] = s.start_s[old * n + i]
            s.end_s[new * n + i] = s.end_s[old * n + i]
            s.rank[new * n + i] = s.rank[old * n + i]
            s.before[new * n + i] = s.before[old * n + i]
            if s.end_s[old * n + i] <= now:
                for k in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
                    s.edge_transfer[new * e + k] = s.edge_transfer[old * e + k]
    a, b = new * (e + 1), old * (e + 1)
    for x in range(s.snap_transfers[row]):
        s.transfer_edge[a + x] = s.transfer_edge[b + x]
        s.transfer_target[a + x] = s.transfer_target[b + x]
        s.transfer_start[a + x] = s.transfer_start[b + x]
        s.transfer_end[a + x] = s.transfer_end[b + x]
        s.transfer_behind[a + x] = s.transfer_behind[b + x]


@compiled
def fits(g, s, n, m, e, n_devices, step_s):  # type: ignore[no-untyped-def]
    """Whether the trial's schedule stays within the memory of every device."""
    trial = 1 - s.counts[CURRENT]
    x_o = trial * (e + 1)
    for d in range(n_devices):
        s.held_bytes[d] = 0
        s.largest_bytes[d] = 0
    for i in range(n):
        d = s.device[i]
        s.held_bytes[d] += g.kept_bytes[i] + g.output_bytes[i]
        if g.workspace_bytes[i] > s.largest_bytes[d]:
            s.largest_bytes[d] = g.workspace_bytes[i]
    for x in range(s.n_transfers[trial]):
        s.held_bytes[s.transfer_target[x_o + x]] += g.tensor_bytes[g.edge_tensor[s.transfer_edge[x_o + x]]]
    freed = False
    for d in range(n_devices):
        if s.held_bytes[d] + s.largest_bytes[d] > g.capacity_bytes[d]:
            if not freed:
                _last_uses(g, s, n, m, e)
                freed = True
            if not _fits_over_time(g, s, n, m, e, n_devices, d, step_s):
                return False
    return True


@compiled
def _last_uses(g, s, n, m, e):  # type: ignore[no-untyped-def]
    """Fill ``free_s``: the last use of each tensor at its producer, and of each copy."""
    trial = 1 - s.counts[CURRENT]
    n_o, e_o, x_o = trial * n, trial * e, trial * (e + 1)
    for t in range(m):
        s.free_s[t] = s.end_s[n_o + g.tensor_producer[t]]
    for x in range(s.n_transfers[trial]):
        t = g.edge_tensor[s.transfer_edge[x_o + x]]
        s.free_s[m + x] = s.transfer_end[x_o + x]
        s.free_s[t] = max(s.free_s[t], s.transfer_end[x_o + x])
    for k in range(e):
        x = s.edge_transfer[e_o + k]
        copy = g.edge_tensor[k] if x < 0 else m + x
        s.free_s[copy] = max(s.free_s[copy], s.end_s[n_o + g.consumer[k]])


@inlined
def _change(s, buckets, per_second, instant, added, k):  # type: ignore[no-untyped-def]
    """Note change ``k`` of a device's memory; returns ``k + 1``."""
    if added == 0:
        return k
    bucket = min(np.int64(instant * per_second), buckets - 1)
    if added > 0:
        s.bucket_in[bucket] += added
    else:
        s.bucket_out[bucket] -= added
    s.change_s[k] = instant
    s.change_bytes[k] = added
    s.change_next[k] = s.bucket_head[bucket]
    s.bucket_head[bucket] = k
    return k + 1


@compiled
def _fits_over_time(g, s, n, m, e, n_devices, d, step_s):  # type: ignore[no-untyped-def]
    """The memory of one device over time, in buckets; only buckets that may be too full are sorted."""
    trial = 1 - s.counts[CURRENT]
    n_o, x_o = trial * n, trial * (e + 1)
    buckets = max(16, n // n_devices)
    per_second = min(buckets / step_s, 1e300) if step_s > 0 else 0.0  # finite, or 0 s would be in no bucket
    for bucket in range(buckets):
        s.bucket_in[bucket] = s.bucket_out[bucket] = 0
        s.bucket_head[bucket] = -1
    now = np.int64(0)
    k = 0
    for i in range(n):
        if s.device[i] == d:
            now += g.kept_bytes[i]
            if step_s > 0:
                k = _change(s, buckets, per_second, s.start_s[n_o + i], g.workspace_bytes[i] + g.output_bytes[i], k)
                k = _change(s, buckets, per_second, s.end_s[n_o + i], -g.workspace_bytes[i], k)
    for t in range(m):
        if s.device[g.tensor_producer[t]] == d:
            k = _change(s, buckets, per_second, s.free_s[t], -g.memory_bytes[t], k)
    for x in range(s.n_transfers[trial]):
        if s.transfer_target[x_o + x] == d:
            size = g.tensor_bytes[g.edge_tensor[s.transfer_edge[x_o + x]]]
            k = _change(s, buckets, per_second, s.transfer_start[x_o + x], size, k)
            k = _change(s, buckets, per_second, s.free_s[m + x], -size, k)
    if now > g.capacity_bytes[d]:
        return False
    for bucket in range(buckets):
        if now + s.bucket_in[bucket] > g.capacity_bytes[d] and not _bucket_fits(s, bucket, now, g.capacity_bytes[d]):
            return False
        now += s.bucket_in[bucket] - s.bucket_out[bucket]
    return True


@compiled
def _bucket_fits(s, bucket, now, capacity):  # type: ignore[no-untyped-def]
    """Go through one bucket's changes in order of time, frees first (Shell's sort: nearly in order already)."""
    count = 0
    k = s.bucket_head[bucket]
    while k >= 0:
        s.change_order[count] = k
        count += 1
        k = s.change_next[k]
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for at in range(gap, count):
            k = s.change_order[at]
            hole = at
            while hole >= gap:
                other = s.change_order[hole - gap]
                earlier = s.change_s[other] < s.change_s[k]
                if earlier or (
                    s.change_s[other] == s.change_s[k] and (s.change_bytes[other] < 0 or s.change_bytes[k] > 0)
                ):
                    break
                s.change_order[hole] = other
                hole -= gap
            s.change_order[hole] = k
        gap //= 3
    for at in range(count):
        now += s.change_bytes[s.change_order[at]]
        if now > capacity:
            return False
    return True


@compiled
def _trace(g, s, n, e):  # type: ignore[no-untyped-def]
    """Walk from the last op back to the start of the step, over whatever each op or transfer waited for."""
    current = s.counts[CURRENT]
    n_o, e_o, x_o = current * n, current * e, current * (e + 1)
    i = 0
    for k in range(n):
        if s.end_s[n_o + k] > s.end_s[n_o + i]:
            i = k
    length, hot = 0, 0
    while i >= 0 and length < n:
        s.path_op[length] = i
        cause = -1
        if s.arrived_s[i] >= s.start_s[n_o + i]:
            for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
                edge = g.input_edge[k]
                x = s.edge_transfer[e_o + edge]
                arrival = s.end_s[n_o + g.producer[edge]] if x < 0 else s.transfer_end[x_o + x]
                if arrival >= s.arrived_s[i]:
                    cause = edge
        before = s.before[n_o + i]
        if cause >= 0 and before >= 0 and s.end_s[n_o + before] >= s.start_s[n_o + i] and uniform(s) < 0.5:
            cause = -1  # both were waited for
        if cause < 0:
            i = before
        else:
            x = s.edge_transfer[e_o + cause]
            i = g.producer[cause]
            while x >= 0:
                edge = s.transfer_edge[x_o + x]
                if hot < n + e:
                    s.hot_edge[hot] = edge
                    hot += 1
                i = g.producer[edge]
                x = s.transfer_behind[x_o + x]
        length += 1
    s.counts[PATH] = length
    s.counts[HOT] = hot


@inlined
def clear_logs(s):  # type: ignore[no-untyped-def]
    """Begin a trial: nothing is changed yet."""
    s.counts[LOGGED] = s.counts[LOGGED_TAILS] = s.counts[LOGGED_KEYS] = s.counts[PICKED] = 0
    s.values[AFFECTED] = INF


@compiled
def accept(g, s, n, e, first, step_s):  # type: ignore[no-untyped-def]
    """The trial, which was run from snapshot ``first``, becomes the accepted schedule."""
    s.counts[CURRENT] = 1 - s.counts[CURRENT]
    for k in range(first + 1, SNAPSHOTS):
        s.snap_row[k] = 4 * k + 1 - s.snap_row[k]
    for i in range(n):
        s.arrived_s[i] = s.ready_s[i]
    s.values[NOW] = step_s
    _trace(g, s, n, e)
    if step_s < s.values[BEST]:
        s.values[BEST] = step_s
        for i in range(n):
            s.best_device[i] = s.device[i]
            s.best_key[i] = s.tail[i] if s.counts[BY_TAIL] else s.key[i]
