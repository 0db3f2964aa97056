"""Pieces that several kernels are made of: a heap, memory over time, idle intervals, transfers, random numbers.

Each is written once, here, and compiled into whatever calls it; `env.jit` sees to it that a change here compiles the
callers again. Some callers hand over arrays, others bare pointers (`pointers`); the code is the same.


Letters: ``s``, a record of scratch with the fields that a piece names; ``g``, a graph like
`env.simulation.step_state.Arrays`; ``e``, an edge (a pair of tensor and consumer); ``k``, a position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import types
from numba.extending import intrinsic

from env.jit import inlined, inner

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from graphs.opgraph import FloatArray

RecordT = TypeVar("RecordT", bound=NamedTuple)
MOST_PER_SECOND = 1e300  # buckets; an infinity times 0 s would be no number, and so no bucket


def _pointers(typing_context, arrays):  # type: ignore[no-untyped-def]
    """The same named tuple holding bare pointers, for loops that touch many arrays.

    numba counts references to every array it touches, which can cost several times the work itself; it does not count
    pointers. Arrays of several dimensions become flat. The caller keeps the arrays alive.
    """
    fields = [types.CPointer(array.dtype) for array in arrays.types]  # type: ignore[no-untyped-call]
    result = types.NamedTuple(fields, arrays.instance_class)  # type: ignore[no-untyped-call]

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        values = []
        for k, array in enumerate(arrays.types):
            value = builder.extract_value(args[0], k)
            values.append(context.make_array(array)(context, builder, value).data)
        return context.make_tuple(builder, result, values)

    return result(arrays), codegen


pointers = cast("Callable[[RecordT], RecordT]", intrinsic(_pointers))


# -- Heap -----------------------------------------------------------------------------------------------------
# A binary heap of numbers of items. The order is total (the key, then the lower item), so that what comes off does not
# depend on how things lie in the heap. `sign` 1 puts the largest key on top, -1 the smallest.


@inner
def push(heap: NDArray[Any], base: int, size: int, key: FloatArray, sign: float, item: int) -> None:
    """Add ``item`` to the heap at ``heap[base:base + size]``; the caller counts its size up."""
    k = size
    value = sign * key[item]
    while k > 0:
        parent = (k - 1) >> 1
        other = heap[base + parent]
        rival = sign * key[other]
        if rival > value or (rival == value and other < item):
            break
        # Move the hole up instead of swapping: one write a level.
        heap[base + k] = other
        k = parent
    heap[base + k] = item


@inner
def pop(heap: NDArray[Any], base: int, size: int, key: FloatArray, sign: float) -> int:
    """Remove and return the first of ``size`` items; the caller counts the size down."""
    top = heap[base]
    size -= 1
    # The last item looks for its new place from the top down.
    item = heap[base + size]
    value = sign * key[item]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        first = heap[base + child]
        if child + 1 < size:
            second = heap[base + child + 1]
            better = sign * (key[second] - key[first])
            if better > 0.0 or (better == 0.0 and second < first):
                first = second
                child += 1
        rival = sign * key[first]
        if rival < value or (rival == value and item < first):
            break
        heap[base + k] = first
        k = child
    heap[base + k] = item
    return int(top)


# -- Memory over time -----------------------------------------------------------------------------------------
# Changes of memory are noted in buckets of time, as linked lists. Sums over whole buckets bound the peak in each from
# above, so that only buckets that may hold the peak need be put in order.


@inner
def clear_buckets(s: Any, count: int) -> None:
    """Empty the first ``count`` buckets."""
    for bucket in range(count):
        s.bucket_in[bucket] = s.bucket_out[bucket] = 0
        s.bucket_head[bucket] = -1


@inlined
def note_change(s: Any, first: int, buckets: int, per_second: float, instant: float, added: int, k: int) -> int:
    """Note change ``k`` of a device's memory in one of its ``buckets`` from ``first`` on; returns ``k + 1``.

    ``s`` has ``bucket_in``, ``bucket_out`` and ``bucket_head``, by bucket, and ``change_s``, ``change_bytes`` and
    ``change_next``, by change.
    """
    # The end of the step itself would be one bucket too far.
    bucket = first + min(int(instant * per_second), buckets - 1)
    if added > 0:
        s.bucket_in[bucket] += added
    else:
        s.bucket_out[bucket] -= added
    s.change_s[k] = instant
    s.change_bytes[k] = added
    s.change_next[k] = s.bucket_head[bucket]
    s.bucket_head[bucket] = k
    return k + 1


@inner
def peak_within(s: Any, bucket: int, before: int, peak: int) -> int:
    """The peak over one bucket's changes in order of time, frees first: what ends at an instant is gone at it.

    Args:
        s: as in `note_change`, and ``sorted_change``, room for all changes.
        before: bytes held before the bucket.
        peak: the largest so far.
    """
    count = 0
    k = s.bucket_head[bucket]
    while k >= 0:
        s.sorted_change[count] = k
        count += 1
        k = s.change_next[k]
    # Shell's sort: nothing to allocate, and the lists are short and nearly in order (backwards, or as they came).
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for at in range(gap, count):
            k = s.sorted_change[at]
            hole = at
            while hole >= gap:
                other = s.sorted_change[hole - gap]
                if s.change_s[other] < s.change_s[k] or (
                    s.change_s[other] == s.change_s[k] and (s.change_bytes[other] < 0 or s.change_bytes[k] > 0)
                ):
                    break
                s.sorted_change[hole] = other
                hole -= gap
            s.sorted_change[hole] = k
        gap //= 3
    for at in range(count):
        before += s.change_bytes[s.sorted_change[at]]
        peak = max(peak, before)
    return peak


# -- Idle intervals -------------------------------------------------------------------------------------------
# Intervals of one device or link: `start` and `end`, sorted and disjoint; the last one never ends.


@inner
def find_gap(start: FloatArray, end: FloatArray, count: int, ready_s: float, length_s: float, limit_s: float) -> int:
    """The first idle interval that holds this length from ``ready_s`` on; -1 where it begins after ``limit_s``."""
    low, high = 0, count - 1
    # By halves to the first interval that ends after `ready_s`; no earlier one can hold anything.
    while low < high:
        middle = (low + high) // 2
        if end[middle] > ready_s:
            high = middle
        else:
            low = middle + 1
    # Then one by one: the first few hold it, as a rule.
    while start[low] <= limit_s:
        if max(start[low], ready_s) + length_s <= end[low]:
            return low
        low += 1
    return -1


@inner
def occupy(start: FloatArray, end: FloatArray, count: int, gap: int, from_s: float, to_s: float) -> int:
    """Take [from_s, to_s) out of idle interval ``gap``; returns the new number of intervals.

    Where there is no room for one more, the earliest is forgotten: nothing can run in it any more.
    """
    # Idle before it, after it, both or neither: two intervals, one or none are left.
    before, after = start[gap] < from_s, to_s < end[gap]
    if before and after:
        if count == len(start):
            for k in range(count - 1):
                start[k], end[k] = start[k + 1], end[k + 1]
            count -= 1
            gap -= 1
            if gap < 0:  # it was the one to be forgotten
                start[0] = max(start[0], to_s)
                return count
        for k in range(count, gap, -1):
            start[k], end[k] = start[k - 1], end[k - 1]
        end[gap], start[gap + 1] = from_s, to_s
        return count + 1
    if before:
        end[gap] = from_s
        return count
    if after:
        start[gap] = to_s
        return count
    for k in range(gap, count - 1):
        start[k], end[k] = start[k + 1], end[k + 1]
    return count - 1


# -- Transfers and random numbers -----------------------------------------------------------------------------


@inlined
def edge_s(g: Any, e: int, pair: int) -> float:
    """Seconds of an edge's transfer over a pair of devices (docs/score.md), by the same arithmetic in every kernel."""
    modelled_s = g.edge_latency[e] * g.latency_s[pair] + g.edge_bytes[e] / g.bandwidth[pair]
    return float(modelled_s + g.edge_measured_s[e] * g.hops[pair])


@inlined
def next_random(x: np.uint64) -> np.uint64:
    """The state after ``x``, which is never 0, of xorshift64*; `scrambled` makes random bits of it.

    S. Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled", ACM TOMS 42 (2016),
    doi:10.1145/2845077. numba's own generator belongs to the thread, so that an answer would depend on it.
    """
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    return x


@inlined
def scrambled(x: np.uint64) -> np.uint64:
    """64 random bits of a state; the upper ones are the better ones."""
    return x * np.uint64(2685821657736338717)
