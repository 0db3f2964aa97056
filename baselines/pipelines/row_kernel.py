"""Compiled loop of `baselines.pipelines.dp_linear`: the best cut of a row of atoms into one slice per device."""

# Letters
# N, M, C   numbers of atoms, nets and classes of devices; S, of states
# c   a class; m, a net; s, a state (how many devices of each class are in use); j, k, positions
# end   atoms before the end of the slice at hand; _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.jit import entry, inner

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


Bytes = NDArray[np.int8]
Narrow = NDArray[np.int32]

# Seconds of a slice on a class of devices: computing, receiving and sending, and of the latter two what remains
# however the slice grows, since the other end lies behind it.
_RUN, _IN, _OUT, _IN_FIXED, _OUT_FIXED = 0, 1, 2, 3, 4


class Rows(NamedTuple):
    """The atoms (N), nets (M) and classes of devices (C) of `baselines.pipelines.atoms`.

    Attributes:
        op_s: float64 [N, C], infinite where refused.
        net_ptr, net_at: int64 [N + 1] and [y], nets by atom.
        producer, readers, last_reader: int64 [M], atoms; the second is their number.
        enter_s, leave_s: float64 [M, C], cost of a net to who receives it and to who sends it.
        own_bytes, top_bytes: int64 [N], those of an atom that add up and those of which the largest counts.
        capacity: int64 [C].
        stride: int64 [C], states that differ by one device of a class are so far apart.
        used: int64 [S, C], devices of each class in each state.
        work_s: float64 [N + 1], least work of the first atoms.
        reach: float64 [S], most work that all devices of a state do in a second.
    """

    op_s: FloatArray
    net_ptr: IntArray
    net_at: IntArray
    producer: IntArray
    readers: IntArray
    last_reader: IntArray
    enter_s: FloatArray
    leave_s: FloatArray
    own_bytes: IntArray
    top_bytes: IntArray
    capacity: IntArray
    stride: IntArray
    used: IntArray
    work_s: FloatArray
    reach: FloatArray


class Slice(NamedTuple):
    """The slice at hand.

    Attributes:
        cost_s: float64 [C, 5].
        seen: int64 [M], ends of each net in the slice.
        made: bool [M], whether the producer is one of them.
    """

    cost_s: FloatArray
    seen: IntArray
    made: BoolArray


class Table(NamedTuple):
    """The least largest load of the slices that hold the first atoms of the row, by their number and state.

    Attributes:
        best_s: float64 [N + 1, S], infinite to begin with.
        least_s: float64 [N + 1], the least of each row, infinite to begin with.
        start: int32 [N + 1, S], first atom of the last slice.
        last: int8 [N + 1, S], the class of that slice.
    """

    best_s: FloatArray
    least_s: FloatArray
    start: Narrow
    last: Bytes


@inner
def viable(end: int, limit_s: float, rows: Rows, states: IntArray) -> tuple[int, float]:
    """Fill ``states`` with those whose devices can hold these atoms, and the others the rest, below the limit.

    Returns how many there are, and the least work of the atoms that their last slice may leave.
    """
    work_s, reach, stride, used = rows.work_s, rows.reach, rows.stride, rows.used
    # A little slack, since work is summed up in another sequence than loads.
    total_s, all_reach, slack = work_s[-1], reach[-1], 1 + 1e-9
    count, lowest_s = 0, np.inf
    for s in range(1, len(reach)):
        # Too much work for these devices in the time, or for all the others what is left over.
        if work_s[end] > limit_s * reach[s] * slack:
            continue
        if total_s - work_s[end] > limit_s * (all_reach - reach[s]) * slack + 1e-9 * total_s:
            continue
        states[count] = s
        count += 1
        # The work before the last slice must be at least the total less all that the other devices do within the limit.
        for c in range(len(stride)):
            if used[s, c] > 0:
                lowest_s = min(lowest_s, total_s - limit_s * (all_reach - reach[s - stride[c]]) * slack)
    return count, lowest_s - 1e-9 * total_s


@inner
def take(atom: int, end: int, rows: Rows, part: Slice) -> None:
    """Add the nets of an atom to a slice that ends before ``end``."""
    producer, enter_s, leave_s = rows.producer, rows.enter_s, rows.leave_s
    cost_s, seen, made = part.cost_s, part.seen, part.made
    classes = range(cost_s.shape[0])  # loops: expressions over a few numbers would take memory for each
    # Each net by its ends that are in the slice already: made, or read so often.
    for j in range(rows.net_ptr[atom], rows.net_ptr[atom + 1]):
        m = rows.net_at[j]
        if producer[m] == atom:
            made[m] = True
            # Readers in the slice have counted it as received; from now on it is made here.
            if seen[m] > 0:
                for c in classes:
                    cost_s[c, _IN] -= enter_s[m, c]
            # Some reader is outside, so that it must be sent; for ever, if one lies behind the slice.
            if seen[m] < rows.readers[m]:
                for c in classes:
                    cost_s[c, _OUT] += leave_s[m, c]
                if rows.last_reader[m] >= end:
                    for c in classes:
                        cost_s[c, _OUT_FIXED] += leave_s[m, c]
        elif made[m]:
            # The last reader has come in: nothing is sent any more.
            if seen[m] == rows.readers[m]:
                for c in classes:
                    cost_s[c, _OUT] -= leave_s[m, c]
        # The first reader receives it for all of them.
        elif seen[m] == 0:
            for c in classes:
                cost_s[c, _IN] += enter_s[m, c]
            if producer[m] >= end:
                for c in classes:
                    cost_s[c, _IN_FIXED] += enter_s[m, c]
        seen[m] += 1


@inner
def improve(
    end: int,
    start: int,
    cost_s: FloatArray,
    blocking: bool,
    limits_s: tuple[float, float],
    rows: Rows,
    states: IntArray,
    table: Table,
) -> bool:
    """Try a slice as the last one, on each class; whether a larger slice may be worth a try.

    ``limits_s`` are what the chain must stay below to be of interest, and what the slice must.
    """
    limit_s, threshold_s = limits_s
    stride, used = rows.stride, rows.used
    larger_may = False
    for c in range(len(stride)):
        run_s = cost_s[c, _RUN]
        if blocking:
            load_s = run_s + cost_s[c, _IN] + cost_s[c, _OUT]
            least_s = run_s + cost_s[c, _IN_FIXED] + cost_s[c, _OUT_FIXED]
        else:
            load_s = max(run_s, cost_s[c, _IN], cost_s[c, _OUT])
            least_s = max(run_s, cost_s[c, _IN_FIXED], cost_s[c, _OUT_FIXED])
        # A larger slice computes no less, and what is fixed stays.
        if least_s >= threshold_s:
            continue
        larger_may = True
        # Nor is there anything to gain where the atoms before are no better by themselves.
        if load_s >= threshold_s or table.least_s[start] >= threshold_s:
            continue
        for s in states:
            if used[s, c] > 0:
                # The state before the slice has one device of its class less.
                value_s = max(load_s, table.best_s[start, s - stride[c]])
                if value_s < table.best_s[end, s] and value_s < limit_s:
                    table.best_s[end, s] = value_s
                    table.start[end, s], table.last[end, s] = start, c
    return larger_may


@inner
def last_slices(
    end: int,
    states: IntArray,
    lowest_s: float,
    blocking: bool,
    limit_s: float,
    visits: IntArray,
    rows: Rows,
    part: Slice,
    table: Table,
) -> bool:
    """Fill one row of the table: try every slice that is worth it as the last one. False for lack of visits."""
    op_s, work_s, capacity, cost_s = rows.op_s, rows.work_s, rows.capacity, part.cost_s
    for c in range(len(capacity)):
        for k in range(cost_s.shape[1]):
            cost_s[c, k] = 0.0
    held, top, start, threshold_s = 0, 0, end, limit_s
    while start > 0:
        atom = start - 1
        # Cheapest tests first: most slices end here.
        if work_s[atom] < lowest_s:
            break
        least_s = np.inf
        for c in range(len(capacity)):
            cost_s[c, _RUN] += op_s[atom, c]
            least_s = min(least_s, cost_s[c, _RUN])
        if least_s >= threshold_s:
            break
        # Counted here, where the work begins, so that the same budget gives the same answer everywhere.
        visits[0] -= 1
        if visits[0] < 0:
            return False
        start = atom
        held += rows.own_bytes[atom]
        top = max(top, rows.top_bytes[atom])
        take(atom, end, rows, part)
        for c in range(len(capacity)):
            if held + top > capacity[c]:
                # Memory only ever grows with the slice.
                cost_s[c, _RUN] = np.inf  # and so is every slice that grows from it
        if not improve(end, start, cost_s, blocking, (limit_s, threshold_s), rows, states, table):
            break
        # The worst of the states known so far: a slice that betters none of them is of no use.
        threshold_s = 0.0
        for s in states:
            threshold_s = max(threshold_s, min(limit_s, table.best_s[end, s]))
    for j in range(rows.net_ptr[start], rows.net_ptr[end]):
        part.seen[rows.net_at[j]] = 0
        part.made[rows.net_at[j]] = False
    return True


@entry
def best_cuts(rows: Rows, table: Table, blocking: bool, limit_s: float, visits: IntArray) -> bool:
    """Fill a table, by fewer atoms first. False for lack of visits.

    From each end slices are grown atom by atom towards the front, as long as what they cost at least is below the best
    known.

    Args:
        blocking: transfers add to computing; else the largest of computing, receiving and sending counts.
        limit_s: only values below are of interest.
        visits: int64 [1], slices that may still be looked at, counted down.
    """
    n, n_classes = rows.op_s.shape
    n_nets = len(rows.producer)
    # All scratch is made here: the loops allocate nothing.
    part = Slice(np.zeros((n_classes, 5)), np.zeros(n_nets, np.int64), np.zeros(n_nets, np.bool_))
    states = np.empty(table.best_s.shape[1], np.int64)
    table.best_s[0, 0] = table.least_s[0] = 0.0
    for end in range(1, n + 1):
        # Atoms that no state can hold in time keep their infinite rows.
        count, lowest_s = viable(end, limit_s, rows, states)
        if count:
            if not last_slices(end, states[:count], lowest_s, blocking, limit_s, visits, rows, part, table):
                return False
            for k in range(count):  # no other state is finite
                table.least_s[end] = min(table.least_s[end], table.best_s[end, states[k]])
    return True
