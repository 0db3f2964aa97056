"""Compiled loop of `env.bounds.heads`, which says what it computes."""

# Letters
# n, e, U   numbers of ops, of pairs of ops, and of units
# v   the op whose head is sought; u, an op tried on the same device; w, one that u waits for; j, a position
# _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from env.jit import entry, inner

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


class Waiting(NamedTuple):
    """Ops that may be tried next: a heap, the latest to arrive on top.

    Its entries move as a whole, other than in `env.simulation.pieces`: an op may wait several times, and among equals
    the order depends on how they lie. The first of equals to be tried can decide the bound, so a heap with another
    order among them would give other bounds, as valid as these.
    """

    arrives_s: FloatArray  # [room], when the op's outputs arrive from another device
    op: IntArray  # [room]
    behind_s: FloatArray  # [room], seconds of ops between it and the op whose head is sought


@inner
def push(heap: Waiting, size: int, arrives_s: float, op: int, behind_s: float) -> None:
    """Put an entry into a heap of this size."""
    i = size
    while i > 0:
        above = (i - 1) // 2
        if heap.arrives_s[above] >= arrives_s:
            break
        move(heap, above, i)
        i = above
    heap.arrives_s[i], heap.op[i], heap.behind_s[i] = arrives_s, op, behind_s


@inner
def pop(heap: Waiting, size: int) -> None:
    """Take the top off a heap of this size."""
    last = size - 1
    arrives_s, op, behind_s = heap.arrives_s[last], heap.op[last], heap.behind_s[last]
    i = 0
    while True:
        below = 2 * i + 1
        if below >= last:
            break
        if below + 1 < last and heap.arrives_s[below + 1] > heap.arrives_s[below]:
            below += 1
        if heap.arrives_s[below] <= arrives_s:
            break
        move(heap, below, i)
        i = below
    heap.arrives_s[i], heap.op[i], heap.behind_s[i] = arrives_s, op, behind_s


@inner
def move(heap: Waiting, source: int, target: int) -> None:
    """Copy an entry to another place in the heap."""
    heap.arrives_s[target], heap.op[target] = heap.arrives_s[source], heap.op[source]
    heap.behind_s[target] = heap.behind_s[source]


@inner
def insert(release: FloatArray, seconds: FloatArray, until: FloatArray, count: int, r: float, s: float) -> None:
    """Add a job to a list sorted by release; ``until``: when one machine has done the jobs so far, in this order."""
    i = count
    # Insertion: the list is short, and stays sorted.
    while i > 0 and release[i - 1] > r:
        release[i], seconds[i] = release[i - 1], seconds[i - 1]
        i -= 1
    release[i], seconds[i] = r, s
    # Only jobs behind the new one end later for it.
    now = until[i - 1] if i > 0 else 0.0
    for j in range(i, count + 1):
        now = max(now, release[j]) + seconds[j]
        until[j] = now


@entry
def earliest(
    order: IntArray,
    ptr: IntArray,
    before: IntArray,
    remote_s: FloatArray,
    apart: BoolArray,
    op_s: FloatArray,
    sizes: tuple[IntArray, FloatArray, FloatArray, FloatArray],
    most: int,
    head_s: FloatArray,
) -> None:
    """Fill ``head_s``, float64 [n]: no op can start sooner.

    Args:
        order: int64 [n], every op after those it waits for.
        ptr, before, remote_s: op i waits for ``before[ptr[i]:ptr[i + 1]]``, longer by ``remote_s`` if that op is on
            another device; infinite if it cannot be.
        apart: bool, by the same numbers: it must be on another device.
        op_s: float64 [n], the least time of each op.
        sizes: unit of each op, int64 [n]; bytes that each unit keeps, float64 [U]; bytes that an op needs besides while
            it runs, and the memory of the largest device that suits it, float64 [n].
        most: how many ops are tried together on one device.
    """
    n = len(order)
    widest = 0
    for i in range(n):
        widest = max(widest, ptr[i + 1] - ptr[i])
    # More than this is given up, with a bound that is weaker but holds.
    room = widest + 16 * most
    heap = Waiting(np.empty(room), np.empty(room, np.int64), np.empty(room))
    release, seconds, until = np.empty(most), np.empty(most), np.empty(most)
    # Marked with the number of v, so that they never need to be cleared.
    taken, held = np.full(n, -1), np.full(n, -1)
    unit, kept, working, memory = sizes
    for v in order:
        size, count = 0, 0
        held[unit[v]] = v
        kept_bytes, working_bytes = kept[unit[v]], working[v]
        now = 0.0  # no sooner, with the ops so far on the device of v
        for j in range(ptr[v], ptr[v + 1]):
            u = before[j]
            # If u runs elsewhere. Whether it does is open, unless it must.
            arrives = head_s[u] + op_s[u] + remote_s[j]
            if apart[j]:
                now = max(now, arrives)
            else:
                push(heap, size, arrives, u, 0.0)
                size += 1
        best = np.inf
        while size > 0:
            arrives = heap.arrives_s[0]
            # Either the latest of those left runs elsewhere, and v waits for its outputs, or it runs here: see below.
            best = min(best, max(arrives, now))
            # The ops here take longer than any of those left would take to arrive.
            if now >= arrives:
                break
            # Otherwise u runs on the device of v, and with it what it waits for comes into question.
            u, after = heap.op[0], heap.behind_s[0] + op_s[heap.op[0]]
            pop(heap, size)
            size -= 1
            if taken[u] == v:
                continue
            if count == most or size + ptr[u + 1] - ptr[u] > room:
                best = min(best, now)
                size = -1
                break
            taken[u] = v
            if held[unit[u]] != v:
                held[unit[u]] = v
                kept_bytes += kept[unit[u]]
            working_bytes = max(working_bytes, working[u])
            if kept_bytes + working_bytes > memory[v] and best < np.inf:
                size = -1  # no room: some device other than that of v runs this op, or one before it
                break
            insert(release, seconds, until, count, head_s[u], op_s[u])
            count += 1
            now = max(now, until[count - 1])
            for j in range(ptr[u], ptr[u + 1]):
                w = before[j]
                arrives = head_s[w] + op_s[w] + remote_s[j] + after
                if apart[j]:
                    now = max(now, arrives)
                else:
                    push(heap, size, arrives, w, after)
                    size += 1
        # Everything was tried here: v starts when this device has done it.
        if size == 0:
            best = min(best, now)
        head_s[v] = best
