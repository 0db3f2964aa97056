"""Moves of the makespan search, chosen by what held the accepted schedule up, and the annealing loop around them."""

# Letters
# g   the problem, a `MakespanInstance` of bare pointers; s, the chain, a `MakespanState` likewise
# n, m, e   numbers of ops, tensors and edges; n_devices, n_links, n_units likewise
# i, j   ops; c, a consumer; p, a producer; t, a tensor; d, b, devices; u, a unit
# x   a transfer, in order of request; k, at   positions in a list
# n_o, e_o, x_o   where the trial's half of what is doubled begins, by op, edge and transfer
# a   an op at one end of an edge; level, own, other   of groups and devices

from __future__ import annotations

import numpy as np

from baselines.local_search.makespan_kernel import simulate
from baselines.local_search.makespan_state import (
    AFFECTED,
    BY_TAIL,
    CURRENT,
    DECAY,
    DIRTY,
    HOT,
    INF,
    LOGGED,
    LOGGED_KEYS,
    N_MOVES,
    NOW,
    PATH,
    PICKED,
    SNAPSHOTS,
    TEMPERATURE,
    TOP,
    TRIAL,
    MakespanInstance,
    MakespanState,
    wide,
)
from baselines.local_search.makespan_trial import (
    accept,
    below,
    clear_logs,
    fits,
    merge_prefix,
    place,
    set_key,
    tail_of,
    undo,
    uniform,
    update_tails,
)
from env.jit import entry, inlined, inner
from env.simulation.pieces import pointers

# Kinds of moves
GROUP, SEGMENT, CUT, GATHER, SWAP, RAISE, LOWER, RANDOM, REKEY, NUDGE = range(10)
_ATTEMPTS = 8  # proposals in a row that change nothing, before an evaluation is given up
_MEMORY = 2000.0  # tries after which what happened before counts half
_BALLS = 7  # a random cluster has up to 2 ** this many units
_TINY = 1e-9  # of the step time: one key over another, with next to nothing between


@inner
def _critical(s: MakespanState) -> int:
    """Any op of the critical path."""
    return wide(s.path_op[below(s, s.counts[PATH])])


@inner
def _neighbour(g: MakespanInstance, s: MakespanState, i: int) -> int:
    """Any op that reads from or writes to op ``i``; the op itself if there is none."""
    # One draw over inputs and outputs together, so that every neighbour is as likely.
    inputs = wide(g.input_ptr[i + 1]) - g.input_ptr[i]
    k = below(s, inputs + g.edge_ptr[i + 1] - g.edge_ptr[i])
    result = wide(i)
    if k < inputs:
        result = wide(g.producer[g.input_edge[g.input_ptr[i] + k]])
    elif g.edge_ptr[i] < g.edge_ptr[i + 1]:
        result = wide(g.consumer[g.edge_ptr[i] + k - inputs])
    return result


@inner
def _pick(s: MakespanState, u: int) -> None:
    # Marks carry the number of the trial, so that they never need to be cleared.
    if s.mark[u] != s.counts[TRIAL]:
        s.mark[u] = s.counts[TRIAL]
        s.picked[s.counts[PICKED]] = u
        s.counts[PICKED] += 1


@inner
def _pick_ball(g: MakespanInstance, s: MakespanState, i: int) -> None:
    """Pick a random connected set of units around an op whose unit is picked, all on its device."""
    own = s.device[i]
    low = s.counts[PICKED] - 1
    # Sizes double: small balls and large ones are tried as often.
    size = 1 << (1 + below(s, _BALLS))
    # Three draws for each unit, since many lead back to what is picked; a small component ends it.
    for _ in range(3 * size):
        picked = s.counts[PICKED] - low
        if picked >= size:
            break
        u = s.picked[low + below(s, picked)]
        j = _neighbour(g, s, g.unit_op[g.unit_ptr[u] + below(s, g.unit_ptr[u + 1] - g.unit_ptr[u])])
        if s.device[j] == own:
            _pick(s, g.unit_of[j])


@inner
def _pick_group(g: MakespanInstance, s: MakespanState, n_units: int, i: int, level: int, device: int) -> None:
    """Pick the unit of an op, or (level 0 and up) its group: the units on one device only or (device -1) all."""
    u = wide(g.unit_of[i])
    fresh = s.mark[u] != s.counts[TRIAL]
    _pick(s, u)
    if level < 0 or not fresh:
        return
    # Groups are the same throughout a search; balls see to it that others are tried too.
    if uniform(s) < 0.25:
        _pick_ball(g, s, i)
        return
    group = g.group_of[level * n_units + u]
    for k in range(g.group_ptr[group], g.group_ptr[group + 1]):
        other = g.group_unit[k]
        if device < 0 or s.device[g.unit_op[g.unit_ptr[other]]] == device:
            _pick(s, other)


@inner
def _move_picked(g: MakespanInstance, s: MakespanState, n: int, n_devices: int, first: int, d: int) -> None:
    for k in range(first, s.counts[PICKED]):
        u = wide(s.picked[k])
        if g.allowed[u * n_devices + d] == 1:
            for j in range(g.unit_ptr[u], g.unit_ptr[u + 1]):
                place(g, s, n, n_devices, wide(g.unit_op[j]), d)


@inner
def _target(g: MakespanInstance, s: MakespanState, n_devices: int, i: int) -> int:
    """Another device for an op, that of a neighbour or any; its own if none was found."""
    own = wide(s.device[i])
    u = wide(g.unit_of[i])
    # Next to a neighbour a transfer is saved; anywhere else, a device that is idle may be found.
    near = uniform(s) < 0.6
    for _ in range(4):
        d = wide(s.device[_neighbour(g, s, i)]) if near else below(s, n_devices)
        if d != own and g.allowed[u * n_devices + d] == 1:
            return d
        near = False
    return own


@inner
def _move_segment(g: MakespanInstance, s: MakespanState, n: int, n_devices: int) -> None:
    """A stretch of the critical path on one device goes where the path came from or goes on, or elsewhere."""
    # From a point of the path to both sides, as far as the same device goes and chance allows.
    low = high = below(s, s.counts[PATH])
    own = wide(s.device[s.path_op[low]])
    # Mean lengths of 2, 4, 8 .. 256 to either side, each as often.
    go_on = 1.0 - 0.5 ** (1.0 + below(s, 8))
    while low > 0 and s.device[s.path_op[low - 1]] == own and uniform(s) < go_on:
        low -= 1
    while high + 1 < s.counts[PATH] and s.device[s.path_op[high + 1]] == own and uniform(s) < go_on:
        high += 1
    # The path runs from the last op to the first: what comes before in the list comes later in the step.
    d = own
    chance = uniform(s)
    if chance < 0.25 and low > 0:
        d = wide(s.device[s.path_op[low - 1]])
    elif chance < 0.5 and high + 1 < s.counts[PATH]:
        d = wide(s.device[s.path_op[high + 1]])
    if d == own:
        d = _target(g, s, n_devices, wide(s.path_op[high]))
    for k in range(low, high + 1):
        _pick(s, g.unit_of[s.path_op[k]])
    _move_picked(g, s, n, n_devices, wide(0), d)


@inner
def _gather(g: MakespanInstance, s: MakespanState, n: int, n_devices: int, n_units: int, level: int) -> None:
    """All consumers of a tensor on the critical path go to one device."""
    # Where the producer is no transfer is needed; where one consumer is, one is enough for all.
    edge = s.hot_edge[below(s, s.counts[HOT])]
    a = wide(g.producer[edge])
    d = wide(s.device[a if uniform(s) < 0.7 else g.consumer[edge]])
    for k in range(g.edge_ptr[a], g.edge_ptr[a + 1]):
        if g.edge_tensor[k] == g.edge_tensor[edge]:
            c = wide(g.consumer[k])
            _pick_group(g, s, n_units, c, wide(level if uniform(s) < 0.3 else -1), wide(s.device[c]))
    _move_picked(g, s, n, n_devices, wide(0), d)


@inner
def _swap(g: MakespanInstance, s: MakespanState, n: int, n_devices: int, n_units: int, level: int) -> None:
    """A critical group changes places with one that runs elsewhere at about the same time."""
    current = s.counts[CURRENT] * n
    i = _critical(s)
    own = wide(s.device[i])
    # The nearest in time of a few at random: swapping with what runs then leaves both devices about as busy.
    best, apart = wide(-1), INF
    for _ in range(_ATTEMPTS):
        j = below(s, n)
        gap = abs(s.start_s[current + j] - s.start_s[current + i])
        if s.device[j] != own and gap < apart:
            best, apart = j, gap
    if best < 0:
        return
    other = wide(s.device[best])
    _pick_group(g, s, n_units, i, level, own)
    # Both groups are picked before either moves, or the second would take ops of the first along.
    middle = s.counts[PICKED]
    _pick_group(g, s, n_units, best, level, other)
    last = s.counts[PICKED]
    s.counts[PICKED] = middle
    _move_picked(g, s, n, n_devices, wide(0), other)
    s.counts[PICKED] = last
    _move_picked(g, s, n, n_devices, middle, own)


@inner
def _reorder(g: MakespanInstance, s: MakespanState, n: int, kind: int) -> None:
    """Give an op another place in the queue of its device."""
    current = s.counts[CURRENT] * n
    # Random, so that two ops that pass a third do not end up with equal keys.
    tiny = _TINY * s.values[NOW] * uniform(s)
    if kind == NUDGE:
        i = below(s, n)
        other = below(s, n) if uniform(s) < 0.3 else wide(s.before[current + i])
        if other >= 0:
            set_key(s, i, s.key[other] + tiny)
        return
    if s.counts[HOT] > 0 and uniform(s) < 0.3:  # what is sent late
        i = wide(g.producer[s.hot_edge[below(s, s.counts[HOT])]])
        if s.before[current + i] >= 0:
            set_key(s, i, s.key[s.before[current + i]] + tiny)
        return
    i = _critical(s)
    for _ in range(_ATTEMPTS):  # one that waited for its device
        if s.before[current + i] >= 0 and s.arrived_s[i] < s.start_s[current + i]:
            break
        i = _critical(s)
    before = wide(s.before[current + i])
    if before < 0:
        return
    if kind == LOWER:
        set_key(s, before, s.key[i] - tiny)
        return
    # Overtake one op after the other, but none that started before this one was ready: that would change nothing.
    while True:
        earlier = wide(s.before[current + before])
        if earlier < 0 or s.start_s[current + earlier] < s.arrived_s[i] or uniform(s) < 0.5:
            break
        before = earlier
    set_key(s, i, s.key[before] + tiny)


@inner
def _move(
    g: MakespanInstance, s: MakespanState, n: int, n_devices: int, n_units: int, n_levels: int, kind: int
) -> None:
    """Change the trial's placement or keys."""
    # -1 is a unit on its own.
    level = below(s, n_levels + 1) - 1
    if kind in (GROUP, RANDOM):
        i = _critical(s) if kind == GROUP else below(s, n)
        _pick_group(g, s, n_units, i, level, wide(s.device[i] if uniform(s) < 0.75 else -1))
        _move_picked(g, s, n, n_devices, wide(0), _target(g, s, n_devices, i))
    elif kind == SEGMENT:
        _move_segment(g, s, n, n_devices)
    elif kind == CUT and s.counts[HOT] > 0:
        edge = s.hot_edge[below(s, s.counts[HOT])]
        a, b = wide(g.producer[edge]), wide(g.consumer[edge])
        if uniform(s) < 0.5:
            a, b = b, a
        _pick_group(g, s, n_units, a, level, wide(s.device[a]))
        _move_picked(g, s, n, n_devices, wide(0), wide(s.device[b]))
    elif kind == GATHER and s.counts[HOT] > 0:
        _gather(g, s, n, n_devices, n_units, level)
    elif kind == SWAP:
        _swap(g, s, n, n_devices, n_units, level)
    elif kind == REKEY:
        for i in range(n):
            set_key(s, i, s.tail[i])
    elif not s.counts[BY_TAIL]:
        _reorder(g, s, n, kind)


@inner
def _choose(s: MakespanState) -> int:
    """A kind of move, by how often it has helped."""
    # While tails are the keys, kinds from RAISE on are left out: most of them change keys that nobody reads.
    kinds = RAISE if s.counts[BY_TAIL] else N_MOVES
    total = 0.0
    for k in range(kinds):
        total += _worth(s, k)
    at = uniform(s) * total
    for k in range(kinds):
        at -= _worth(s, k)
        if at < 0.0:
            return wide(k)
    return wide(0)


@inner
def _worth(s: MakespanState, k: int) -> float:
    return float(0.01 + (1.0 + s.weight[2 * k + 1]) / (10.0 + s.weight[2 * k]))


@inlined
def _begin(g: MakespanInstance, s: MakespanState, n: int, m: int, e: int, n_devices: int, n_links: int) -> float:
    """Accept ``s.device`` and ``s.key``; returns the step time, infinite if that does not fit."""
    for d in range(n_devices):
        s.work[d] = 0.0
    # Consumers first: a tail is made of theirs.
    for at in range(n - 1, -1, -1):
        i = wide(g.topological[at])
        own = s.device[i]
        s.work[own] += g.op_s[i * n_devices + own]
        s.tail[i] = tail_of(g, s, n_devices, i)
        s.dirty[at] = 0
    s.counts[DIRTY] = 0
    s.counts[TOP] = -1
    # No snapshot is of use yet; the first run takes them all.
    for k in range(SNAPSHOTS):
        s.snap_row[k] = 2 * k
    step_s = simulate(g, s, n, e, n_devices, n_links, wide(-1), INF)
    if fits(g, s, n, m, e, n_devices, step_s):
        accept(g, s, n, e, wide(-1), step_s)
    else:
        step_s = INF
    return step_s


@inlined
def _propose(g: MakespanInstance, s: MakespanState, n: int, n_devices: int, n_units: int, n_levels: int) -> int:
    """Change the placement or keys; returns the kind of move."""
    clear_logs(s)
    kind = wide(0)
    for _ in range(_ATTEMPTS):
        s.counts[TRIAL] += 1
        s.counts[PICKED] = 0
        kind = _choose(s)
        _move(g, s, n, n_devices, n_units, n_levels, kind)
        if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
            break
    # Before keys change: those of moved ops follow their new tails.
    update_tails(g, s, n_devices)
    if not s.counts[BY_TAIL] and uniform(s) < 0.5:
        for k in range(s.counts[LOGGED]):
            set_key(s, wide(s.log_op[k]), s.tail[s.log_op[k]])
    return kind


@inlined
def _judge(
    g: MakespanInstance,
    s: MakespanState,
    n: int,
    m: int,
    e: int,
    n_devices: int,
    n_links: int,
    kind: int,
    limit: float,
) -> None:
    """Keep what was proposed if it fits and the step then takes at most ``limit``."""
    # The last snapshot from before the trial can differ from the accepted schedule; -1 if there is none.
    first = wide(SNAPSHOTS - 1)
    while first >= 0 and s.snap_now[s.snap_row[first]] >= s.values[AFFECTED]:
        first -= 1
    step_s = simulate(g, s, n, e, n_devices, n_links, first, limit)
    within = step_s < INF
    # Only now: most trials stop at the limit, and need no complete schedule.
    if within and first >= 0:
        merge_prefix(g, s, n, e, first)
    s.weight[2 * kind] += 1.0
    if within and fits(g, s, n, m, e, n_devices, step_s):
        s.weight[2 * kind + 1] += step_s < s.values[NOW]
        accept(g, s, n, e, first, step_s)
    else:
        undo(g, s, n_devices)
    # Old successes fade, since late in a search other kinds help than at its beginning.
    if s.weight[2 * kind] > _MEMORY:
        s.weight[2 * kind] *= 0.5
        s.weight[2 * kind + 1] *= 0.5


@entry
def _anneal(instance: MakespanInstance, state: MakespanState, begin: bool, evaluations: int) -> bool:
    n, n_devices = instance.op_s.shape
    m, e, n_links = len(instance.tensor_bytes), len(instance.consumer), len(state.link_free)
    n_units = len(instance.unit_ptr) - 1
    n_levels = len(instance.group_of) // n_units
    g = pointers(instance)
    s = pointers(state)
    if begin and _begin(g, s, n, m, e, n_devices, n_links) == INF:
        return False
    for _trial in range(evaluations):
        s.values[TEMPERATURE] *= s.values[DECAY]
        # Metropolis' rule turned round: draw how much slower is accepted first, so that the loop may stop beyond it.
        limit = s.values[NOW] - s.values[TEMPERATURE] * np.log(1.0 - uniform(s))
        kind = _propose(g, s, n, n_devices, n_units, n_levels)
        if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
            _judge(g, s, n, m, e, n_devices, n_links, kind, limit)
    return True


def anneal(instance: MakespanInstance, state: MakespanState, evaluations: int, begin: bool = False) -> bool:
    """Try so many changes of the accepted schedule; needs no Python lock.

    Args:
        begin: accept ``state.device`` first, under ``state.key`` or, with ``state.counts[BY_TAIL]``, longest paths.

    Returns:
        False, with nothing tried, if that placement does not fit into memory.
    """
    return bool(_anneal(instance, state, begin, evaluations))
