"""Compiled loops of the list schedulers; `estimate.py` and `peft.py` say what they compute."""

# Letters
# n, m, D, U   numbers of ops, tensors, devices and units (ops that share a device)
# d   a device; t, a tensor; c, a consumer; e, an edge (a tensor and a consumer of it); j, k, positions
# rank   an op's place in a scheduler's list, 0 first
# _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baselines.kernel_records import Inputs, Readers, Room, Wire
from baselines.placers.greedy_kernel import charge, fits, transfer
from env.jit import allocating, entry, inner
from env.simulation.pieces import find_gap, occupy, pop, push

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


class Placing(NamedTuple):
    """State of placing ops by rank."""

    op_of: IntArray  # [n], ops by rank
    unit_of: IntArray  # [n]
    fixed: IntArray  # [U], device of each unit, -1 while it is free
    op_device: IntArray  # [n], -1 where not placed yet
    room: Room


class Queue(NamedTuple):
    """Ops by rank that wait for every device they may run on, in two heaps for each."""

    waiting: IntArray  # [D, n], by when they could start
    n_waiting: IntArray  # [D]
    startable: IntArray  # [D, n], by rank: those that could start now
    n_startable: IntArray  # [D]
    zero: FloatArray  # [n], the key of a heap by rank


# -- Insertion: HEFT, CPOP, PEFT ------------------------------------------------------------------------------


@inner
def earliest_start(
    op: int, op_device: IntArray, finish_s: FloatArray, inputs: Inputs, wire: Wire, result: FloatArray
) -> None:
    """Arrival of the last input of an op at each device, float64 [D]: the maximum over its predecessors."""
    for d in range(len(result)):
        result[d] = 0.0
    for j in range(inputs.ptr[op], inputs.ptr[op + 1]):
        t = inputs.tensor[j]
        source, ready_s = op_device[inputs.producer[t]], finish_s[inputs.producer[t]]
        for d in range(len(result)):
            result[d] = max(result[d], ready_s + transfer(t, source, d, wire))


@entry
def insert(
    order: IntArray,
    look_ahead_s: FloatArray,
    first_choice: IntArray,
    unit_of: IntArray,
    inputs: Inputs,
    wire: Wire,
    op_s: FloatArray,
    unit_s: FloatArray,
    room: Room,
    device: IntArray,
    start_s: FloatArray,
    finish_s: FloatArray,
) -> int:
    """Fill ``device``, ``start_s`` and ``finish_s`` [n]; returns the first unit without a feasible device, or -1."""
    n, n_devices = op_s.shape
    # An op splits one idle interval into two at most, so n + 1 are enough for each device.
    gap_start, gap_end = np.empty((n_devices, n + 2)), np.empty((n_devices, n + 2))
    gaps = np.ones(n_devices, dtype=np.int64)
    for d in range(n_devices):
        gap_start[d, 0], gap_end[d, 0] = 0.0, np.inf
    ready_s = np.empty(n_devices)
    fixed = np.full(len(unit_s), -1, np.int64)
    for op in order:
        unit = unit_of[op]
        # The unit's device, once its first op has one; or the scheduler's choice, while that has room.
        only = fixed[unit]
        if only < 0 and first_choice[op] >= 0 and fits(unit, first_choice[op], room):
            only = first_choice[op]
        earliest_start(op, device, finish_s, inputs, wire, ready_s)
        best, best_gap, best_start, best_key = -1, -1, 0.0, np.inf
        for d in range(n_devices):
            if (d != only) if only >= 0 else not fits(unit, d, room):
                continue
            # Seconds that still follow on this device: the look ahead, and the unit's other ops, which must come here
            # too.
            later_s = look_ahead_s[op, d]
            if fixed[unit] < 0:
                later_s += unit_s[unit, d] - op_s[op, d]
            # Inputs arrive whatever the device does: links are never busy in this estimate.
            gap, start = -1, ready_s[d]
            if op_s[op, d] > 0:  # an op without time needs no room
                # Beyond this start the device cannot be better than the best so far, however long its gaps are.
                limit = best_key - later_s - op_s[op, d]
                gap = find_gap(gap_start[d], gap_end[d], gaps[d], ready_s[d], op_s[op, d], limit)
                if gap < 0:
                    continue
                start = max(gap_start[d, gap], ready_s[d])
            # Less, not less or equal: of equals the first device.
            if start + op_s[op, d] + later_s < best_key:
                best, best_gap, best_start, best_key = d, gap, start, start + op_s[op, d] + later_s
        if best < 0:
            return int(unit)
        if fixed[unit] < 0:
            fixed[unit] = best
            charge(unit, best, room)
        device[op], start_s[op], finish_s[op] = best, best_start, best_start + op_s[op, best]
        if best_gap >= 0:
            gaps[best] = occupy(gap_start[best], gap_end[best], gaps[best], best_gap, best_start, finish_s[op])
    return -1


# -- Lists: who is ready -------------------------------------------------------------------------------------


@inner
def release(op: int, readers: Readers, missing: IntArray, released: IntArray) -> int:
    """Count down the ``missing`` inputs of an op's consumers; write those without to ``released``, return how many."""
    count = 0
    for t in range(readers.output_ptr[op], readers.output_ptr[op + 1]):
        for e in range(readers.ptr[t], readers.ptr[t + 1]):
            c = readers.op[e]
            missing[c] -= 1
            if missing[c] == 0:
                released[count] = c
                count += 1
    return count


@entry
def by_priority(op_of: IntArray, rank_of: IntArray, n_inputs: IntArray, readers: Readers) -> IntArray:
    """int64 [n]: again and again the ready op of the lowest rank.

    ``op_of`` [n] lists ops by rank, ``rank_of`` [n] is its inverse, ``n_inputs`` [n] counts the inputs of each op.
    """
    n = len(op_of)
    order, heap, released = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    missing, zero, size = np.empty(n, np.int64), np.zeros(n), 0
    for op in range(n):  # loops, not array expressions, which take seconds to compile
        missing[op] = n_inputs[op]
        if missing[op] == 0:
            push(heap, 0, size, zero, 1.0, rank_of[op])
            size += 1
    for k in range(n):
        order[k] = op_of[pop(heap, 0, size, zero, 1.0)]
        size -= 1
        for j in range(release(order[k], readers, missing, released)):
            push(heap, 0, size, zero, 1.0, rank_of[released[j]])
            size += 1
    return order


@entry
def optimistic_cost(
    topological: IntArray,
    readers: Readers,
    unit_of: IntArray,
    allowed: BoolArray,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    """Fill PEFT's optimistic cost table, float64 [n, D]; 0 where an op may not run."""
    n, n_devices = op_s.shape
    # Once per op, not once per pair of devices: O(e D) in place of O(e D D).
    least_s = np.empty(n)  # from the start of each op to the end of the graph on the best of its devices
    for k in range(n - 1, -1, -1):
        op = topological[k]
        for d in range(n_devices):
            result[op, d] = 0.0
        for t in range(readers.output_ptr[op], readers.output_ptr[op + 1]):
            for e in range(readers.ptr[t], readers.ptr[t + 1]):
                c = readers.op[e]
                together = unit_of[c] == unit_of[op]
                for d in range(n_devices):
                    if not allowed[op, d]:
                        continue
                    # On this device nothing is sent; elsewhere, the best device of the consumer after a mean transfer.
                    here_s = result[c, d] + op_s[c, d] if allowed[c, d] else np.inf
                    cost_s = here_s if together else min(here_s, least_s[c] + transfer_s[t])
                    result[op, d] = max(result[op, d], cost_s)
        least_s[op] = np.inf
        for d in range(n_devices):
            if allowed[op, d]:
                least_s[op] = min(least_s[op], result[op, d] + op_s[op, d])


# -- Earliest start: m-ETF, m-SCT -----------------------------------------------------------------------------


@inner
def usable(rank: int, device: int, placing: Placing) -> bool:
    """True if an op can still be placed on the device: not placed yet, its group free or there, and room for it."""
    op = placing.op_of[rank]
    unit = placing.unit_of[op]
    if placing.op_device[op] >= 0:
        return False
    fixed = placing.fixed[unit]
    return bool(fixed == device or (fixed < 0 and fits(unit, device, placing.room)))


@inner
def first(device: int, now_s: float, key_s: FloatArray, queue: Queue, placing: Placing) -> int:
    """The rank of the op that can start first on the device, of those that can now the lowest; -1 if there is none.

    Ops wait in a heap by ``key_s`` [n], when they could start, until that is past, and then in a heap by rank. An op on
    top of a heap that is not usable never will be, and goes: each op passes each heap of each device once.
    """
    d, zero = device, queue.zero
    early, late = queue.startable[d], queue.waiting[d]
    # `now_s` never goes back, so what could start once always can, and moves one way only.
    while queue.n_waiting[d] > 0 and key_s[late[0]] <= now_s:
        rank = pop(late, 0, queue.n_waiting[d], key_s, -1.0)
        queue.n_waiting[d] -= 1
        push(early, 0, queue.n_startable[d], zero, 1.0, rank)
        queue.n_startable[d] += 1
    # Only tops are looked at: what is not usable below may wait until it gets there.
    while queue.n_startable[d] > 0 and not usable(early[0], d, placing):
        pop(early, 0, queue.n_startable[d], zero, 1.0)
        queue.n_startable[d] -= 1
    if queue.n_startable[d] > 0:
        return int(early[0])
    while queue.n_waiting[d] > 0 and not usable(late[0], d, placing):
        pop(late, 0, queue.n_waiting[d], key_s, -1.0)
        queue.n_waiting[d] -= 1
    return int(late[0]) if queue.n_waiting[d] > 0 else -1


@allocating
def make_queue(n_devices: int, zero: FloatArray) -> Queue:
    """An empty queue; ``zero`` is float64 [n]."""
    n = len(zero)
    waiting, startable = np.empty((n_devices, n), np.int64), np.empty((n_devices, n), np.int64)
    return Queue(waiting, np.zeros(n_devices, np.int64), startable, np.zeros(n_devices, np.int64), zero)


@inner
def add(rank: int, d: int, key_s: FloatArray, queue: Queue) -> None:
    """Let an op wait for a device until ``key_s`` [n]."""
    push(queue.waiting[d], 0, queue.n_waiting[d], key_s, -1.0, rank)
    queue.n_waiting[d] += 1


@inner
def enter(
    rank: int,
    own_device: int,
    allowed: BoolArray,
    ready_s: FloatArray,
    urgent_s: FloatArray,
    queue: Queue,
    urgent: Queue,
) -> None:
    """Let an op wait on every device it may run on (bool [D]) or on that of its group, until its inputs are there.

    In ``urgent``, where it has devices, it waits until its inputs are everywhere it may run: ``urgent_s``.
    """
    for d in range(len(ready_s)):
        # Everywhere it may run, other than for the queues: an op of a placed unit is no less urgent for that.
        if allowed[d]:
            urgent_s[rank] = max(urgent_s[rank], ready_s[d, rank])
    for d in range(len(ready_s)):
        if (d == own_device) if own_device >= 0 else allowed[d]:
            add(rank, d, ready_s[d], queue)
            if len(urgent.n_waiting) > 0:
                add(rank, d, urgent_s, urgent)


@inner
def held_back(
    device: int,
    rank: int,
    begin_s: float,
    awaited: int,
    now_s: FloatArray,
    ready_s: FloatArray,
    urgent_s: FloatArray,
    urgent: Queue,
    placing: Placing,
) -> tuple[int, float]:
    """Op that a device starts, and when, if it could start one now but awaits the favourite child of its last op.

    It waits where no other device could start that child sooner, unless the op is urgent: its inputs are everywhere.
    ``now_s`` [D] is when each device is free; ``ready_s`` [D, n] and ``urgent_s`` [n] are by rank.
    """
    # Waiting makes sense only if the child would start later than what can start now, and that is not urgent.
    child_s = max(now_s[device], ready_s[device, awaited])
    if awaited == rank or begin_s > child_s or urgent_s[rank] <= begin_s or not usable(awaited, device, placing):
        return rank, begin_s
    # If some other device starts the child sooner, waiting here would be for nothing.
    for d in range(len(now_s)):
        if max(now_s[d], ready_s[d, awaited]) < child_s and usable(awaited, d, placing):
            return rank, begin_s
    # While it waits, an op that becomes urgent first takes the child's place.
    other = first(device, now_s[device], urgent_s, urgent, placing)
    if other >= 0:
        other_s = max(now_s[device], urgent_s[other])
        if other_s < child_s or (other_s == child_s and other < awaited):
            return other, other_s
    return awaited, child_s


@inner
def choose(
    now_s: FloatArray,
    child_of: IntArray,
    done_s: FloatArray,
    ready_s: FloatArray,
    urgent_s: FloatArray,
    op_s: FloatArray,
    queue: Queue,
    urgent: Queue,
    placing: Placing,
) -> tuple[int, int, float]:
    """The rank, device and start of the op that can start first; -1 where there is none.

    The lowest rank wins among equals, and among its devices one that awaits nothing else, or else the fastest.
    ``child_of`` [D] is the rank of the op each device awaits, once the ops it needs have ended (``done_s`` [n], by
    rank), or -1.
    """
    best, best_device, best_s, best_waits = -1, -1, np.inf, False
    for d in range(len(now_s)):
        rank = first(d, now_s[d], ready_s[d], queue, placing)
        if rank < 0:
            continue
        # A child is awaited only from when all the ops it needs have ended.
        begin_s, child, waits = max(now_s[d], ready_s[d, rank]), child_of[d], False
        if child >= 0 and done_s[child] <= begin_s:
            other, other_s = held_back(d, rank, begin_s, child, now_s, ready_s, urgent_s, urgent, placing)
            waits = other != child and (other != rank or other_s != begin_s)
            rank, begin_s = other, other_s
        better = begin_s < best_s or (begin_s == best_s and rank < best)
        # The same op at the same time on two devices: where nothing else is awaited, then where it runs faster.
        if begin_s == best_s and rank == best:
            op = placing.op_of[rank]
            better = best_waits if waits != best_waits else op_s[op, d] < op_s[op, best_device]
        if better:
            best, best_device, best_s, best_waits = rank, d, begin_s, waits
    return best, best_device, best_s


@entry
def start_earliest(
    op_of: IntArray,
    rank_of: IntArray,
    favourite: IntArray,
    unit_of: IntArray,
    inputs: Inputs,
    readers: Readers,
    wire: Wire,
    op_s: FloatArray,
    room: Room,
    device: IntArray,
    start_s: FloatArray,
    finish_s: FloatArray,
) -> int:
    """Fill ``device``, ``start_s`` and ``finish_s`` [n]; returns the first unit without a feasible device, or -1.

    ``favourite`` [n] is the op that a device awaits after each op, or -1.
    """
    n, n_devices = op_s.shape
    fixed, missing, zero = np.full(len(room.unit_bytes), -1, np.int64), np.empty(n, np.int64), np.zeros(n)
    released, sources, waits = np.empty(n, np.int64), 0, False
    for op in range(n):
        device[op] = -1
        waits = waits or favourite[op] >= 0
        missing[op] = inputs.ptr[op + 1] - inputs.ptr[op]
        if missing[op] == 0:
            released[sources] = op
            sources += 1
    placing = Placing(op_of, unit_of, fixed, device, room)
    queue, urgent = make_queue(n_devices, zero), make_queue(n_devices if waits else 0, zero)
    ready_s, arrives_s = np.empty((n_devices, n)), np.empty(n_devices)
    urgent_s, done_s = np.zeros(n), np.full(n, np.inf)
    free_s, now_s, child_of = np.zeros(n_devices), np.zeros(n_devices), np.full(n_devices, -1, dtype=np.int64)
    count = sources
    for _ in range(n):
        # Ops that the last one released wait for devices first: one of them may start next.
        for k in range(count):
            op = released[k]
            rank, unit = rank_of[op], unit_of[op]
            earliest_start(op, device, finish_s, inputs, wire, arrives_s)
            for d in range(n_devices):
                ready_s[d, rank] = arrives_s[d]
            done_s[rank] = 0.0
            for j in range(inputs.ptr[op], inputs.ptr[op + 1]):
                done_s[rank] = max(done_s[rank], finish_s[inputs.producer[inputs.tensor[j]]])
            enter(rank, fixed[unit], room.allowed[unit], ready_s, urgent_s, queue, urgent)
        rank, d, begin_s = choose(now_s, child_of, done_s, ready_s, urgent_s, op_s, queue, urgent, placing)
        # Some op is ready, and no device has room for it: name the first.
        if rank < 0:
            stuck = 0
            while missing[stuck] > 0 or device[stuck] >= 0:
                stuck += 1
            return int(unit_of[stuck])
        op = op_of[rank]
        if fixed[unit_of[op]] < 0:
            fixed[unit_of[op]] = d
            charge(unit_of[op], d, room)
        device[op], start_s[op], finish_s[op] = d, begin_s, begin_s + op_s[op, d]
        free_s[d], child_of[d] = finish_s[op], rank_of[favourite[op]] if favourite[op] >= 0 else -1
        # The clock is the last start: nothing that starts later can start before it on any device.
        for other in range(n_devices):
            now_s[other] = max(free_s[other], begin_s)
        count = release(op, readers, missing, released)
    return -1
