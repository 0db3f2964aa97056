"""Compiled loop of `load_search`: propose a change, see what it does to the loads, keep it or not.

The loads of `env.simulation.scoring` are kept up to date move by move. Names as in `baselines.local_search.load_state`.
"""

# Letters
# c   the problem, a `LoadInstance`; s, the search, a `LoadState`: names as in `load_state`
# u, v   units; t, a tensor; w, a size of workspace; r, a resource (a device, or D + a link)
# a, b, d   devices, as a rule from a to b; p, the device of a writer, or a pair of devices a * D + b
# k, j   positions in a list; sign   +1 where something comes, -1 where it goes

from __future__ import annotations

import numpy as np

from baselines.local_search.load_state import LoadInstance, LoadState
from env.jit import entry_without_arrays, inner
from env.simulation.pieces import next_random, scrambled

_POWER_STEPS = 5  # loads are raised to the power 2 ** 5: higher is closer to the maximum, lower a better slope


# -- Loads ----------------------------------------------------------------------------------------------------


@inner
def transfer_s(c: LoadInstance, t: int, a: int, b: int) -> float:
    """Seconds a transfer occupies its route, or under blocking communication either of its ends."""
    pair, tensor = c.pair[a * len(c.device) + b], c.tensor[t]
    # One of the two terms is 0: a sum is cheaper than a branch that cannot be predicted.
    modelled_s = pair.latency_s + tensor.bytes * pair.s_per_byte
    return float(tensor.modelled * modelled_s + tensor.measured_s * pair.hops)


@inner
def add_copy(c: LoadInstance, s: LoadState, t: int, a: int, b: int, sign: int) -> None:
    """The transfer of a tensor from a to b comes (+1) or goes (-1), but for the sender's own time."""
    seconds = sign * transfer_s(c, t, a, b)
    # Within one memory nothing is copied.
    if c.device[a].owner != c.device[b].owner:
        s.device[c.device[b].owner].bytes += sign * c.tensor[t].held
    if c.blocking:
        s.load_s[b] += seconds * c.pair[a * len(c.device) + b].receives
    p = a * len(c.device) + b
    # Under blocking communication routes are empty: the ends pay.
    for k in range(c.pair[p].route, c.pair[p + 1].route):
        s.load_s[c.route[k]] += seconds


@inner
def sending_s(c: LoadInstance, s: LoadState, t: int, a: int) -> float:
    """Seconds a blocking sender on device a is busy with all copies of a tensor."""
    n_devices = len(c.device)
    if c.device[a].same_to_all:
        # No device but its own reads it.
        if s.readers[t, -1] == np.int64(s.readers[t, a] > 0):
            return 0.0
        # Any other device will do, since all cost the same.
        b = a - 1 if a > 0 else n_devices - 1
        return float(transfer_s(c, t, a, b) * c.pair[a * len(c.device) + b].sends)
    longest = 0.0
    for d in range(n_devices):
        if s.readers[t, d] > 0 and d != a:
            longest = max(longest, transfer_s(c, t, a, d) * c.pair[a * len(c.device) + d].sends)
    return longest


@inner
def add_copies(c: LoadInstance, s: LoadState, t: int, a: int, sign: int) -> None:
    """All transfers of a tensor written on device a come (+1) or go (-1)."""
    # Most tensors are read on one device: find it by its first reader, not by looking at all of them.
    if s.readers[t, -1] == 1:
        d = s.unit[c.reader[c.tensor[t].reader]].device
        if d != a:
            add_copy(c, s, t, a, d, sign)
    else:
        for d in range(len(c.device)):
            if s.readers[t, d] > 0 and d != a:
                add_copy(c, s, t, a, d, sign)
    if c.blocking:
        s.load_s[a] += sign * sending_s(c, s, t, a)


@inner
def add_reader(s: LoadState, t: int, d: int, sign: int) -> None:
    """A unit on device d that reads a tensor comes (+1) or goes (-1)."""
    # The last column counts the devices with a reader, so that `sending_s` need not.
    before = s.readers[t, d]
    s.readers[t, d] = before + sign
    s.readers[t, -1] += np.int64(before + sign > 0) - np.int64(before > 0)


@inner
def shift(c: LoadInstance, s: LoadState, u: int, b: int) -> None:
    """Move a unit to another device. O((tensors read + tensors written * D) * links of a route)."""
    a = s.unit[u].device
    s.load_s[a] -= c.unit_s[u, a]
    s.load_s[b] += c.unit_s[u, b]
    s.device[c.device[a].owner].bytes -= c.unit[u].bytes
    s.device[c.device[b].owner].bytes += c.unit[u].bytes
    # Units by size of workspace, and the largest size in use: taking a unit away looks down from it.
    w = c.unit[u].workspace
    s.workspaces[a, w] -= 1
    s.workspaces[b, w] += 1
    s.device[b].largest = max(s.device[b].largest, w)
    while s.device[a].largest > 0 and s.workspaces[a, s.device[a].largest] == 0:
        s.device[a].largest -= 1
    # Tensors that it reads. A device has one copy of a tensor, whoever reads it: it goes with the last reader and comes
    # with the first.
    for k in range(c.unit[u].input, c.unit[u + 1].input):
        t = c.input[k]
        p = s.unit[c.tensor[t].writer].device
        leaves = s.readers[t, a] == 1 and a != p
        enters = s.readers[t, b] == 0 and b != p
        # The sender's time is the longest of its copies, so it is taken off whole and put back whole.
        sender = c.blocking and (leaves or enters)
        if sender:
            s.load_s[p] -= sending_s(c, s, t, p)
        if leaves:
            add_copy(c, s, t, p, a, -1)
        if enters:
            add_copy(c, s, t, p, b, 1)
        add_reader(s, t, a, -1)
        add_reader(s, t, b, 1)
        if sender:
            s.load_s[p] += sending_s(c, s, t, p)
    # Tensors that it writes: all copies now come from elsewhere.
    for t in range(c.unit[u].output, c.unit[u + 1].output):
        for sign in (-1, 1):
            add_copies(c, s, t, a if sign < 0 else b, sign)
    s.unit[u].device = b
    _move_member(s, u, a, b)


@inner
def _move_member(s: LoadState, u: int, a: int, b: int) -> None:
    # The last member takes the free place: lists stay dense, so that one draw picks a member.
    last = s.member[a, s.device[a].units - 1]
    s.member[a, s.unit[u].slot] = last
    s.unit[last].slot = s.unit[u].slot
    s.device[a].units -= 1
    s.unit[u].slot = s.device[b].units
    s.member[b, s.device[b].units] = u
    s.device[b].units += 1


@inner
def refresh(c: LoadInstance, s: LoadState) -> None:
    """Everything that follows from `device`, anew: moves leave rounding errors behind. O(U + readers + T D)."""
    s.load_s.fill(0.0)
    s.readers.fill(0)
    s.workspaces.fill(0)
    for d in range(len(s.device)):
        s.device[d].bytes, s.device[d].largest, s.device[d].units = 0, 0, 0
    for u in range(len(s.unit)):
        d = s.unit[u].device
        s.load_s[d] += c.unit_s[u, d]
        s.device[c.device[d].owner].bytes += c.unit[u].bytes
        s.workspaces[d, c.unit[u].workspace] += 1
        s.device[d].largest = max(s.device[d].largest, c.unit[u].workspace)
        s.unit[u].slot = s.device[d].units
        s.member[d, s.device[d].units] = u
        s.device[d].units += 1
    # Readers of a tensor before its copies, which depend on where they are.
    for t in range(len(s.readers)):
        for k in range(c.tensor[t].reader, c.tensor[t + 1].reader):
            add_reader(s, t, s.unit[c.reader[k]].device, 1)
        add_copies(c, s, t, s.unit[c.tensor[t].writer].device, 1)


@inner
def excess(c: LoadInstance, s: LoadState) -> float:
    """0 if every memory has room for what it is charged with, else what it lacks: a hundredth each, and its share."""
    result = 0.0
    for d in range(len(c.device)):
        if c.device[d].owner != d:
            continue
        over = s.device[d].bytes + c.workspace_bytes[s.device[d].largest] - c.device[d].capacity_bytes
        # Devices on one memory may run an op each.
        b = c.device[d].next
        while b >= 0:
            over += c.workspace_bytes[s.device[b].largest]
            b = c.device[b].next
        # A hundredth for each device, so that one device too full by a byte still counts.
        if over > 0:
            result += 0.01 + over / max(1.0, float(c.device[d].capacity_bytes))
    return result


@inner
def steepness(s: LoadState) -> float:
    """The log of the 32-norm of all loads; notes the hottest resource.

    Unlike the largest load it falls whenever a high load does, so that a search has a slope to follow where several
    devices share the maximum.
    """
    total = 0.0
    hottest = 0
    for r in range(len(s.load_s)):
        if s.load_s[r] > s.load_s[hottest]:
            hottest = r
        # Relative to the largest, or the 32nd power would be 0 or infinite.
        x = s.load_s[r] / s.search[0].reference_s
        for _ in range(_POWER_STEPS):
            x *= x
        total += x
    s.search[0].hottest = hottest
    return float(np.log(max(total, 1e-300)) / 2.0**_POWER_STEPS)


# -- Moves ----------------------------------------------------------------------------------------------------


@inner
def draw(s: LoadState, bound: int) -> int:
    """A whole number from 0 to bound - 1, bound below 2**31."""
    s.search[0].random = next_random(s.search[0].random)
    # 31 bits times a number below 2**31 fits in 64: a scaled draw without a division.
    high = np.int64(scrambled(s.search[0].random) >> np.uint64(33))
    return int((high * np.int64(bound)) >> np.int64(31))


@inner
def neighbour(c: LoadInstance, s: LoadState, u: int) -> int:
    """A random unit that reads or writes a tensor u reads or writes, or -1."""
    inputs = c.unit[u + 1].input - c.unit[u].input
    degree = inputs + c.unit[u + 1].output - c.unit[u].output
    if degree == 0:
        return -1
    k = draw(s, degree)
    t = c.unit[u].output + k - inputs
    if k < inputs:
        t = c.input[c.unit[u].input + k]
        # The writer of a tensor that it reads is more of a neighbour than another reader.
        if draw(s, 4) > 0:
            return int(c.tensor[t].writer)
    v = c.reader[c.tensor[t].reader + draw(s, c.tensor[t + 1].reader - c.tensor[t].reader)]
    return int(v) if v != u else -1


@inner
def pick_unit(c: LoadInstance, s: LoadState) -> int:
    """Any unit, or just as often one of the hottest device or of an end of the hottest link."""
    n_devices = len(c.device)
    if draw(s, 2) == 0:
        d = s.search[0].hottest
        # A link is relieved by moving either end of a transfer that takes it.
        if d >= n_devices:
            first, last = c.link_ptr[d - n_devices], c.link_ptr[d - n_devices + 1]
            p = c.link_pair[first + draw(s, last - first)]
            d = p // n_devices if draw(s, 2) == 0 else p % n_devices
        if s.device[d].units > 0:
            return int(s.member[d, draw(s, s.device[d].units)])
    return int(draw(s, len(s.unit)))


@inner
def pick_target(c: LoadInstance, s: LoadState, u: int) -> int:
    """A device other than the unit's own: any, or just as often that of a neighbour."""
    a = s.unit[u].device
    if draw(s, 2) == 0:
        for _ in range(3):
            v = neighbour(c, s, u)
            if v >= 0 and s.unit[v].device != a:
                return int(s.unit[v].device)
    b = draw(s, len(c.device) - 1)
    return int(b + 1 if b >= a else b)


@inner
def grow(c: LoadInstance, s: LoadState, u: int, size: int, same_device: bool) -> int:
    """Fill `cluster` with u and units connected to it, at most so many; returns how many."""
    # Stamps, like marks, never need to be cleared.
    s.search[0].stamp += 1
    stamp = s.search[0].stamp
    s.change[0].cluster = u
    s.unit[u].stamp = stamp
    n = 1
    for _ in range(3 * size):
        if n == size:
            break
        v = neighbour(c, s, s.change[draw(s, n)].cluster)
        if v >= 0 and s.unit[v].stamp != stamp and (not same_device or s.unit[v].device == s.unit[u].device):
            s.unit[v].stamp = stamp
            s.change[n].cluster = v
            n += 1
    return n


@inner
def cluster_size(s: LoadState) -> int:
    """2 to 17, few more often than many."""
    return int(2 + draw(s, 1 << (1 + draw(s, 4))))


@inner
def move(c: LoadInstance, s: LoadState, u: int, b: int, size: int, same_device: bool) -> bool:
    """Shift a unit and others connected to it as part of the change at hand; whether all may run there."""
    for j in range(grow(c, s, u, size, same_device)):
        v = s.change[j].cluster
        a = s.unit[v].device
        # Noted before it is moved, so that `undo` finds it whatever comes after.
        if a != b:
            k = s.search[0].moved
            if not c.allowed[v, b] or k == len(s.change):
                return False
            s.change[k].unit = v
            s.change[k].came_from = a
            s.search[0].moved = k + 1
            shift(c, s, v, b)
    return True


@inner
def propose(c: LoadInstance, s: LoadState) -> bool:
    """Make a random change, noted in `change`; whether pins allow it."""
    s.search[0].moved = 0
    u = pick_unit(c, s)
    a, b = s.unit[u].device, pick_target(c, s, u)
    # 0-6 cluster against cluster, 7-14 cluster against unit, 15-39 unit against unit, 40-74 unit, 75-89 cluster of one
    # device, 90-99 cluster of several
    kind = draw(s, 100)
    v = u
    if kind < 40:
        if s.device[b].units == 0:
            return False
        v = int(s.member[b, draw(s, s.device[b].units)])
    one_device = kind < 90
    if not move(c, s, u, b, cluster_size(s) if kind < 15 or kind >= 75 else 1, one_device):
        return False
    return v == u or move(c, s, v, a, cluster_size(s) if kind < 7 else 1, one_device)


@inner
def undo(c: LoadInstance, s: LoadState) -> None:
    """Take the change back, and the loads to the last bit."""
    # Backwards: a unit may have moved twice.
    for k in range(s.search[0].moved - 1, -1, -1):
        shift(c, s, s.change[k].unit, s.change[k].came_from)
    # Shifting back leaves rounding errors, which would add up over a million changes.
    for r in range(len(s.load_s)):
        s.load_s[r] = s.saved_s[r]


@inner
def keep(s: LoadState) -> None:
    """Note which units the change has moved since `best` was found."""
    # Only what has moved need be copied when a new best is found.
    for k in range(s.search[0].moved):
        u = s.change[k].unit
        if not s.unit[u].is_changed:
            s.unit[u].is_changed = True
            s.changed[s.search[0].changed] = u
            s.search[0].changed += 1


@inner
def remember(s: LoadState, value_s: float) -> None:
    """The placement at hand is the best so far. O(units moved since the last one)."""
    s.search[0].best_s = value_s
    for k in range(s.search[0].changed):
        u = s.changed[k]
        s.unit[u].best = s.unit[u].device
        s.unit[u].is_changed = False
    s.search[0].changed = 0


@entry_without_arrays
def anneal(c: LoadInstance, s: LoadState, proposals: int, hot: float, cold: float) -> None:
    """Try so many changes while the temperature falls from hot to cold (relative to the loads)."""
    refresh(c, s)
    s.search[0].reference_s = 1e-300
    for r in range(len(s.load_s)):
        s.search[0].reference_s = max(s.search[0].reference_s, s.load_s[r])
    # Each proposal cools by the same factor.
    cooling = (cold / hot) ** (1.0 / proposals)
    temperature = hot
    now, now_over = steepness(s), excess(c, s)
    hottest = s.search[0].hottest
    for _ in range(proposals):
        temperature *= cooling
        for r in range(len(s.load_s)):
            s.saved_s[r] = s.load_s[r]
        accepted = propose(c, s)
        if s.search[0].moved == 0:
            continue
        if accepted:
            after, over = steepness(s), excess(c, s)
            # Missing memory weighs more as it gets colder, until nothing that does not fit is accepted.
            worse = after - now + (over - now_over) / np.sqrt(temperature)
            accepted = worse <= 0 or worse <= -temperature * np.log((draw(s, 1 << 30) + 1) / float(1 << 30))
        if not accepted:
            undo(c, s)
            s.search[0].hottest = hottest
            continue
        keep(s)
        now, now_over, hottest = after, over, s.search[0].hottest
        if over == 0 and s.load_s[hottest] < s.search[0].best_s:
            remember(s, s.load_s[hottest])
