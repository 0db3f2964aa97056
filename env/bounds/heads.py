"""Earliest start of each op, and the least time that must follow it, with transfers taken into account."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from graphs.opgraph import FloatArray, IntArray

_STEPS = 4e8  # insertions into sorted lists, about a second
_FEWEST, _MOST = 16, 1024
_ROUNDING = 1e-12  # relative, of sums of bytes


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of ops joined by tensors (n ops, p pairs).

    Attributes:
        order: int64 [n], topological.
        source, target: int64 [p].
        remote_s: float64 [p], the least time it takes from the end of the source until its tensors are on any other
            device where the target may run; infinite if both always run on one device.
        op_s: float64 [n], the least time of each op.
        sizes: what ops need of memory, as `env.bounds.head_kernel.earliest` takes it.
    """

    order: IntArray
    source: IntArray
    target: IntArray
    remote_s: FloatArray
    apart: BoolArray
    op_s: FloatArray
    sizes: tuple[IntArray, FloatArray, FloatArray, FloatArray]

    @staticmethod
    def of(problem: Problem, tensor_bytes: IntArray | None = None) -> Pairs:
        """The pairs of a problem. O(e log e + e R) for R kinds of routes.

        Args:
            tensor_bytes: int64 [m], that are sent in place of the graph's.
        """
        producer, consumer, tensor = problem.graph.edge_list
        n = problem.graph.n_ops
        pair, which = np.unique(producer * n + consumer, return_inverse=True)
        remote_s = np.zeros(len(pair))
        np.maximum.at(remote_s, which, _least_transfer_s(problem, producer, consumer, tensor, tensor_bytes))
        fits = problem.suits
        fastest_s = problem.seconds_where(fits)
        source, target = pair // n, pair % n
        apart = ~(fits[source] & fits[target]).any(axis=1)
        kept = np.bincount(problem.unit_of, problem.graph.kept_bytes, problem.n_units).astype(np.float64)
        largest = np.where(problem.allowed, problem.capacity_bytes, 0).max(axis=1).astype(np.float64)
        sizes = problem.unit_of, kept, problem.working_bytes.astype(np.float64), largest * (1 + _ROUNDING)
        return Pairs(problem.graph.topological_order, source, target, remote_s, apart, fastest_s, sizes)

    @property
    def critical_path_s(self) -> float:
        """Seconds of the longest path if transfers were free."""
        free = replace(self, remote_s=np.zeros(len(self.source)))
        return float((free.heads(1) + self.op_s).max())

    def heads(self, most: int | None = None) -> FloatArray:
        """float64 [n]: seconds that must pass before each op can start, with transfers.

        An op that another waits for is either on another device, and then its tensors arrive a transfer after its end;
        or on the same device, and then all such ops run there one after the other, and the question repeats for the ops
        that they wait for. Going through the latest arrivals first, the op starts no sooner than at the least, over the
        number of ops so brought to its device, of max(next arrival, one machine's time for them): any placement leaves
        the first it does not bring. This is the bound of C. Papadimitriou and M. Yannakakis, "Towards an
        architecture-independent analysis of parallel algorithms", SIAM J. Computing 19(2), 1990, section 3
        (doi:10.1137/0219021), with transfer times of each tensor's own and without duplication: release dates count. It
        holds for every order of work and on busy links. Beyond the paper: ops that are brought to one device must fit
        there, with all that they keep; of those up to the first that does not, one is left. O(n most^2 + e log e).

        Args:
            most: ops brought to one device at most; the rest is left out, which weakens the bound. None: what a
                second allows.
        """
        return self._earliest(self.order.copy(), self.target, self.source, most)

    def tails(self, most: int | None = None) -> FloatArray:
        """float64 [n]: seconds that must pass after each op has ended: `heads` of the reversed graph."""
        return self._earliest(self.order[::-1].copy(), self.source, self.target, most)

    def _earliest(self, order: IntArray, op: IntArray, before: IntArray, most: int | None) -> FloatArray:
        from env.bounds import head_kernel  # loads the compiler

        n = len(order)
        if most is None:
            most = int(np.clip(np.sqrt(_STEPS / n), _FEWEST, _MOST))
        by_op = np.argsort(op, kind="stable")
        ptr = np.searchsorted(op[by_op], np.arange(n + 1)).astype(np.int64)
        result = np.zeros(n)
        waits = before[by_op], self.remote_s[by_op], self.apart[by_op]
        head_kernel.earliest(order, ptr, *waits, self.op_s, self.sizes, most, result)
        return result


def _least_transfer_s(
    problem: Problem, producer: IntArray, consumer: IntArray, tensor: IntArray, tensor_bytes: IntArray | None
) -> FloatArray:
    """float64 [e]: least seconds to move a tensor between two different devices where both its ends may run."""
    choices, choice_of = problem.choices
    graph, n = problem.graph, problem.cluster.n_devices
    sizes = graph.tensor_bytes if tensor_bytes is None else tensor_bytes
    kind = choice_of[producer] * len(choices) + choice_of[consumer]
    result = np.full(len(tensor), np.inf)
    for k in np.unique(kind).tolist():
        ends = np.outer(choices[k // len(choices)], choices[k % len(choices)]) & ~np.eye(n, dtype=np.bool_)
        chosen = kind == k
        size, measured = sizes[tensor[chosen]], graph.tensor_transfer_s[tensor[chosen]]
        modelled = np.full(len(size), np.inf)
        for latency_s, bandwidth in _undominated(problem.latency_s[ends], problem.bandwidth_bytes_per_s[ends]):
            modelled = np.minimum(modelled, latency_s + size / bandwidth)
        if ends.any():
            result[chosen] = np.where(np.isnan(measured), modelled, measured * problem.hops[ends].min())
    result[problem.unit_of[producer] == problem.unit_of[consumer]] = np.inf
    return result


def _undominated(latency_s: FloatArray, bandwidth: FloatArray) -> list[tuple[float, float]]:
    """The pairs of latency and bandwidth [k] of which no other has both as good."""
    order = np.lexsort((-bandwidth, latency_s))
    sorted_bandwidth = bandwidth[order]
    best_before = np.concatenate([[0.0], np.maximum.accumulate(sorted_bandwidth)[:-1]]) if len(order) else bandwidth
    kept = order[sorted_bandwidth > best_before]
    return list(zip(latency_s[kept].tolist(), bandwidth[kept].tolist(), strict=True))
