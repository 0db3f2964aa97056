"""Moves of the makespan search, chosen by what held the accepted schedule up, and the annealing loop around them.

numba's cache looks at the file of the compiled function and at the values of the variables around it. So the one
function that is cached is made by another that knows a hash of all files it is compiled from. Integers are 64 bits wide
wherever they are handed on, lest numba compiles the same function for every mixture of widths.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np

from baselines.local_search import makespan_kernel, makespan_state, makespan_trial
from baselines.local_search.makespan_kernel import compiled, inlined, simulate
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
from env.jit import njit
from env.simulation import kernel
from env.simulation.kernel import pointers

# Kinds of moves
GROUP, SEGMENT, CUT, GATHER, SWAP, RAISE, LOWER, RANDOM, REKEY, NUDGE = range(10)
_ATTEMPTS = 8  # proposals in a row that change nothing, before an evaluation is given up
_MEMORY = 2000.0  # tries after which what happened before counts half
_BALLS = 7  # a random cluster has up to 2 ** this many units
_TINY = 1e-9  # of the step time: one key over another, with next to nothing between


@inlined
def _critical(s):  # type: ignore[no-untyped-def]
    """Any op of the critical path."""
    return np.int64(s.path_op[below(s, s.counts[PATH])])


@inlined
def _neighbour(g, s, i):  # type: ignore[no-untyped-def]
    """Any op that reads from or writes to op ``i``; the op itself if there is none."""
    inputs = np.int64(g.input_ptr[i + 1]) - g.input_ptr[i]
    k = below(s, inputs + g.edge_ptr[i + 1] - g.edge_ptr[i])
    result = np.int64(i)
    if k < inputs:
        result = np.int64(g.producer[g.input_edge[g.input_ptr[i] + k]])
    elif g.edge_ptr[i] < g.edge_ptr[i + 1]:
        result = np.int64(g.consumer[g.edge_ptr[i] + k - inputs])
    return result


@inlined
def _pick(s, u):  # type: ignore[no-untyped-def]
    if s.mark[u] != s.counts[TRIAL]:
        s.mark[u] = s.counts[TRIAL]
        s.picked[s.counts[PICKED]] = u
        s.counts[PICKED] += 1


@inlined
def _pick_ball(g, s, i):  # type: ignore[no-untyped-def]
    """Pick a random connected set of units around an op whose unit is picked, all on its device."""
    own = s.device[i]
    low = s.counts[PICKED] - 1
    size = 1 << (1 + below(s, _BALLS))
    for _ in range(3 * size):
        picked = s.counts[PICKED] - low
        if picked >= size:
            break
        u = s.picked[low + below(s, picked)]
        j = _neighbour(g, s, g.unit_op[g.unit_ptr[u] + below(s, g.unit_ptr[u + 1] - g.unit_ptr[u])])
        if s.device[j] == own:
            _pick(s, g.unit_of[j])


@compiled
def _pick_group(g, s, n_units, i, level, device):  # type: ignore[no-untyped-def]
    """Pick the unit of an op, or (level 0 and up) its group: the units on one device only or (device -1) all."""
    u = np.int64(g.unit_of[i])
    fresh = s.mark[u] != s.counts[TRIAL]
    _pick(s, u)
    if level < 0 or not fresh:
        return
    if uniform(s) < 0.25:
        _pick_ball(g, s, i)
        return
    group = g.group_of[level * n_units + u]
    for k in range(g.group_ptr[group], g.group_ptr[group + 1]):
        other = g.group_unit[k]
        if device < 0 or s.device[g.unit_op[g.unit_ptr[other]]] == device:
            _pick(s, other)


@compiled
def _move_picked(g, s, n, n_devices, first, d):  # type: ignore[no-untyped-def]
    for k in range(first, s.counts[PICKED]):
        u = np.int64(s.picked[k])
        if g.allowed[u * n_devices + d] == 1:
            for j in range(g.unit_ptr[u], g.unit_ptr[u + 1]):
                place(g, s, n, n_devices, np.int64(g.unit_op[j]), d)


@compiled
def _target(g, s, n_devices, i):  # type: ignore[no-untyped-def]
    """Another device for an op, that of a neighbour or any; its own if none was found."""
    own = np.int64(s.device[i])
    u = np.int64(g.unit_of[i])
    near = uniform(s) < 0.6
    for _ in range(4):
        d = np.int64(s.device[_neighbour(g, s, i)]) if near else below(s, n_devices)
        if d != own and g.allowed[u * n_devices + d] == 1:
            return d
        near = False
    return own


@compiled
def _move_segment(g, s, n, n_devices):  # type: ignore[no-untyped-def]
    """A stretch of the critical path on one device goes where the path came from or goes on, or elsewhere."""
    low = high = below(s, s.counts[PATH])
    own = np.int64(s.device[s.path_op[low]])
    go_on = 1.0 - 0.5 ** (1.0 + below(s, 8))
    while low > 0 and s.device[s.path_op[low - 1]] == own and uniform(s) < go_on:
        low -= 1
    while high + 1 < s.counts[PATH] and s.device[s.path_op[high + 1]] == own and uniform(s) < go_on:
        high += 1
    d = own
    chance = uniform(s)
    if chance < 0.25 and low > 0:
        d = np.int64(s.device[s.path_op[low - 1]])
    elif chance < 0.5 and high + 1 < s.counts[PATH]:
        d = np.int64(s.device[s.path_op[high + 1]])
    if d == own:
        d = _target(g, s, n_devices, np.int64(s.path_op[high]))
    for k in range(low, high + 1):
        _pick(s, g.unit_of[s.path_op[k]])
    _move_picked(g, s, n, n_devices, np.int64(0), d)


@compiled
def _gather(g, s, n, n_devices, n_units, level):  # type: ignore[no-untyped-def]
    """All consumers of a tensor on the critical path go to one device."""
    edge = s.hot_edge[below(s, s.counts[HOT])]
    a = np.int64(g.producer[edge])
    d = np.int64(s.device[a if uniform(s) < 0.7 else g.consumer[edge]])
    for k in range(g.edge_ptr[a], g.edge_ptr[a + 1]):
        if g.edge_tensor[k] == g.edge_tensor[edge]:
            c = np.int64(g.consumer[k])
            _pick_group(g, s, n_units, c, np.int64(level if uniform(s) < 0.3 else -1), np.int64(s.device[c]))
    _move_picked(g, s, n, n_devices, np.int64(0), d)


@compiled
def _swap(g, s, n, n_devices, n_units, level):  # type: ignore[no-untyped-def]
    """A critical group changes places with one that runs elsewhere at about the same time."""
    current = s.counts[CURRENT] * n
    i = _critical(s)
    own = np.int64(s.device[i])
    best, apart = np.int64(-1), INF
    for _ in range(_ATTEMPTS):
        j = below(s, n)
        gap = abs(s.start_s[current + j] - s.start_s[current + i])
        if s.device[j] != own and gap < apart:
            best, apart = j, gap
    if best < 0:
        return
    other = np.int64(s.device[best])
    _pick_group(g, s, n_units, i, level, own)
    middle = s.counts[PICKED]
    _pick_group(g, s, n_units, best, level, other)
    last = s.counts[PICKED]
    s.counts[PICKED] = middle
    _move_picked(g, s, n, n_devices, np.int64(0), other)
    s.counts[PICKED] = last
    _move_picked(g, s, n, n_devices, middle, own)


@compiled
def _reorder(g, s, n, kind):  # type: ignore[no-untyped-def]
    """Give an op another place in the queue of its device."""
    current = s.counts[CURRENT] * n
    tiny = _TINY * s.values[NOW] * uniform(s)
    if kind == NUDGE:
        i = below(s, n)
        other = below(s, n) if uniform(s) < 0.3 else np.int64(s.before[current + i])
        if other >= 0:
            set_key(s, i, s.key[other] + tiny)
        return
    if s.counts[HOT] > 0 and uniform(s) < 0.3:  # what is sent late
        i = np.int64(g.producer[s.hot_edge[below(s, s.counts[HOT])]])
        if s.before[current + i] >= 0:
            set_key(s, i, s.key[s.before[current + i]] + tiny)
        return
    i = _critical(s)
    for _ in range(_ATTEMPTS):  # one that waited for its device
        if s.before[current + i] >= 0 and s.arrived_s[i] < s.start_s[current + i]:
            break
        i = _critical(s)
    before = np.int64(s.before[current + i])
    if before < 0:
        return
    if kind == LOWER:
        set_key(s, before, s.key[i] - tiny)
        return
    while True:
        earlier = np.int64(s.before[current + before])
        if earlier < 0 or s.start_s[current + earlier] < s.arrived_s[i] or uniform(s) < 0.5:
            break
        before = earlier
    set_key(s, i, s.key[before] + tiny)


@compiled
def _move(g, s, n, n_devices, n_units, n_levels, kind):  # type: ignore[no-untyped-def]
    """Change the trial's placement or keys."""
    level = below(s, n_levels + 1) - 1
    if kind in (GROUP, RANDOM):
        i = _critical(s) if kind == GROUP else below(s, n)
        _pick_group(g, s, n_units, i, level, np.int64(s.device[i] if uniform(s) < 0.75 else -1))
        _move_picked(g, s, n, n_devices, np.int64(0), _target(g, s, n_devices, i))
    elif kind == SEGMENT:
        _move_segment(g, s, n, n_devices)
    elif kind == CUT and s.counts[HOT] > 0:
        edge = s.hot_edge[below(s, s.counts[HOT])]
        a, b = np.int64(g.producer[edge]), np.int64(g.consumer[edge])
        if uniform(s) < 0.5:
            a, b = b, a
        _pick_group(g, s, n_units, a, level, np.int64(s.device[a]))
        _move_picked(g, s, n, n_devices, np.int64(0), np.int64(s.device[b]))
    elif kind == GATHER and s.counts[HOT] > 0:
        _gather(g, s, n, n_devices, n_units, level)
    elif kind == SWAP:
        _swap(g, s, n, n_devices, n_units, level)
    elif kind == REKEY:
        for i in range(n):
            set_key(s, i, s.tail[i])
    elif not s.counts[BY_TAIL]:
        _reorder(g, s, n, kind)


@compiled
def _choose(s):  # type: ignore[no-untyped-def]
    """A kind of move, by how often it has helped."""
    kinds = RAISE if s.counts[BY_TAIL] else N_MOVES
    total = 0.0
    for k in range(kinds):
        total += _worth(s, k)
    at = uniform(s) * total
    for k in range(kinds):
        at -= _worth(s, k)
        if at < 0.0:
            return np.int64(k)
    return np.int64(0)


@inlined
def _worth(s, k):  # type: ignore[no-untyped-def]
    return 0.01 + (1.0 + s.weight[2 * k + 1]) / (10.0 + s.weight[2 * k])


@inlined
def _begin(g, s, n, m, e, n_devices, n_links):  # type: ignore[no-untyped-def]
    """Accept ``s.device`` and ``s.key``; returns the step time, infinite if that does not fit."""
    for d in range(n_devices):
        s.work[d] = 0.0
    for at in range(n - 1, -1, -1):
        i = np.int64(g.topological[at])
        own = s.device[i]
        s.work[own] += g.op_s[i * n_devices + own]
        s.tail[i] = tail_of(g, s, n_devices, i)
        s.dirty[at] = 0
    s.counts[DIRTY] = 0
    s.counts[TOP] = -1
    for k in range(SNAPSHOTS):
        s.snap_row[k] = 2 * k
    step_s = simulate(g, s, n, e, n_devices, n_links, np.int64(-1), INF)
    if fits(g, s, n, m, e, n_devices, step_s):
        accept(g, s, n, e, np.int64(-1), step_s)
    else:
        step_s = INF
    return step_s


@inlined
def _propose(g, s, n, n_devices, n_units, n_levels):  # type: ignore[no-untyped-def]
    """Change the placement or keys; returns the kind of move."""
    clear_logs(s)
    kind = np.int64(0)
    for _ in range(_ATTEMPTS):
        s.counts[TRIAL] += 1
        s.counts[PICKED] = 0
        kind = _choose(s)
        _move(g, s, n, n_devices, n_units, n_levels, kind)
        if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
            break
    update_tails(g, s, n_devices)
    if not s.counts[BY_TAIL] and uniform(s) < 0.5:
        for k in range(s.counts[LOGGED]):
            set_key(s, np.int64(s.log_op[k]), s.tail[s.log_op[k]])
    return kind


@inlined
def _judge(g, s, n, m, e, n_devices, n_links, kind, limit):  # type: ignore[no-untyped-def]
    """Keep what was proposed if it fits and the step then takes at most ``limit``."""
    first = np.int64(SNAPSHOTS - 1)
    while first >= 0 and s.snap_now[s.snap_row[first]] >= s.values[AFFECTED]:
        first -= 1
    step_s = simulate(g, s, n, e, n_devices, n_links, first, limit)
    within = step_s < INF
    if within and first >= 0:
        merge_prefix(g, s, n, e, first)
    s.weight[2 * kind] += 1.0
    if within and fits(g, s, n, m, e, n_devices, step_s):
        s.weight[2 * kind + 1] += step_s < s.values[NOW]
        accept(g, s, n, e, first, step_s)
    else:
        undo(g, s, n_devices)
    if s.weight[2 * kind] > _MEMORY:
        s.weight[2 * kind] *= 0.5
        s.weight[2 * kind + 1] *= 0.5


def _compiled_from(sources: str) -> Any:
    """`anneal`, compiled when first called, or loaded from a cache that was compiled from these very sources."""

    @njit(cache=True, nogil=True, error_model="numpy")
    def anneal(instance, state, begin, evaluations):  # type: ignore[no-untyped-def]
        _ = sources
        n, n_devices = instance.op_s.shape
        m, e, n_links = len(instance.tensor_bytes), len(instance.consumer), len(state.link_free)
        n_units = len(instance.unit_ptr) - 1
        n_levels = len(instance.group_of) // n_units
        g: Any = pointers(instance)  # type: ignore[call-arg]
        s: Any = pointers(state)
        if begin and _begin(g, s, n, m, e, n_devices, n_links) == INF:
            return False
        for _trial in range(evaluations):
            s.values[TEMPERATURE] *= s.values[DECAY]
            limit = s.values[NOW] - s.values[TEMPERATURE] * np.log(1.0 - uniform(s))
            kind = _propose(g, s, n, n_devices, n_units, n_levels)
            if s.counts[LOGGED] + s.counts[LOGGED_KEYS] > 0:
                _judge(g, s, n, m, e, n_devices, n_links, kind, limit)
        return True

    return anneal


COMPILED_FROM = (makespan_state, makespan_kernel, makespan_trial, kernel)  # and this file
_anneal = _compiled_from(hashlib.sha256("".join(map(inspect.getsource, COMPILED_FROM)).encode()).hexdigest())


def anneal(instance: MakespanInstance, state: MakespanState, evaluations: int, begin: bool = False) -> bool:
    """Try so many changes of the accepted schedule; needs no Python lock.

    Args:
        begin: accept ``state.device`` first, under ``state.key`` or, with ``state.counts[BY_TAIL]``, longest paths.

    Returns:
        False, with nothing tried, if that placement does not fit into memory.
    """
    return bool(_anneal(instance, state, begin, evaluations))
