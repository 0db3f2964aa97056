"""Longest paths by mean compute and mean transfer time, and how fast a device is on the whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baselines.kernel_records import Readers, readers_of
from env.problem import BoolArray, Problem
from graphs.opgraph import FloatArray, IntArray, OpGraph

Arrays = tuple[Readers, FloatArray, FloatArray]


def upward_rank(problem: Problem) -> FloatArray:
    """float64 [n]: seconds of the longest path from each op to an end of the graph, the op included. O(n + e).

    Source: Topcuoglu, Hariri, Wu 2002, equation 8 (doi:10.1109/71.993206).
    """
    from baselines import path_kernel

    result = np.empty(problem.graph.n_ops)
    path_kernel.upward(problem.graph.topological_order, *_arrays(problem), result)
    return result


def longest_path_s(graph: OpGraph, op_s: FloatArray) -> float:
    """Seconds of the longest path of ops that take float64 [n], if nothing were ever sent. O(n + e)."""
    from baselines import path_kernel

    rank_s = np.empty(graph.n_ops)
    path_kernel.upward(graph.topological_order, readers_of(graph), op_s, np.zeros(graph.n_tensors), rank_s)
    return float(rank_s.max(initial=0.0))


def importance(problem: Problem) -> FloatArray:
    """float64 [n]: seconds of the longest path through each op. O(n + e).

    Source: Mayer, Mayer, Laich 2017 (doi:10.48550/arXiv.1711.01912).
    """
    from baselines import path_kernel

    before = np.empty(problem.graph.n_ops)
    path_kernel.downward(problem.graph.topological_order, *_arrays(problem), before)
    return before + upward_rank(problem)


def longest_paths(problem: Problem, gone: BoolArray) -> Iterator[IntArray]:
    """The longest path of the ops that are not gone, again and again until none is left. O(n + e) each.

    The caller marks ops as gone (bool [n]) between two paths, at least those of the last path.
    """
    from baselines import path_kernel

    n = problem.graph.n_ops
    left, n_left = problem.graph.topological_order.copy(), n
    remaining_s, following, path = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
    arrays = _arrays(problem)
    while True:
        length, n_left = path_kernel.longest_path(left, n_left, gone, *arrays, remaining_s, following, path)
        if length == 0:
            return
        yield path[:length].copy()


def slowness(problem: Problem) -> FloatArray:
    """float64 [D]: seconds each device takes per mean second of the ops it may run; infinite where it may run none.

    It stands for the "speed" of papers that give a device one number.
    """
    mean_s = np.where(problem.allowed, problem.mean_op_s[:, np.newaxis], 0.0).sum(axis=0)
    own_s = np.where(problem.allowed, problem.op_s, 0.0).sum(axis=0)
    result = np.where(mean_s > 0, own_s / np.where(mean_s > 0, mean_s, 1.0), 1.0)
    return np.where(problem.allowed.any(axis=0), result, np.inf)


def fastest_first(problem: Problem) -> IntArray:
    """int64 [D]: devices by `slowness`; equals in cluster order."""
    return np.argsort(slowness(problem), kind="stable").astype(np.int64)


def _arrays(problem: Problem) -> Arrays:
    return readers_of(problem.graph), problem.mean_op_s, problem.mean_transfer_s
