"""Trials of `baselines.local_search.makespan_search`: changes of a schedule, simulated, and accepted or taken back.

Names: *key*, what devices choose their next op by, higher first; *tail*, the longest remaining path; *unit*, ops that
share a device; *trial*, a change and what it leads to, as opposed to the *accepted* or current schedule. A trial is
simulated by the loop of `env.simulation.kernel`, which gives it up as soon as an op, or the work left on a device, must
end beyond what would be accepted. Memory is looked at only where the time is accepted.
"""

# Letters, all of them records of bare pointers
# g   the graph, an `Arrays`; u, units and groups, a `Movable`; s, the chain, a `MakespanState`
# w, out   scratch and outcome of the simulator, a `StepState` and an `Output`
# n, m, e   numbers of ops, tensors and edges
# i   an op; t, a tensor; d, a device; x, a transfer, in order of request; k, a position

from __future__ import annotations

import numpy as np

from baselines.local_search.makespan_state import (
    BEST,
    BY_TAIL,
    HOT,
    INF,
    INSTANTS,
    LOGGED,
    LOGGED_KEYS,
    NOW,
    PATH,
    PICKED,
    SLACK,
    MakespanState,
    Movable,
    wide,
)
from env.jit import inlined, inner
from env.simulation.kernel import LONGEST_PATH, loop, prepare
from env.simulation.pieces import next_random, scrambled
from env.simulation.step_state import Arrays, Output, StepSizes, StepState, memory


@inner
def uniform(s: MakespanState) -> float:
    """In [0, 1), of 52 bits, so that its product with a whole number k is never rounded up to k."""
    s.random[0] = next_random(s.random[0])
    return np.float64(scrambled(s.random[0]) >> np.uint64(12)) * 2.0**-52


@inner
def below(s: MakespanState, k: int) -> int:
    """Any of 0 .. k - 1."""
    return wide(uniform(s) * k)


@inlined
def maker(g: Arrays, edge: int) -> int:
    """The op that makes the tensor of an edge."""
    return wide(g.tensor_producer[g.edge_tensor[edge]])


@inner
def place(g: Arrays, s: MakespanState, n_kinds: int, i: int, d: int) -> None:
    """Move op ``i`` to device ``d``."""
    old = s.device[i]
    if old == d:
        return
    # An op may be logged twice; `undo` goes backwards, and the oldest entry wins.
    s.log_op[s.counts[LOGGED]] = i
    s.log_device[s.counts[LOGGED]] = old
    s.counts[LOGGED] += 1
    _move(g, s, n_kinds, i, d)


@inlined
def _move(g: Arrays, s: MakespanState, n_kinds: int, i: int, d: int) -> None:
    s.work_s[s.device[i]] -= g.kind_s[wide(i) * n_kinds + g.kind_of[s.device[i]]]
    s.device[i] = d
    s.work_s[d] += g.kind_s[wide(i) * n_kinds + g.kind_of[d]]


@inner
def set_key(s: MakespanState, i: int, key: float) -> None:
    """Change the key of op ``i``."""
    if key != s.key[i]:
        s.log_key_op[s.counts[LOGGED_KEYS]] = i
        s.log_key[s.counts[LOGGED_KEYS]] = s.key[i]
        s.counts[LOGGED_KEYS] += 1
        s.key[i] = key


@inlined
def clear_logs(s: MakespanState) -> None:
    """Begin a trial: nothing is changed yet."""
    s.counts[LOGGED] = s.counts[LOGGED_KEYS] = s.counts[PICKED] = 0


@inner
def undo(g: Arrays, s: MakespanState, n_kinds: int) -> None:
    """Take the trial's changes back, the last one first."""
    # Work is undone by arithmetic, and so but for rounding, which SLACK allows for.
    for k in range(s.counts[LOGGED] - 1, -1, -1):
        _move(g, s, n_kinds, s.log_op[k], s.log_device[k])
    for k in range(s.counts[LOGGED_KEYS] - 1, -1, -1):
        s.key[s.log_key_op[k]] = s.log_key[k]


@inner
def set_times(g: Arrays, s: MakespanState, w: StepState, out: Output, size: StepSizes) -> None:
    """Prepare the simulation of the trial's placement; ``trial_tail`` are its longest remaining paths."""
    prepare(g, w, out, s.device, size)
    for i in range(size.n):
        s.trial_tail[i] = w.priority[i]


@inner
def simulate(
    g: Arrays, u: Movable, s: MakespanState, w: StepState, out: Output, size: StepSizes, limit: float
) -> tuple[float, int]:
    """Step time and number of transfers of the prepared trial; infinite beyond the limit or where it does not fit."""
    if not s.counts[BY_TAIL]:
        for i in range(size.n):
            w.priority[i] = s.key[i]
    # The last comparison is exact.
    step_s, x, instants = loop(g, w, out, s.device, LONGEST_PATH, size, s.trial_tail, s.work_s, limit * SLACK)
    s.counts[INSTANTS] += instants
    if step_s > limit or step_s == INF:
        return INF, x
    # Memory is summed up for steps alone that are quick enough to be taken.
    memory(g, w, out, s.device, size, x, step_s)
    for d in range(size.n_devices):
        if out.peak_bytes[d] > u.capacity_bytes[d]:
            return INF, x
    return step_s, x


@inner
def _find_waits(g: Arrays, s: MakespanState, w: StepState, out: Output, size: StepSizes, n_transfers: int) -> None:
    """Fill ``before``, ``transfer_edge`` and ``transfer_behind`` of the schedule just simulated."""
    for i in range(size.n):
        s.started[out.op_rank[i]] = i
    for d in range(size.n_devices):
        s.last_op[d] = -1
    for k in range(size.n):
        i = s.started[k]
        s.before[i] = s.last_op[s.device[i]]
        s.last_op[s.device[i]] = i
    # Backwards, so that the first edge of each transfer stays.
    for edge in range(size.e - 1, -1, -1):
        if w.copy_of[edge] >= size.m:
            s.transfer_edge[w.copy_of[edge] - size.m] = edge
    for link in range(size.n_links + 2):
        w.link_free[link] = 0.0
        s.link_last[link] = -1
    # Once more in order of request: a transfer waits for the last link of its route to become free.
    for x in range(n_transfers):
        start = out.op_end[g.tensor_producer[out.transfer_tensor[x]]]
        behind = -1
        first = wide(out.transfer_pair[x]) * size.n_hops
        for k in range(first, first + size.n_hops):
            if w.link_free[g.route[k]] > start:
                start = w.link_free[g.route[k]]
                behind = s.link_last[g.route[k]]
        for k in range(first, first + size.n_hops):
            w.link_free[g.route_held[k]] = out.transfer_end[x]
            s.link_last[g.route_held[k]] = x
        s.transfer_behind[x] = behind


@inner
def _trace(g: Arrays, s: MakespanState, w: StepState, out: Output, size: StepSizes) -> None:
    """Walk from the last op back to the start of the step, over whatever each op or transfer waited for."""
    n, m, e = size.n, size.m, size.e
    # The op that ends last, of equals the first.
    i = 0
    for k in range(n):
        if out.op_end[k] > out.op_end[i]:
            i = k
    length, hot = 0, 0
    while i >= 0 and length < n:
        s.path_op[length] = i
        cause = -1
        # It started as soon as its inputs were there: the last of them is the cause, otherwise its device was busy.
        if s.arrived_s[i] >= s.start_s[i]:
            for k in range(g.input_ptr[i], g.input_ptr[i + 1]):
                edge = g.input_edge[k]
                x = w.copy_of[edge] - m
                arrival = out.op_end[maker(g, edge)] if x < 0 else out.transfer_end[x]
                if arrival >= s.arrived_s[i]:
                    cause = edge
        before = s.before[i]
        if cause >= 0 and before >= 0 and out.op_end[before] >= s.start_s[i] and uniform(s) < 0.5:
            cause = -1  # both were waited for
        if cause < 0:
            i = before
        else:
            x = w.copy_of[cause] - m
            i = maker(g, cause)
            # A transfer that waited for a link is held up by the one before it there, and so on back to one that
            # did not.
            while x >= 0:
                edge = s.transfer_edge[x]
                if hot < n + e:
                    s.hot_edge[hot] = edge
                    hot += 1
                i = maker(g, edge)
                x = s.transfer_behind[x]
        length += 1
    s.counts[PATH] = length
    s.counts[HOT] = hot


@inner
def accept(
    g: Arrays, s: MakespanState, w: StepState, out: Output, size: StepSizes, n_transfers: int, step_s: float
) -> None:
    """The trial just simulated becomes the accepted schedule."""
    for i in range(size.n):
        s.tail[i] = s.trial_tail[i]
        s.start_s[i] = out.op_start[i]
        s.arrived_s[i] = w.ready_s[i]
    s.values[NOW] = step_s
    _find_waits(g, s, w, out, size, n_transfers)
    _trace(g, s, w, out, size)
    if step_s < s.values[BEST]:
        s.values[BEST] = step_s
        for i in range(size.n):
            s.best_device[i] = s.device[i]
            s.best_key[i] = s.tail[i] if s.counts[BY_TAIL] else s.key[i]
