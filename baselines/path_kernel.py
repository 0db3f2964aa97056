"""Compiled loops over paths; `baselines.paths` says what they compute."""

from __future__ import annotations

from env.jit import njit
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray


@njit(cache=True)
def upward(
    topological: IntArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    for k in range(len(topological) - 1, -1, -1):
        op = topological[k]
        longest = 0.0
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                longest = max(longest, transfer_s[t] + result[consumers[e]])
        result[op] = op_s[op] + longest


@njit(cache=True)
def downward(
    topological: IntArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    result[:] = 0.0
    for op in topological:
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                c = consumers[e]
                result[c] = max(result[c], result[op] + op_s[op] + transfer_s[t])


@njit(cache=True)
def longest_path(
    left: IntArray,
    n_left: int,
    gone: BoolArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
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
    for k in range(n_left):
        if not gone[left[k]]:
            left[kept] = left[k]
            kept += 1
    first = -1
    for k in range(kept - 1, -1, -1):
        op = left[k]
        longest, best = 0.0, -1
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                c = consumers[e]
                if not gone[c] and (best < 0 or transfer_s[t] + remaining_s[c] > longest):
                    longest, best = transfer_s[t] + remaining_s[c], c
        remaining_s[op], following[op] = op_s[op] + longest, best
        # >=, walking backwards: of equally long paths the one that starts first, so zero-time ops are not left out.
        if first < 0 or remaining_s[op] >= remaining_s[first]:
            first = op
    length = 0
    while first >= 0:
        path[length] = first
        length += 1
        first = following[first]
    return length, kept
