"""Changes of one trial to a chain of the makespan search, taken back or kept."""

# Letters
# g   the problem, a `MakespanInstance` of bare pointers; s, the chain, a `MakespanState` likewise
# n, m, e   numbers of ops, tensors and edges; n_devices, n_links, n_units likewise
# i, j   ops; c, a consumer; p, a producer; t, a tensor; d, b, devices; u, a unit
# x   a transfer, in order of request; k, at   positions in a list
# n_o, e_o, x_o   where the trial's half of what is doubled begins, by op, edge and transfer

from __future__ import annotations

import numpy as np

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
    MakespanInstance,
    MakespanState,
    wide,
)
from env.jit import inlined, inner
from env.simulation.pieces import (
    MOST_PER_SECOND,
    clear_buckets,
    edge_s,
    next_random,
    note_change,
    peak_within,
    scrambled,
)


@inner
def uniform(s: MakespanState) -> float:
    """In [0, 1), of 52 bits, so that its product with a whole number k is never rounded up to k."""
    s.random[0] = next_random(s.random[0])
    return np.float64(scrambled(s.random[0]) >> np.uint64(12)) * 2.0**-52


@inner
def below(s: MakespanState, k: int) -> int:
    """Any of 0 .. k - 1."""
    return wide(uniform(s) * k)


@inner
def _touch(g: MakespanInstance, s: MakespanState, i: int) -> None:
    """The tail of an op must be looked at again."""
    # By topological position, so that `update_tails` meets consumers before producers.
    at = g.position[i]
    if s.dirty[at] == 0:
        s.dirty[at] = 1
        s.counts[DIRTY] += 1
        if at > s.counts[TOP]:
            s.counts[TOP] = at


@inner
def _affects(s: MakespanState, instant: float) -> None:
    """The trial and the accepted schedule may differ from this instant on."""
    if instant < s.values[AFFECTED]:
        s.values[AFFECTED] = instant


@inner
def place(g: MakespanInstance, s: MakespanState, n: int, n_devices: int, i: int, d: int) -> None:
    """Move op ``i`` to device ``d``."""
    old = s.device[i]
    if old == d:
        return
    # An op may be logged twice; `undo` goes backwards, and the oldest entry wins.
    s.log_op[s.counts[LOGGED]] = i
    s.log_device[s.counts[LOGGED]] = old
    s.counts[LOGGED] += 1
    s.device[i] = d
    s.work[old] -= g.op_s[wide(i) * n_devices + old]
    s.work[d] += g.op_s[wide(i) * n_devices + d]
    _touch(g, s, i)
    # Nothing changes before a producer of the op ends: only then are its outputs sent elsewhere, and the op itself is
    # ready later still. An op without inputs is ready from the start.
    end_s = s.counts[CURRENT] * n
    if g.input_ptr[i] == g.input_ptr[i + 1]:
        s.values[AFFECTED] = -1.0
    for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
        p = g.producer[g.input_edge[k]]
        _touch(g, s, p)
        _affects(s, s.end_s[end_s + p])


@inner
def set_key(s: MakespanState, i: int, key: float) -> None:
    """Change the key of op ``i``, which matters from when its inputs have arrived."""
    if key != s.key[i]:
        s.log_key_op[s.counts[LOGGED_KEYS]] = i
        s.log_key[s.counts[LOGGED_KEYS]] = s.key[i]
        s.counts[LOGGED_KEYS] += 1
        s.key[i] = key
        _affects(s, s.arrived_s[i])


@inner
def tail_of(g: MakespanInstance, s: MakespanState, n_devices: int, i: int) -> float:
    """Longest remaining path, by the same arithmetic as `env.simulation.kernel`."""
    d = s.device[i]
    longest = 0.0
    for e in range(g.edge_ptr[i], g.edge_ptr[i + 1]):
        c = g.consumer[e]
        b = s.device[c]
        # Local hand-overs take no time: adding 0.0 would change no bit, but take its time.
        rest = s.tail[c]
        if b != d:
            rest = edge_s(g, e, wide(d) * n_devices + b) + rest
        longest = rest if rest > longest else longest
    return float(g.op_s[wide(i) * n_devices + d] + longest)


@inner
def update_tails(g: MakespanInstance, s: MakespanState, n_devices: int) -> None:
    """Work out the touched tails again, consumers first, and those that follow from what changed."""
    # Downwards from the last dirty op; producers come before it, so nothing behind becomes dirty any more.
    at = s.counts[TOP]
    while s.counts[DIRTY] > 0:
        if s.dirty[at] == 1:
            s.dirty[at] = 0
            s.counts[DIRTY] -= 1
            i = g.topological[at]
            tail = tail_of(g, s, n_devices, i)
            # Bits that come out the same end the walk here: nothing before depends on more.
            if tail != s.tail[i]:
                s.log_tail_op[s.counts[LOGGED_TAILS]] = i
                s.log_tail[s.counts[LOGGED_TAILS]] = s.tail[i]
                s.counts[LOGGED_TAILS] += 1
                s.tail[i] = tail
                # As a key a tail matters from when the op's inputs have arrived.
                if s.counts[BY_TAIL]:
                    _affects(s, s.arrived_s[i])
                for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
                    _touch(g, s, g.producer[g.input_edge[k]])
        at -= 1
    s.counts[TOP] = -1


@inner
def undo(g: MakespanInstance, s: MakespanState, n_devices: int) -> None:
    """Take the trial's changes back, the last one first."""
    for k in range(s.counts[LOGGED] - 1, -1, -1):
        i = s.log_op[k]
        # Undone by arithmetic, and so but for rounding, which SLACK allows for.
        s.work[s.device[i]] -= g.op_s[wide(i) * n_devices + s.device[i]]
        s.device[i] = s.log_device[k]
        s.work[s.device[i]] += g.op_s[wide(i) * n_devices + s.device[i]]
    for k in range(s.counts[LOGGED_TAILS] - 1, -1, -1):
        s.tail[s.log_tail_op[k]] = s.log_tail[k]
    for k in range(s.counts[LOGGED_KEYS] - 1, -1, -1):
        s.key[s.log_key_op[k]] = s.log_key[k]


@inner
def merge_prefix(g: MakespanInstance, s: MakespanState, n: int, e: int, first: int) -> None:
    """Complete the trial's schedule by what came before the snapshot it started from."""
    old = s.counts[CURRENT]
    new = 1 - old
    row = s.snap_row[first]
    started, now = s.snap_started[row], s.snap_now[row]
    for i in range(n):
        # Started before the snapshot, so the trial has not simulated it.
        if s.rank[old * n + i] < started:
            s.start_s[new * n + i] = s.start_s[old * n + i]
            s.end_s[new * n + i] = s.end_s[old * n + i]
            s.rank[new * n + i] = s.rank[old * n + i]
            s.before[new * n + i] = s.before[old * n + i]
            # The trial itself has written the edges of an op that was running at the snapshot.
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


@inner
def fits(g: MakespanInstance, s: MakespanState, n: int, m: int, e: int, n_devices: int, step_s: float) -> bool:
    """Whether the trial's schedule stays within every memory; devices on one memory count at its owner."""
    trial = 1 - s.counts[CURRENT]
    x_o = trial * (e + 1)
    for d in range(n_devices):
        s.held_bytes[d] = 0
        s.largest_bytes[d] = 0
    for i in range(n):
        d = s.device[i]
        # First as if nothing were ever freed, and most placements fit even so.
        s.held_bytes[g.memory_owner[d]] += g.kept_bytes[i] + g.output_bytes[i]
        if g.workspace_bytes[i] > s.largest_bytes[d]:
            s.largest_bytes[d] = g.workspace_bytes[i]
    for x in range(s.n_transfers[trial]):
        if not _stays(g, s, s.transfer_edge[x_o + x], s.transfer_target[x_o + x]):
            owner = g.memory_owner[s.transfer_target[x_o + x]]
            s.held_bytes[owner] += g.tensor_bytes[g.edge_tensor[s.transfer_edge[x_o + x]]]
    for d in range(n_devices):
        if g.memory_owner[d] != d:
            s.held_bytes[g.memory_owner[d]] += s.largest_bytes[d]
    freed = False
    for d in range(n_devices):
        if g.memory_owner[d] == d and s.held_bytes[d] + s.largest_bytes[d] > g.capacity_bytes[d]:
            # Last uses are the same for every device: once is enough.
            if not freed:
                _last_uses(g, s, n, m, e)
                freed = True
            if not _fits_over_time(g, s, n, m, e, n_devices, d, step_s):
                return False
    return True


@inlined
def _stays(g: MakespanInstance, s: MakespanState, edge: int, target: int) -> bool:
    """Whether the transfer of an edge's tensor to a device is a hand-over within one memory, which copies nothing."""
    return bool(g.memory_owner[s.device[g.producer[edge]]] == g.memory_owner[target])


@inner
def _last_uses(g: MakespanInstance, s: MakespanState, n: int, m: int, e: int) -> None:
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
        # A reader in the producer's memory reads the tensor itself, all others the copy that was sent there.
        copy = g.edge_tensor[k] if x < 0 or _stays(g, s, k, s.device[g.consumer[k]]) else m + x
        s.free_s[copy] = max(s.free_s[copy], s.end_s[n_o + g.consumer[k]])


@inner
def _fits_over_time(
    g: MakespanInstance, s: MakespanState, n: int, m: int, e: int, n_devices: int, d: int, step_s: float
) -> bool:
    """The memory of device ``d`` over time, in buckets; only buckets that may be too full are sorted."""
    trial = 1 - s.counts[CURRENT]
    n_o, x_o = trial * n, trial * (e + 1)
    buckets = max(16, n // n_devices)
    # In a step of no time nothing is held but what is kept.
    per_second = min(buckets / step_s, MOST_PER_SECOND) if step_s > 0 else 0.0
    clear_buckets(s, buckets)
    now = wide(0)
    k = wide(0)
    for i in range(n):
        if g.memory_owner[s.device[i]] == d:
            now += g.kept_bytes[i]
            if step_s > 0:
                added = g.workspace_bytes[i] + g.output_bytes[i]
                k = _note(s, buckets, per_second, s.start_s[n_o + i], added, k)
                k = _note(s, buckets, per_second, s.end_s[n_o + i], -g.workspace_bytes[i], k)
    for t in range(m):
        if g.memory_owner[s.device[g.tensor_producer[t]]] == d:
            k = _note(s, buckets, per_second, s.free_s[t], -g.memory_bytes[t], k)
    for x in range(s.n_transfers[trial]):
        target = s.transfer_target[x_o + x]
        if g.memory_owner[target] == d and not _stays(g, s, s.transfer_edge[x_o + x], target):
            size = g.tensor_bytes[g.edge_tensor[s.transfer_edge[x_o + x]]]
            k = _note(s, buckets, per_second, s.transfer_start[x_o + x], size, k)
            k = _note(s, buckets, per_second, s.free_s[m + x], -size, k)
    capacity = g.capacity_bytes[d]
    if now > capacity:
        return False
    for bucket in range(buckets):
        # Were all of the bucket's allocations made before any of its frees, would they fit? Only if not, look closer.
        if now + s.bucket_in[bucket] > capacity and peak_within(s, bucket, now, now) > capacity:
            return False
        now += s.bucket_in[bucket] - s.bucket_out[bucket]
    return True


@inlined
def _note(s: MakespanState, buckets: int, per_second: float, instant: float, added: int, k: int) -> int:
    """Note a change of the one device whose memory is looked at, if it is any."""
    return note_change(s, wide(0), buckets, per_second, instant, added, k) if added != 0 else k


@inner
def _trace(g: MakespanInstance, s: MakespanState, n: int, e: int) -> None:
    """Walk from the last op back to the start of the step, over whatever each op or transfer waited for."""
    current = s.counts[CURRENT]
    n_o, e_o, x_o = current * n, current * e, current * (e + 1)
    # The op that ends last, of equals the first.
    i = 0
    for k in range(n):
        if s.end_s[n_o + k] > s.end_s[n_o + i]:
            i = k
    length, hot = 0, 0
    while i >= 0 and length < n:
        s.path_op[length] = i
        cause = -1
        # It started as soon as its inputs were there: the last of them is the cause, otherwise its device was busy.
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
            # A transfer that waited for a link is held up by the one before it there, and so on back to one that
            # did not.
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
def clear_logs(s: MakespanState) -> None:
    """Begin a trial: nothing is changed yet."""
    s.counts[LOGGED] = s.counts[LOGGED_TAILS] = s.counts[LOGGED_KEYS] = s.counts[PICKED] = 0
    s.values[AFFECTED] = INF


@inner
def accept(g: MakespanInstance, s: MakespanState, n: int, e: int, first: int, step_s: float) -> None:
    """The trial, which was run from snapshot ``first``, becomes the accepted schedule."""
    # Nothing is copied: the halves change places.
    s.counts[CURRENT] = 1 - s.counts[CURRENT]
    for k in range(first + 1, SNAPSHOTS):
        s.snap_row[k] = 4 * k + 1 - s.snap_row[k]
    for i in range(n):
        # `ready_s` is written over by the next trial.
        s.arrived_s[i] = s.ready_s[i]
    s.values[NOW] = step_s
    _trace(g, s, n, e)
    if step_s < s.values[BEST]:
        s.values[BEST] = step_s
        for i in range(n):
            s.best_device[i] = s.device[i]
            s.best_key[i] = s.tail[i] if s.counts[BY_TAIL] else s.key[i]
