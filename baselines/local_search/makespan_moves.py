"""Moves of the makespan search, chosen by what held the accepted schedule up, and the annealing loop around them."""

# Letters as in `makespan_kernel`, and
# j   an op; c, a consumer; b, a device; a, an op at one end of an edge
# level, own, other   of groups and devices

from __future__ import annotations

import numpy as np

from baselines.local_search.makespan_kernel import (
    accept,
    below,
    clear_logs,
    maker,
    place,
    set_key,
    set_times,
    simulate,
    undo,
    uniform,
)
from baselines.local_search.makespan_state import (
    BY_TAIL,
    DECAY,
    HOT,
    INF,
    LOGGED,
    LOGGED_KEYS,
    N_MOVES,
    NOW,
    PATH,
    PICKED,
    TEMPERATURE,
    TRIAL,
    MakespanInstance,
    MakespanState,
    Movable,
    wide,
)
from env.jit import entry, inlined, inner
from env.simulation.pieces import pointers
from env.simulation.step_state import Arrays, Output, StepSizes, StepState, new_output, new_state, sizes_of

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
def _neighbour(g: Arrays, s: MakespanState, i: int) -> int:
    """Any op that reads from or writes to op ``i``; the op itself if there is none."""
    # One draw over inputs and outputs together, so that every neighbour is as likely.
    inputs = wide(g.input_ptr[i + 1]) - g.input_ptr[i]
    k = below(s, inputs + g.edge_ptr[i + 1] - g.edge_ptr[i])
    result = wide(i)
    if k < inputs:
        result = maker(g, g.input_edge[g.input_ptr[i] + k])
    elif g.edge_ptr[i] < g.edge_ptr[i + 1]:
        result = wide(g.consumer[g.edge_ptr[i] + k - inputs])
    return result


@inner
def _pick(s: MakespanState, unit: int) -> None:
    # Marks carry the number of the trial, so that they never need to be cleared.
    if s.mark[unit] != s.counts[TRIAL]:
        s.mark[unit] = s.counts[TRIAL]
        s.picked[s.counts[PICKED]] = unit
        s.counts[PICKED] += 1


@inner
def _pick_ball(g: Arrays, u: Movable, s: MakespanState, i: int) -> None:
    """Pick a random connected set of units around an op whose unit is picked, all on its device."""
    own = s.device[i]
    low = s.counts[PICKED] - 1
    # StepSizes double: small balls and large ones are tried as often.
    size = 1 << (1 + below(s, _BALLS))
    # Three draws for each unit, since many lead back to what is picked; a small component ends it.
    for _ in range(3 * size):
        picked = s.counts[PICKED] - low
        if picked >= size:
            break
        unit = s.picked[low + below(s, picked)]
        j = _neighbour(g, s, u.unit_op[u.unit_ptr[unit] + below(s, u.unit_ptr[unit + 1] - u.unit_ptr[unit])])
        if s.device[j] == own:
            _pick(s, u.unit_of[j])


@inner
def _pick_group(g: Arrays, u: Movable, s: MakespanState, i: int, level: int, device: int) -> None:
    """Pick the unit of an op, or (level 0 and up) its group: the units on one device only or (device -1) all."""
    unit = wide(u.unit_of[i])
    fresh = s.mark[unit] != s.counts[TRIAL]
    _pick(s, unit)
    if level < 0 or not fresh:
        return
    # Groups are the same throughout a search; balls see to it that others are tried too.
    if uniform(s) < 0.25:
        _pick_ball(g, u, s, i)
        return
    group = u.group_of[level * u.counts[0] + unit]
    for k in range(u.group_ptr[group], u.group_ptr[group + 1]):
        other = u.group_unit[k]
        if device < 0 or s.device[u.unit_op[u.unit_ptr[other]]] == device:
            _pick(s, other)


@inner
def _move_picked(g: Arrays, u: Movable, s: MakespanState, size: StepSizes, first: int, d: int) -> None:
    for k in range(first, s.counts[PICKED]):
        unit = wide(s.picked[k])
        if u.allowed[unit * size.n_devices + d] == 1:
            for j in range(u.unit_ptr[unit], u.unit_ptr[unit + 1]):
                place(g, s, size.n_kinds, wide(u.unit_op[j]), d)


@inner
def _target(g: Arrays, u: Movable, s: MakespanState, n_devices: int, i: int) -> int:
    """Another device for an op, that of a neighbour or any; its own if none was found."""
    own = wide(s.device[i])
    unit = wide(u.unit_of[i])
    # Next to a neighbour a transfer is saved; anywhere else, a device that is idle may be found.
    near = uniform(s) < 0.6
    for _ in range(4):
        d = wide(s.device[_neighbour(g, s, i)]) if near else below(s, n_devices)
        if d != own and u.allowed[unit * n_devices + d] == 1:
            return d
        near = False
    return own


@inner
def _move_segment(g: Arrays, u: Movable, s: MakespanState, size: StepSizes) -> None:
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
        d = _target(g, u, s, size.n_devices, wide(s.path_op[high]))
    for k in range(low, high + 1):
        _pick(s, u.unit_of[s.path_op[k]])
    _move_picked(g, u, s, size, wide(0), d)


@inner
def _gather(g: Arrays, u: Movable, s: MakespanState, size: StepSizes, level: int) -> None:
    """All consumers of a tensor on the critical path go to one device."""
    # Where the producer is no transfer is needed; where one consumer is, one is enough for all.
    edge = s.hot_edge[below(s, s.counts[HOT])]
    a = maker(g, edge)
    d = wide(s.device[a if uniform(s) < 0.7 else g.consumer[edge]])
    for k in range(g.edge_ptr[a], g.edge_ptr[a + 1]):
        if g.edge_tensor[k] == g.edge_tensor[edge]:
            c = wide(g.consumer[k])
            _pick_group(g, u, s, c, wide(level if uniform(s) < 0.3 else -1), wide(s.device[c]))
    _move_picked(g, u, s, size, wide(0), d)


@inner
def _swap(g: Arrays, u: Movable, s: MakespanState, size: StepSizes, level: int) -> None:
    """A critical group changes places with one that runs elsewhere at about the same time."""
    i = _critical(s)
    own = wide(s.device[i])
    # The nearest in time of a few at random: swapping with what runs then leaves both devices about as busy.
    best, apart = wide(-1), INF
    for _ in range(_ATTEMPTS):
        j = below(s, size.n)
        gap = abs(s.start_s[j] - s.start_s[i])
        if s.device[j] != own and gap < apart:
            best, apart = j, gap
    if best < 0:
        return
    other = wide(s.device[best])
    _pick_group(g, u, s, i, level, own)
    # Both groups are picked before either moves, or the second would take ops of the first along.
    middle = s.counts[PICKED]
    _pick_group(g, u, s, best, level, other)
    last = s.counts[PICKED]
    s.counts[PICKED] = middle
    _move_picked(g, u, s, size, wide(0), other)
    s.counts[PICKED] = last
    _move_picked(g, u, s, size, middle, own)


@inner
def _reorder(g: Arrays, s: MakespanState, n: int, kind: int) -> None:
    """Give an op another place in the queue of its device."""
    # Random, so that two ops that pass a third do not end up with equal keys.
    tiny = _TINY * s.values[NOW] * uniform(s)
    if kind == NUDGE:
        i = below(s, n)
        other = below(s, n) if uniform(s) < 0.3 else wide(s.before[i])
        if other >= 0:
            set_key(s, i, s.key[other] + tiny)
        return
    if s.counts[HOT] > 0 and uniform(s) < 0.3:  # what is sent late
        i = maker(g, s.hot_edge[below(s, s.counts[HOT])])
        if s.before[i] >= 0:
            set_key(s, i, s.key[s.before[i]] + tiny)
        return
    i = _critical(s)
    for _ in range(_ATTEMPTS):  # one that waited for its device
        if s.before[i] >= 0 and s.arrived_s[i] < s.start_s[i]:
            break
        i = _critical(s)
    before = wide(s.before[i])
    if before < 0:
        return
    if kind == LOWER:
        set_key(s, before, s.key[i] - tiny)
        return
    # Overtake one op after the other, but none that started before this one was ready: that would change nothing.
    while True:
        earlier = wide(s.before[before])
        if earlier < 0 or s.start_s[earlier] < s.arrived_s[i] or uniform(s) < 0.5:
            break
        before = earlier
    set_key(s, i, s.key[before] + tiny)


@inner
def _move(g: Arrays, u: Movable, s: MakespanState, size: StepSizes, kind: int) -> None:
    """Change the trial's placement or keys."""
    # -1 is a unit on its own.
    level = below(s, u.counts[1] + 1) - 1
    if kind in (GROUP, RANDOM):
        i = _critical(s) if kind == GROUP else below(s, size.n)
        _pick_group(g, u, s, i, level, wide(s.device[i] if uniform(s) < 0.75 else -1))
        _move_picked(g, u, s, size, wide(0), _target(g, u, s, size.n_devices, i))
    elif kind == SEGMENT:
        _move_segment(g, u, s, size)
    elif kind == CUT and s.counts[HOT] > 0:
        edge = s.hot_edge[below(s, s.counts[HOT])]
        a, b = maker(g, edge), wide(g.consumer[edge])
        if uniform(s) < 0.5:
            a, b = b, a
        _pick_group(g, u, s, a, level, wide(s.device[a]))
        _move_picked(g, u, s, size, wide(0), wide(s.device[b]))
    elif kind == GATHER and s.counts[HOT] > 0:
        _gather(g, u, s, size, level)
    elif kind == SWAP:
        _swap(g, u, s, size, level)
    elif kind == REKEY:
        for i in range(size.n):
            set_key(s, i, s.tail[i])
    elif not s.counts[BY_TAIL]:
        _reorder(g, s, size.n, kind)


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
def _begin(g: Arrays, u: Movable, s: MakespanState, w: StepState, out: Output, size: StepSizes) -> float:
    """Accept ``s.device`` and ``s.key``; returns the step time, infinite if that does not fit."""
    for d in range(size.n_devices):
        s.work_s[d] = 0.0
    for i in range(size.n):
        s.work_s[s.device[i]] += g.kind_s[i * size.n_kinds + g.kind_of[s.device[i]]]
    set_times(g, s, w, out, size)
    step_s, x = simulate(g, u, s, w, out, size, INF)
    if step_s < INF:
        accept(g, s, w, out, size, x, step_s)
    return step_s


@inlined
def _propose(g: Arrays, u: Movable, s: MakespanState, w: StepState, out: Output, size: StepSizes) -> int:
    """Change the placement or keys; returns the kind of move."""
    clear_logs(s)
    kind = wide(0)
    for _ in range(_ATTEMPTS):
        s.counts[TRIAL] += 1
        s.counts[PICKED] = 0
        kind = _choose(s)
        _move(g, u, s, size, kind)
        if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
            break
    # Before keys change: those of moved ops follow their new tails.
    if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
        set_times(g, s, w, out, size)
    if not s.counts[BY_TAIL] and uniform(s) < 0.5:
        for k in range(s.counts[LOGGED]):
            set_key(s, wide(s.log_op[k]), s.trial_tail[s.log_op[k]])
    return kind


@inlined
def _judge(
    g: Arrays, u: Movable, s: MakespanState, w: StepState, out: Output, size: StepSizes, kind: int, limit: float
) -> None:
    """Keep what was proposed if it fits and the step then takes at most ``limit``."""
    step_s, x = simulate(g, u, s, w, out, size, limit)
    s.weight[2 * kind] += 1.0
    if step_s < INF:
        s.weight[2 * kind + 1] += step_s < s.values[NOW]
        accept(g, s, w, out, size, x, step_s)
    else:
        undo(g, s, size.n_kinds)
    # Old successes fade, since late in a search other kinds help than at its beginning.
    if s.weight[2 * kind] > _MEMORY:
        s.weight[2 * kind] *= 0.5
        s.weight[2 * kind + 1] *= 0.5


@inner
def _anneal_in(
    arrays: Arrays,
    movable: Movable,
    state: MakespanState,
    scratch: StepState,
    output: Output,
    size: StepSizes,
    begin: bool,
    evaluations: int,
) -> bool:
    g = pointers(arrays)
    u = pointers(movable)
    s = pointers(state)
    w = pointers(scratch)
    out = pointers(output)
    if begin and _begin(g, u, s, w, out, size) == INF:
        return False
    for _trial in range(evaluations):
        s.values[TEMPERATURE] *= s.values[DECAY]
        # Metropolis' rule turned round: draw how much slower is accepted first, so that the loop may stop beyond it.
        limit = s.values[NOW] - s.values[TEMPERATURE] * np.log(1.0 - uniform(s))
        kind = _propose(g, u, s, w, out, size)
        if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
            _judge(g, u, s, w, out, size, kind, limit)
    return True


@entry
def _anneal(g: Arrays, u: Movable, s: MakespanState, begin: bool, evaluations: int) -> bool:
    size = sizes_of(g, len(s.link_last) - 2)
    scratch, output = new_state(size), new_output(size)
    # A call of its own: numba would free scratch and output here before the pointers to them are used.
    return _anneal_in(g, u, s, scratch, output, size, begin, evaluations)


def anneal(instance: MakespanInstance, state: MakespanState, evaluations: int, begin: bool = False) -> bool:
    """Try so many changes of the accepted schedule; needs no Python lock.

    Args:
        begin: accept ``state.device`` first, under ``state.key`` or, with ``state.counts[BY_TAIL]``, longest paths.

    Returns:
        False, with nothing tried, if that placement does not fit into memory.
    """
    return bool(_anneal(instance.arrays, instance.movable, state, begin, evaluations))
