"""`OpFeatures`: what observations and networks describe ops by, in seconds and bytes, before each scales it its way."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from env.gym.task_kernel import longest_paths
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class OpFeatures:
    """Facts about the ops of a problem, each computed once (n ops, m tensors, e edges)."""

    problem: Problem

    @cached_property
    def upward_rank_s(self) -> FloatArray:
        """float64 [n]: mean seconds of the longest path from each op to an end of the graph, the op included."""
        return self.behind_s(self.problem.mean_op_s, self.problem.mean_transfer_s)

    @cached_property
    def downward_rank_s(self) -> FloatArray:
        """float64 [n]: mean seconds of the longest path from a start of the graph to each op, the op excluded."""
        return self.before_s(self.problem.mean_op_s, self.problem.mean_transfer_s)

    @cached_property
    def depth(self) -> FloatArray:
        """float64 [n]: most edges on a path to each op."""
        return self.before_s(np.zeros(self.problem.graph.n_ops), np.ones(self.problem.graph.n_tensors))

    @cached_property
    def output_bytes(self) -> FloatArray:
        """float64 [n]: size of all tensors that each op makes."""
        graph = self.problem.graph
        return np.bincount(graph.tensor_producer, graph.tensor_memory_bytes, graph.n_ops).astype(np.float64)

    def kind_bucket(self, count: int) -> IntArray:
        """int64 [n]: the kind of each op as a number below ``count``, the same in every graph."""
        return np.array([zlib.crc32(kind.encode()) % count for kind in self.problem.graph.kinds], dtype=np.int64)

    def before_s(self, op_s: FloatArray, tensor_s: FloatArray) -> FloatArray:
        """float64 [n]: longest path that leads to each op, which is not counted itself.

        Args:
            op_s: float64 [n], length of each op.
            tensor_s: float64 [m], length of an edge that carries the tensor.
        """
        order = self.problem.graph.topological_order.copy()
        return _longest(order, self._edges_by_consumer, op_s, tensor_s)

    def behind_s(self, op_s: FloatArray, tensor_s: FloatArray) -> FloatArray:
        """float64 [n]: longest path from each op, which is counted, to an end of the graph; arguments as `before_s`."""
        order = self.problem.graph.topological_order[::-1].copy()
        return _longest(order, self._edges_by_producer, op_s, tensor_s) + op_s

    @cached_property
    def _edges_by_consumer(self) -> tuple[IntArray, IntArray, IntArray]:
        producer, consumer, tensor = self.problem.graph.edge_list
        return _by_end(consumer, producer, tensor, self.problem.graph.n_ops)

    @cached_property
    def _edges_by_producer(self) -> tuple[IntArray, IntArray, IntArray]:
        producer, consumer, tensor = self.problem.graph.edge_list
        return _by_end(producer, consumer, tensor, self.problem.graph.n_ops)


def _by_end(end: IntArray, start: IntArray, tensor: IntArray, n_ops: int) -> tuple[IntArray, IntArray, IntArray]:
    """``(ptr, start, tensor)``: the edges that end at op i are those from ``ptr[i]`` to ``ptr[i + 1]``."""
    order = np.argsort(end, kind="stable")
    ptr = np.searchsorted(end[order], np.arange(n_ops + 1)).astype(np.int64)
    return ptr, start[order], tensor[order]


def _longest(
    order: IntArray, edges: tuple[IntArray, IntArray, IntArray], op_s: FloatArray, tensor_s: FloatArray
) -> FloatArray:
    ptr, start, tensor = edges
    result = np.zeros(len(order))
    # Copies, for numba compiles anew for arrays that may not be written.
    longest_paths(order, ptr, start, tensor_s[tensor], op_s.copy(), result)
    return result
