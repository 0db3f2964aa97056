"""Compiled loop of the dynamic programmes over ideals; `baselines.pipelines.dp_contiguous` says what it computes.

An ideal is a downward-closed set of atoms, one bit each. Ideals are numbered so that every one comes after its
subsets; number 0 is empty, the last one holds all atoms. Row I of a lattice lists, for each atom v whose removal from
I leaves an ideal, that atom and the number of that ideal, by increasing v.
"""

# Letters
# N, M, C   numbers of atoms, nets and classes of devices; I, S, of ideals and states
# c   a class; m, a net; s, a state (how many devices of each class are in use); j, k, positions
# depth   atoms in the slice at hand; _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baselines.pipelines.lattice_kernel import Bits, Narrow, holds
from env.jit import entry, inner

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


Bytes = NDArray[np.int8]

NO_FIT, DONE, GAVE_UP = 0, 1, 2
# Seconds of a slice on a class of devices: computing, receiving and sending, and of the latter two what remains
# however the slice grows, since the other end lies beyond the ideal.
_RUN, _IN, _OUT, _IN_FIXED, _OUT_FIXED = 0, 1, 2, 3, 4
_WITHIN, _MADE_BEYOND, _READ_BEYOND = 0, 1, 2


class Rows(NamedTuple):
    """The atoms (N), nets (M) and classes of devices (C) of `baselines.pipelines.atoms`, and the lattice of ideals (I).

    Attributes:
        ptr, step_atom, step_ideal: int64 [I + 1], int32 [x], int32 [x].
        sets: uint64 [I, words].
        op_s: float64 [N, C], infinite where refused.
        net_ptr, net_at: int64 [N + 1] and [y], nets by atom.
        producer: int64 [M].
        reader_ptr, reader: int64 [M + 1] and [z], readers by net.
        enter_s, leave_s: float64 [M, C], cost of a net to who receives it and to who sends it.
        own_bytes, top_bytes: int64 [N], those of an atom that add up and those of which the largest counts.
        capacity: int64 [C].
        stride: int64 [C], states that differ by one device of a class are so far apart.
        used: int64 [S, C], devices of each class in each state.
        work_s: float64 [I], least work of each ideal.
        reach: float64 [S], most work that all devices of a state do in a second.
    """

    ptr: IntArray
    step_atom: Narrow
    step_ideal: Narrow
    sets: Bits
    op_s: FloatArray
    net_ptr: IntArray
    net_at: IntArray
    producer: IntArray
    reader_ptr: IntArray
    reader: IntArray
    enter_s: FloatArray
    leave_s: FloatArray
    own_bytes: IntArray
    top_bytes: IntArray
    capacity: IntArray
    stride: IntArray
    used: IntArray
    work_s: FloatArray
    reach: FloatArray


class Walk(NamedTuple):
    """Position of a walk from an ideal down to smaller ones, by depth, and the slice in between.

    Attributes:
        at, step, removed: int64 [N + 1], the ideal reached, its next step to try, and the atom removed last.
        cost_s: float64 [N + 1, C, 5].
        held, top: int64 [N + 1], bytes that add up, and the largest of the others.
        seen: int64 [M], ends of each net in the slice.
        made: bool [M], whether the producer is one of them.
        beyond: int8 [M], whether the net's producer, or else one of its readers, is outside the ideal.
    """

    at: IntArray
    step: IntArray
    removed: IntArray
    cost_s: FloatArray
    held: IntArray
    top: IntArray
    seen: IntArray
    made: BoolArray
    beyond: Bytes


class Table(NamedTuple):
    """The least largest load of the chains of slices up to each ideal, by state (I ideals, S states).

    Attributes:
        best_s: float64 [I, S], infinite to begin with.
        least_s: float64 [I], the least of each row, infinite to begin with.
        smaller: int32 [I, S], the ideal before the last slice.
        last: int8 [I, S], the class of that slice.
    """

    best_s: FloatArray
    least_s: FloatArray
    smaller: Narrow
    last: Bytes


@inner
def look_beyond(members: Bits, rows: Rows, inside: BoolArray, beyond: Bytes) -> None:
    """Fill ``inside`` [N], the atoms of an ideal, and ``beyond`` of `Walk`."""
    producer, ptr, reader = rows.producer, rows.reader_ptr, rows.reader
    for atom in range(len(inside)):
        inside[atom] = holds(members, atom)
    for m in range(len(producer)):
        # Only the end of a net that can never be in a slice matters to it.
        beyond[m] = _WITHIN
        if not inside[producer[m]]:
            beyond[m] = _MADE_BEYOND
            continue
        for j in range(ptr[m], ptr[m + 1]):
            if not inside[reader[j]]:
                beyond[m] = _READ_BEYOND
                break


@inner
def viable(ideal: int, limit_s: float, rows: Rows, states: IntArray) -> tuple[int, float]:
    """Fill ``states`` with those whose devices can hold this ideal, and the others the rest, below the limit.

    Returns how many there are, and the least work of an ideal that their last slice may leave.
    """
    work_s, reach, stride, used = rows.work_s, rows.reach, rows.stride, rows.used
    # A little slack, since work is summed up in another sequence than loads.
    total_s, all_reach, slack = work_s[-1], reach[-1], 1 + 1e-9
    count, lowest_s = 0, np.inf
    for s in range(1, len(reach)):
        # Too much work for these devices in the time, or for all the others what is left over.
        if work_s[ideal] > limit_s * reach[s] * slack:
            continue
        if total_s - work_s[ideal] > limit_s * (all_reach - reach[s]) * slack + 1e-9 * total_s:
            continue
        states[count] = s
        count += 1
        # The work below the last slice must be at least the total less all that the other devices do within the limit.
        for c in range(len(stride)):
            if used[s, c] > 0:
                lowest_s = min(lowest_s, total_s - limit_s * (all_reach - reach[s - stride[c]]) * slack)
    return count, lowest_s - 1e-9 * total_s


@inner
def extend(cost_s: FloatArray, depth: int, op_s: FloatArray, atom: int) -> float:
    """Set ``cost_s[depth + 1]`` to that of the slice before it with one more atom; returns its least computing."""
    least_s = np.inf
    # By depth, so that going back up needs no undoing of sums, and so no rounding.
    for c in range(cost_s.shape[1]):
        for k in range(cost_s.shape[2]):
            cost_s[depth + 1, c, k] = cost_s[depth, c, k]
        cost_s[depth + 1, c, _RUN] += op_s[atom, c]
        least_s = min(least_s, cost_s[depth + 1, c, _RUN])
    return least_s


@inner
def take(
    atom: int,
    nets_of: tuple[IntArray, IntArray],
    ends: tuple[IntArray, IntArray],
    wire: tuple[FloatArray, FloatArray],
    seen: IntArray,
    made: BoolArray,
    beyond: Bytes,
    cost_s: FloatArray,
    depth: int,
) -> None:
    """Add the nets of an atom to a slice: ``seen``, ``made`` and ``cost_s[depth]`` of `Walk`.

    ``ends`` are producer and readers' ptr, ``wire`` the costs of receiving and sending.
    """
    net_ptr, net_at = nets_of
    producer, reader_ptr = ends
    enter_s, leave_s = wire
    classes = range(cost_s.shape[1])  # loops: expressions over a few numbers would take memory for each
    # Each net by its ends that are in the slice already: made, or read so often.
    for j in range(net_ptr[atom], net_ptr[atom + 1]):
        m = net_at[j]
        readers = reader_ptr[m + 1] - reader_ptr[m]
        if producer[m] == atom:
            made[m] = True
            # Readers in the slice have counted it as received; from now on it is made here.
            if seen[m] > 0:
                for c in classes:
                    cost_s[depth, c, _IN] -= enter_s[m, c]
            # Some reader is outside, so that it must be sent; for ever, if one lies beyond the ideal.
            if seen[m] < readers:
                for c in classes:
                    cost_s[depth, c, _OUT] += leave_s[m, c]
                if beyond[m] == _READ_BEYOND:
                    for c in classes:
                        cost_s[depth, c, _OUT_FIXED] += leave_s[m, c]
        elif made[m]:
            # The last reader has come in: nothing is sent any more.
            if seen[m] == readers:
                for c in classes:
                    cost_s[depth, c, _OUT] -= leave_s[m, c]
        # The first reader receives it for all of them.
        elif seen[m] == 0:
            for c in classes:
                cost_s[depth, c, _IN] += enter_s[m, c]
            if beyond[m] == _MADE_BEYOND:
                for c in classes:
                    cost_s[depth, c, _IN_FIXED] += enter_s[m, c]
        seen[m] += 1


@inner
def give_back(
    atom: int, nets_of: tuple[IntArray, IntArray], producer: IntArray, seen: IntArray, made: BoolArray
) -> None:
    """Undo what `take` did to ``seen`` and ``made``."""
    net_ptr, net_at = nets_of
    for j in range(net_ptr[atom], net_ptr[atom + 1]):
        m = net_at[j]
        seen[m] -= 1
        if producer[m] == atom:
            made[m] = False


@inner
def improve(
    ideal: int,
    smaller: int,
    costs_s: tuple[FloatArray, int],
    blocking: bool,
    limits_s: tuple[float, float],
    machines: tuple[IntArray, IntArray],
    states: IntArray,
    table: Table,
) -> bool:
    """Try the slice between two ideals as the last one, on each class; whether a larger slice may be worth a try.

    ``costs_s`` are those of `Walk` and the depth. ``limits_s`` are what the chain must stay below to be of interest,
    and what the slice must.
    """
    cost_s, depth = costs_s
    limit_s, threshold_s = limits_s
    stride, used = machines
    larger_may = False
    for c in range(len(stride)):
        run_s = cost_s[depth, c, _RUN]
        if blocking:
            load_s = run_s + cost_s[depth, c, _IN] + cost_s[depth, c, _OUT]
            least_s = run_s + cost_s[depth, c, _IN_FIXED] + cost_s[depth, c, _OUT_FIXED]
        else:
            load_s = max(run_s, cost_s[depth, c, _IN], cost_s[depth, c, _OUT])
            least_s = max(run_s, cost_s[depth, c, _IN_FIXED], cost_s[depth, c, _OUT_FIXED])
        # A larger slice computes no less, and what is fixed stays.
        if least_s >= threshold_s:
            continue
        larger_may = True
        # Nor is there anything to gain where the ideal below is no better by itself.
        if load_s >= threshold_s or table.least_s[smaller] >= threshold_s:
            continue
        for s in states:
            if used[s, c] > 0:
                # The state before the slice has one device of its class less.
                value_s = max(load_s, table.best_s[smaller, s - stride[c]])
                if value_s < table.best_s[ideal, s] and value_s < limit_s:
                    table.best_s[ideal, s] = value_s
                    table.smaller[ideal, s], table.last[ideal, s] = smaller, c
    return larger_may


@inner
def last_slices(
    ideal: int,
    states: IntArray,
    lowest_s: float,
    blocking: bool,
    limit_s: float,
    visits: IntArray,
    rows: Rows,
    walk: Walk,
    table: Table,
) -> bool:
    """Fill the row of one ideal: try every slice that is worth it as the last one. False for lack of visits."""
    ptr, step_atom, step_ideal, work_s, capacity = rows.ptr, rows.step_atom, rows.step_ideal, rows.work_s, rows.capacity
    op_s, own_bytes, top_bytes = rows.op_s, rows.own_bytes, rows.top_bytes
    nets_of, ends, wire = (rows.net_ptr, rows.net_at), (rows.producer, rows.reader_ptr), (rows.enter_s, rows.leave_s)
    machines = rows.stride, rows.used
    at, step, removed, cost_s, held, top, seen, made, beyond = walk
    depth, threshold_s = 0, limit_s
    # A walk of its own stack: recursion would be slower, and deep.
    at[0], step[0], removed[0] = ideal, ptr[ideal], len(op_s)
    while depth >= 0:
        k = step[depth]
        # Atoms leave in falling order, and each row is sorted: past the one removed last there is nothing to try.
        if k == ptr[at[depth] + 1] or step_atom[k] >= removed[depth]:
            # All steps from here are done: up again.
            if depth > 0:
                give_back(removed[depth], nets_of, ends[0], seen, made)
            depth -= 1
            continue
        step[depth] = k + 1
        atom, smaller = step_atom[k], step_ideal[k]
        # Cheapest tests first: most steps end here.
        if work_s[smaller] < lowest_s or extend(cost_s, depth, op_s, atom) >= threshold_s:
            continue
        # Counted here, where the work begins, so that the same budget gives the same answer everywhere.
        visits[0] -= 1
        if visits[0] < 0:
            return False
        deeper = depth + 1
        top[deeper] = max(top[depth], top_bytes[atom])
        held[deeper] = held[depth] + own_bytes[atom]
        take(atom, nets_of, ends, wire, seen, made, beyond, cost_s, deeper)
        for c in range(len(capacity)):
            if held[deeper] + top[deeper] > capacity[c]:
                # Memory only ever grows with the slice.
                cost_s[deeper, c, _RUN] = np.inf  # and so is every slice that grows from it
        limits_s = limit_s, threshold_s
        if improve(ideal, smaller, (cost_s, deeper), blocking, limits_s, machines, states, table):
            depth = deeper
            at[depth], step[depth], removed[depth] = smaller, ptr[smaller], atom
            # The worst of the states known so far: a slice that betters none of them is of no use.
            threshold_s = 0.0
            for s in states:
                threshold_s = max(threshold_s, min(limit_s, table.best_s[ideal, s]))
        else:
            give_back(atom, nets_of, ends[0], seen, made)
    return True


@entry
def best_chains(rows: Rows, table: Table, blocking: bool, limit_s: float, visits: IntArray) -> int:
    """Fill a table by smaller ideals first.

    From each ideal, slices are grown atom by atom, in falling order of atoms so that none is grown twice, as long as
    what they cost at least is below the best known.

    Args:
        blocking: transfers add to computing; else the largest of computing, receiving and sending counts.
        limit_s: only values below are of interest.
        visits: int64 [1], slices that may still be looked at, counted down.

    Returns:
        `DONE`, `NO_FIT` if there is nothing below the limit, or `GAVE_UP` for lack of visits.
    """
    n, n_classes = rows.op_s.shape
    n_nets, (n_ideals, n_states) = len(rows.producer), table.best_s.shape
    walk = Walk(
        np.zeros(n + 1, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros((n + 1, n_classes, 5)),
        np.zeros(n + 1, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros(n_nets, np.int64),
        np.zeros(n_nets, np.bool_),
        np.zeros(n_nets, np.int8),
    )
    # All scratch is made here: the loops allocate nothing.
    states, inside = np.empty(n_states, np.int64), np.empty(n, np.bool_)
    table.best_s[0, 0] = table.least_s[0] = 0.0
    for ideal in range(1, n_ideals):
        # Ideals that no state can hold in time keep their infinite rows.
        count, lowest_s = viable(ideal, limit_s, rows, states)
        if count:
            look_beyond(rows.sets[ideal], rows, inside, walk.beyond)
            if not last_slices(ideal, states[:count], lowest_s, blocking, limit_s, visits, rows, walk, table):
                return GAVE_UP
            for k in range(count):  # no other state is finite
                table.least_s[ideal] = min(table.least_s[ideal], table.best_s[ideal, states[k]])
    return DONE if table.least_s[n_ideals - 1] < np.inf else NO_FIT
