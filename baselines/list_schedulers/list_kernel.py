"""Compiled loops of the list schedulers; `estimate.py` says what they compute (n ops, D devices)."""

from __future__ import annotations

import numpy as np

from baselines.placers.greedy_kernel import transfer
from env.jit import njit
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray

Wire = tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray]
Room = tuple[BoolArray, IntArray, IntArray, IntArray, IntArray, IntArray]
Placing = tuple[IntArray, IntArray, IntArray, IntArray, Room]
Queue = tuple[IntArray, IntArray, IntArray, IntArray, FloatArray]


@njit(cache=True, nogil=True)
def fits(unit: int, device: int, room: Room) -> bool:
    """Whether the unit may run on the device and has room beside what is there; `baselines.memory.Allowance`."""
    allowed, unit_bytes, working_bytes, capacity, used_bytes, largest_bytes = room
    needed = unit_bytes[unit] + max(largest_bytes[device], working_bytes[unit])
    return bool(allowed[unit, device] and used_bytes[device] + needed <= capacity[device])


@njit(cache=True, nogil=True)
def charge(unit: int, device: int, room: Room) -> None:
    """Place the unit on the device."""
    _, unit_bytes, working_bytes, _, used_bytes, largest_bytes = room
    used_bytes[device] += unit_bytes[unit]
    largest_bytes[device] = max(largest_bytes[device], working_bytes[unit])


@njit(cache=True, nogil=True)
def earliest_start(
    op: int,
    op_device: IntArray,
    finish_s: FloatArray,
    graph: tuple[IntArray, IntArray, IntArray],
    wire: Wire,
    result: FloatArray,
) -> None:
    """When the last input of an op arrives at each device, float64 [D]: the maximum over its predecessors."""
    input_ptr, inputs, producer = graph
    result[:] = 0.0
    for j in range(input_ptr[op], input_ptr[op + 1]):
        t = inputs[j]
        source, ready_s = op_device[producer[t]], finish_s[producer[t]]
        for d in range(len(result)):
            result[d] = max(result[d], ready_s + transfer(t, source, d, *wire))


@njit(cache=True, nogil=True)
def find_gap(
    gap_start: FloatArray, gap_end: FloatArray, count: int, ready_s: float, op_s: float, limit_s: float
) -> int:
    """The first idle interval that holds the op; -1 where it would start after ``limit_s``.

    Idle intervals are sorted and disjoint, the last one never ends.
    """
    low, high = 0, count - 1
    while low < high:  # the first interval that ends after the op may start
        middle = (low + high) // 2
        if gap_end[middle] > ready_s:
            high = middle
        else:
            low = middle + 1
    while gap_start[low] <= limit_s:
        if max(gap_start[low], ready_s) + op_s <= gap_end[low]:
            return low
        low += 1
    return -1


@njit(cache=True, nogil=True)
def occupy(gap_start: FloatArray, gap_end: FloatArray, count: int, gap: int, start_s: float, end_s: float) -> int:
    """Take [start_s, end_s) out of an idle interval; returns the new number of intervals."""
    before, after = gap_start[gap] < start_s, end_s < gap_end[gap]
    if before and after:
        for k in range(count, gap, -1):
            gap_start[k], gap_end[k] = gap_start[k - 1], gap_end[k - 1]
        gap_end[gap], gap_start[gap + 1] = start_s, end_s
        return count + 1
    if before:
        gap_end[gap] = start_s
        return count
    if after:
        gap_start[gap] = end_s
        return count
    for k in range(gap, count - 1):
        gap_start[k], gap_end[k] = gap_start[k + 1], gap_end[k + 1]
    return count - 1


@njit(cache=True, nogil=True)
def insert(
    order: IntArray,
    look_ahead_s: FloatArray,
    first_choice: IntArray,
    unit_of: IntArray,
    graph: tuple[IntArray, IntArray, IntArray],
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
    gap_start, gap_end = np.empty((n_devices, n + 2)), np.empty((n_devices, n + 2))
    gaps = np.ones(n_devices, dtype=np.int64)
    gap_start[:, 0], gap_end[:, 0] = 0.0, np.inf
    ready_s = np.empty(n_devices)
    fixed = np.full(len(unit_s), -1, dtype=np.int64)
    for op in order:
        unit = unit_of[op]
        only = fixed[unit]
        if only < 0 and first_choice[op] >= 0 and fits(unit, first_choice[op], room):
            only = first_choice[op]
        earliest_start(op, device, finish_s, graph, wire, ready_s)
        best, best_gap, best_start, best_key = -1, -1, 0.0, np.inf
        for d in range(n_devices):
            if (d != only) if only >= 0 else not fits(unit, d, room):
                continue
            later_s = look_ahead_s[op, d]
            if fixed[unit] < 0:
                later_s += unit_s[unit, d] - op_s[op, d]
            gap, start = -1, ready_s[d]
            if op_s[op, d] > 0:  # an op without time needs no room
                limit = best_key - later_s - op_s[op, d]
                gap = find_gap(gap_start[d], gap_end[d], gaps[d], ready_s[d], op_s[op, d], limit)
                if gap < 0:
                    continue
                start = max(gap_start[d, gap], ready_s[d])
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


@njit(cache=True, nogil=True)
def push(heap: IntArray, size: int, key_s: FloatArray, item: int) -> int:
    """Add to a binary heap, smallest ``(key_s[item], item)`` first; returns its new size."""
    at = size
    while at > 0:
        above = heap[(at - 1) // 2]
        if key_s[above] < key_s[item] or (key_s[above] == key_s[item] and above < item):
            break
        heap[at] = above
        at = (at - 1) // 2
    heap[at] = item
    return size + 1


@njit(cache=True, nogil=True)
def pop(heap: IntArray, size: int, key_s: FloatArray) -> int:
    """Take the first item off the heap; returns its new size."""
    item, at, child = heap[size - 1], 0, 1
    while child < size - 1:
        a, b = heap[child], heap[min(child + 1, size - 2)]
        if key_s[b] < key_s[a] or (key_s[b] == key_s[a] and b < a):
            a, child = b, child + 1
        if key_s[item] < key_s[a] or (key_s[item] == key_s[a] and item < a):
            break
        heap[at] = a
        at, child = child, 2 * child + 1
    heap[at] = item
    return size - 1


@njit(cache=True, nogil=True)
def release(op: int, graph: tuple[IntArray, IntArray, IntArray], missing: IntArray, released: IntArray) -> int:
    """Count down the ``missing`` inputs of an op's consumers; write those without to ``released``, return how many."""
    output_ptr, consumer_ptr, consumers = graph
    count = 0
    for t in range(output_ptr[op], output_ptr[op + 1]):
        for c in consumers[consumer_ptr[t] : consumer_ptr[t + 1]]:
            missing[c] -= 1
            if missing[c] == 0:
                released[count] = c
                count += 1
    return count


@njit(cache=True, nogil=True)
def by_priority(
    op_of: IntArray, rank_of: IntArray, n_inputs: IntArray, graph: tuple[IntArray, IntArray, IntArray]
) -> IntArray:
    """int64 [n]: again and again the ready op of the lowest rank.

    ``op_of`` [n] lists ops by rank, ``rank_of`` [n] is its inverse, ``n_inputs`` [n] counts the inputs of each op.
    """
    n = len(op_of)
    order, heap, released, missing = np.empty_like(op_of), np.empty_like(op_of), np.empty_like(op_of), n_inputs.copy()
    size, zero = 0, np.zeros(n)
    for op in np.flatnonzero(missing == 0):
        size = push(heap, size, zero, rank_of[op])
    for k in range(n):
        order[k] = op_of[heap[0]]
        size = pop(heap, size, zero)
        for c in released[: release(order[k], graph, missing, released)]:
            size = push(heap, size, zero, rank_of[c])
    return order


@njit(cache=True, nogil=True)
def usable(rank: int, device: int, placing: Placing) -> bool:
    """Whether an op can still be placed on the device: not placed yet, its group free or there, and room for it."""
    op_of, unit_of, fixed, op_device, room = placing
    op = op_of[rank]
    unit = unit_of[op]
    if op_device[op] >= 0:
        return False
    return bool(fixed[unit] == device or (fixed[unit] < 0 and fits(unit, device, room)))


@njit(cache=True, nogil=True)
def first(device: int, now_s: float, key_s: FloatArray, queue: Queue, placing: Placing) -> int:
    """The rank of the op that can start first on the device, of those that can now the lowest; -1 if there is none.

    Ops wait in a heap by ``key_s`` [n], when they could start, until that is past, and then in a heap by rank. What is
    not usable on top of a heap never will be, and goes: each op passes each heap of each device once.
    """
    waiting, n_waiting, startable, n_startable, zero = queue
    early, late, d = startable[device], waiting[device], device
    while n_waiting[d] > 0 and key_s[late[0]] <= now_s:
        rank = late[0]
        n_waiting[d] = pop(late, n_waiting[d], key_s)
        n_startable[d] = push(early, n_startable[d], zero, rank)
    while n_startable[d] > 0 and not usable(early[0], d, placing):
        n_startable[d] = pop(early, n_startable[d], zero)
    if n_startable[d] > 0:
        return int(early[0])
    while n_waiting[d] > 0 and not usable(late[0], d, placing):
        n_waiting[d] = pop(late, n_waiting[d], key_s)
    return int(late[0]) if n_waiting[d] > 0 else -1


@njit(cache=True, nogil=True)
def make_queue(n_devices: int, zero: FloatArray) -> Queue:
    """An empty queue; ``zero`` is float64 [n]."""
    shape = (n_devices, len(zero))
    counts = np.zeros(n_devices, dtype=np.int64), np.zeros(n_devices, dtype=np.int64)
    return np.empty(shape, dtype=np.int64), counts[0], np.empty(shape, dtype=np.int64), counts[1], zero


@njit(cache=True, nogil=True)
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
        if allowed[d]:
            urgent_s[rank] = max(urgent_s[rank], ready_s[d, rank])
    for d in range(len(ready_s)):
        if (d == own_device) if own_device >= 0 else allowed[d]:
            queue[1][d] = push(queue[0][d], queue[1][d], ready_s[d], rank)
            if len(urgent[1]) > 0:
                urgent[1][d] = push(urgent[0][d], urgent[1][d], urgent_s, rank)


@njit(cache=True, nogil=True)
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
    """What a device starts, and when, that could start an op now but awaits the favourite child of its last op.

    It waits where no other device could start that child sooner, unless the op is urgent: its inputs are everywhere.
    ``now_s`` [D] is when each device is free; ``ready_s`` [D, n] and ``urgent_s`` [n] are by rank.
    """
    child_s = max(now_s[device], ready_s[device, awaited])
    if awaited == rank or begin_s > child_s or urgent_s[rank] <= begin_s or not usable(awaited, device, placing):
        return rank, begin_s
    for d in range(len(now_s)):
        if max(now_s[d], ready_s[d, awaited]) < child_s and usable(awaited, d, placing):
            return rank, begin_s
    other = first(device, now_s[device], urgent_s, urgent, placing)
    if other >= 0:
        other_s = max(now_s[device], urgent_s[other])
        if other_s < child_s or (other_s == child_s and other < awaited):
            return other, other_s
    return awaited, child_s


@njit(cache=True, nogil=True)
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

    Of equals the lowest rank, and of its devices one that awaits nothing else, or else the fastest. ``child_of`` [D] is
    the rank of the op each device awaits, once the ops it needs have ended (``done_s`` [n], by rank), or -1.
    """
    best, best_device, best_s, best_waits = -1, -1, np.inf, False
    for d in range(len(now_s)):
        rank = first(d, now_s[d], ready_s[d], queue, placing)
        if rank < 0:
            continue
        begin_s, child, waits = max(now_s[d], ready_s[d, rank]), child_of[d], False
        if child >= 0 and done_s[child] <= begin_s:
            other, other_s = held_back(d, rank, begin_s, child, now_s, ready_s, urgent_s, urgent, placing)
            waits = other != child and (other != rank or other_s != begin_s)
            rank, begin_s = other, other_s
        better = begin_s < best_s or (begin_s == best_s and rank < best)
        if begin_s == best_s and rank == best:
            op = placing[0][rank]
            better = best_waits if waits != best_waits else op_s[op, d] < op_s[op, best_device]
        if better:
            best, best_device, best_s, best_waits = rank, d, begin_s, waits
    return best, best_device, best_s


@njit(cache=True, nogil=True)
def start_earliest(
    op_of: IntArray,
    rank_of: IntArray,
    favourite: IntArray,
    unit_of: IntArray,
    graph: tuple[IntArray, IntArray, IntArray],
    readers: tuple[IntArray, IntArray, IntArray],
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
    input_ptr, inputs, producer = graph
    fixed, missing, zero = np.full(len(room[1]), -1, dtype=np.int64), np.empty(n, dtype=np.int64), np.zeros(n)
    released, sources = np.empty(n, dtype=np.int64), 0
    for op in range(n):  # loops, not array expressions, which take seconds to compile
        device[op] = -1
        missing[op] = input_ptr[op + 1] - input_ptr[op]
        if missing[op] == 0:
            released[sources] = op
            sources += 1
    placing = (op_of, unit_of, fixed, device, room)
    queue, urgent = make_queue(n_devices, zero), make_queue(n_devices if favourite.max() >= 0 else 0, zero)
    ready_s, arrives_s = np.empty((n_devices, n)), np.empty(n_devices)
    urgent_s, done_s = np.zeros(n), np.full(n, np.inf)
    free_s, now_s, child_of = np.zeros(n_devices), np.zeros(n_devices), np.full(n_devices, -1, dtype=np.int64)
    count = sources
    for _ in range(n):
        for op in released[:count]:
            rank, unit = rank_of[op], unit_of[op]
            earliest_start(op, device, finish_s, graph, wire, arrives_s)
            for d in range(n_devices):
                ready_s[d, rank] = arrives_s[d]
            done_s[rank] = 0.0
            for t in inputs[input_ptr[op] : input_ptr[op + 1]]:
                done_s[rank] = max(done_s[rank], finish_s[producer[t]])
            enter(rank, fixed[unit], room[0][unit], ready_s, urgent_s, queue, urgent)
        rank, d, begin_s = choose(now_s, child_of, done_s, ready_s, urgent_s, op_s, queue, urgent, placing)
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
        for other in range(n_devices):
            now_s[other] = max(free_s[other], begin_s)
        count = release(op, readers, missing, released)
    return -1
