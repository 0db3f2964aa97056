"""Compiled loops over paths; `baselines.paths` says what they compute."""

# Letters
# t   a tensor; c, a consumer of it; e, an edge (a tensor and a consumer); k, a position
# op_s, transfer_s   seconds, [n] and [m]; a path is a sum of them

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.kernel_records import Readers
from env.jit import entry

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray


@entry
def upward(
    topological: IntArray,
    readers: Readers,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    """Fill ``result`` [n] with the longest path from each op to an end of the graph, the op included."""
    for k in range(len(topological) - 1, -1, -1):  # consumers first
        op = topological[k]
        longest = 0.0
        for t in range(readers.output_ptr[op], readers.output_ptr[op + 1]):
            for e in range(readers.ptr[t], readers.ptr[t + 1]):
                longest = max(longest, transfer_s[t] + result[readers.op[e]])
        result[op] = op_s[op] + longest


@entry
def downward(
    topological: IntArray,
    readers: Readers,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    """Fill ``result`` [n] with the longest path to each op from a start of the graph, the op not included."""
    for op in range(len(result)):
        result[op] = 0.0
    # Producers first: each op hands on what is final by then.
    for op in topological:
        for t in range(readers.output_ptr[op], readers.output_ptr[op + 1]):
            for e in range(readers.ptr[t], readers.ptr[t + 1]):
                c = readers.op[e]
                result[c] = max(result[c], result[op] + op_s[op] + transfer_s[t])


@entry
def longest_path(
    left: IntArray,
    n_left: int,
    gone: BoolArray,
    readers: Readers,
    op_s: FloatArray,
    transfer_s: FloatArray,
    remaining_s: FloatArray,
    following: IntArray,
    path: IntArray,
) -> tuple[int, int]:
    """Write the longest path of the ops that are not gone to ``path``; returns its length and the new ``n_left``.

    ``left[:n_left]`` holds ops in topological order and loses those that are gone. A path is a run of ops that are
    joined by edges; ``remaining_s`` and ``following`` (float64 and int64 [n]) are room to work in.
    """
    kept = 0
    # Close the list up, so that a graph of many short paths is not walked in full for each of them.
    for k in range(n_left):
        if not gone[left[k]]:
            left[kept] = left[k]
            kept += 1
    # Consumers first, as in `upward`, and the op that follows on the longest path besides.
    first = -1
    for k in range(kept - 1, -1, -1):
        op = left[k]
        longest, best = 0.0, -1
        for t in range(readers.output_ptr[op], readers.output_ptr[op + 1]):
            for e in range(readers.ptr[t], readers.ptr[t + 1]):
                c = readers.op[e]
                if not gone[c] and (best < 0 or transfer_s[t] + remaining_s[c] > longest):
                    longest, best = transfer_s[t] + remaining_s[c], c
        remaining_s[op], following[op] = op_s[op] + longest, best
        # >=, walking backwards: of equally long paths the one that starts first, so zero-time ops are not left out.
        if first < 0 or remaining_s[op] >= remaining_s[first]:
            first = op
    # Walk along what follows.
    length = 0
    while first >= 0:
        path[length] = first
        length += 1
        first = following[first]
    return length, kept
