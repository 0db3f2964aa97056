"""Seconds of the copies that a strategy makes of each op, as lower bounds: on all devices, and along paths.

Letters: n ops in G groups that may be cut alike; D devices; K places of a mesh, p stages, m micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baselines.kernel_records import Readers, readers_of
from baselines.strategies.bounding.extents import Extents
from env.bounds.area import WorkByClass
from env.problem import Problem
from env.times.op_times import OpWork, launch_seconds, least_seconds, measured_seconds, moving_seconds
from graphs.arrays import FloatArray, IntArray
from graphs.op_kinds import shape_readers
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.exchange import ADD_BYTES_PER_BYTE

_HALVINGS = 50


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of ops, launches apart from what is divided among parts; the floor of kernels where there are rates.

    Attributes:
        launch_s, work_s: float64 [n], on the device where they cost least at prices that add up to 1. Updates launch
            for nothing.
        least_launch_s, least_work_s: float64 [n], on the device where they take least.
        price_sum: float64 [D], of the dearest 1, 2 .. D devices.
        adds, added_s: float64 [n], launches and seconds of adding what an op makes for one more micro-batch to what it
            made for those before, at these prices.
        least_adds, least_added_s: the same on the device where it takes least.
        kernel_s: launch of a kernel, and seconds of each byte that it moves, on the device where they take least.
    """

    launch_s: FloatArray
    work_s: FloatArray
    least_launch_s: FloatArray
    least_work_s: FloatArray
    price_sum: FloatArray
    adds: FloatArray
    added_s: FloatArray
    least_adds: FloatArray
    least_added_s: FloatArray
    kernel_s: tuple[float, float]

    @staticmethod
    def of(problem: Problem, devices: IntArray, added: FloatArray) -> Costs:
        """Prices of a second of each device are those that prove the area bound with every op divided at will.

        Args:
            added: float64 [2, n], as `Extents.added`.
        """
        graph = problem.graph
        one_of, of = np.unique(problem.kind_of[devices], return_index=True, return_inverse=True)[1:]
        ops = OpWork.of(graph)
        parts = [_parts_s(ops, problem, int(d)) for d in devices[one_of].tolist()]
        both, among = np.unique(np.stack(parts, axis=-1), axis=-1, return_inverse=True)
        (launch_s, rest_s), (begun_s, moved_s) = both[:, :-1], both[:, -1]
        columns, kind = launch_s + rest_s, among.reshape(-1)[of.reshape(-1)]
        size = np.bincount(kind, minlength=columns.shape[1])
        work = WorkByClass(columns, size.astype(np.float64), np.arange(graph.n_ops), graph.n_ops)
        price = work.area(np.ones(graph.n_ops, dtype=np.bool_))[1]
        launch_s = launch_s.copy()
        launch_s[graph.phase == Phase.UPDATE] = 0.0  # many updates may share one
        each = np.sort(price[kind])[::-1]
        priced = (launch_s * price).min(axis=1), (rest_s * price).min(axis=1)
        kernel_s = float(begun_s.min()), float(moved_s.min())
        count, added_bytes = added[0], added[1] * ADD_BYTES_PER_BYTE
        return Costs(
            *priced,
            least_launch_s=launch_s.min(axis=1),
            least_work_s=rest_s.min(axis=1),
            price_sum=np.cumsum(each),
            adds=count * float((begun_s * price).min()),
            added_s=added_bytes * float((moved_s * price).min()),
            least_adds=count * kernel_s[0],
            least_added_s=added_bytes * kernel_s[1],
            kernel_s=kernel_s,
        )

    def area_s(self, parts: FloatArray, places: IntArray) -> FloatArray:
        """float64 [k]: seconds of every op at each of so many places, int64 [k], in no more parts than float64 [n]."""
        few, group = np.unique(np.minimum(parts, places.max(initial=1)), return_inverse=True)
        work_s = np.bincount(group, self.work_s, len(few))
        copies_s = (work_s / np.minimum(places[:, None], few)).sum(axis=1) + self.launch_s.sum()
        result: FloatArray = places * copies_s / self.price_sum[places - 1]
        return result


@dataclass(frozen=True, eq=False)
class Staged:
    """Groups of ops in strategies of stages and micro-batches, and P long paths through the graph.

    Attributes:
        parts: float64 [G].
        work_s: float64 [G], at the prices of `Costs`.
        once_s, often_s: launches of ops that may run once for all micro-batches, and of those that run for each.
        adds_s, added_s: launches and work of adding up gradients, for each micro-batch after the first.
        paths: P arrays of ops.
        path_launch_s, path_work_s: float64 [P] and [P, G].
        micro_batches: so many at most.
        price_sum: as in `Costs`.
    """

    parts: FloatArray
    work_s: FloatArray
    once_s: float
    often_s: float
    adds_s: float
    added_s: float
    paths: tuple[IntArray, ...]
    path_launch_s: FloatArray
    path_work_s: FloatArray
    micro_batches: int
    price_sum: FloatArray

    @staticmethod
    def of(graph: OpGraph, costs: Costs, parts: FloatArray, extents: Extents) -> Staged:
        """Groups of ops by `parts`, float64 [n]: into how many each may be cut at most."""
        most = len(costs.price_sum) * extents.micro_batches
        few, group = np.unique(np.minimum(parts, most), return_inverse=True)
        paths = _paths(graph, costs, parts, most)
        return Staged(
            parts=few,
            work_s=np.bincount(group, costs.work_s, len(few)).astype(np.float64),
            once_s=float(costs.launch_s[~extents.is_chunked].sum()),
            often_s=float(costs.launch_s[extents.is_chunked].sum()),
            adds_s=float(costs.adds.sum()),
            added_s=float(costs.added_s.sum()),
            paths=tuple(paths),
            path_launch_s=np.array([costs.least_launch_s[path].sum() for path in paths]),
            path_work_s=np.array([np.bincount(group[p], costs.least_work_s[p], len(few)) for p in paths]),
            micro_batches=extents.micro_batches,
            price_sum=costs.price_sum,
        )

    def area_s(self, places: IntArray, stages: IntArray, micro_batches: FloatArray) -> FloatArray:
        """float64 [k], as all arguments: seconds of the work of all copies on all devices."""
        result: FloatArray = self.copies_s(places, micro_batches) / self.price_sum[places * stages - 1]
        return result

    def copies_s(self, places: IntArray, micro_batches: FloatArray) -> FloatArray:
        """float64 [k], as both arguments: seconds of all copies, at prices."""
        work_s = (self.work_s / np.minimum(places[:, None], self.parts)).sum(axis=1)
        adds_s = (micro_batches - 1) * (places * self.adds_s + self.added_s)
        result: FloatArray = places * (self.once_s + micro_batches * self.often_s + work_s) + adds_s
        return result

    def path_s(self, places: IntArray, micro_batches: FloatArray) -> FloatArray:
        """float64 [k], as both arguments: seconds of the longest path, the mean over places and micro-batches."""
        share = 1.0 / np.minimum((places * micro_batches)[:, None], self.parts)
        result: FloatArray = (self.path_launch_s + share @ self.path_work_s.T).max(axis=1)
        return result

    def least_s(self, places: IntArray, stages: IntArray, least_micro_batches: IntArray) -> FloatArray:
        """float64 [k], as all arguments: the larger of area and path, for whatever number of micro-batches.

        The area grows with it and the path shrinks: bisection to where they meet. Between `few` and `many` both are
        at least what is returned.
        """
        few = least_micro_batches.astype(np.float64)
        many = np.full(len(places), float(self.micro_batches))
        many = np.where(self.area_s(places, stages, few) >= self.path_s(places, few), few, many)
        few = np.where(self.path_s(places, many) >= self.area_s(places, stages, many), many, few)
        for _ in range(_HALVINGS):
            middle = np.sqrt(few * many)
            is_few = self.area_s(places, stages, middle) < self.path_s(places, middle)
            few, many = np.where(is_few, middle, few), np.where(is_few, many, middle)
        result = np.maximum(self.area_s(places, stages, few), self.path_s(places, many))
        return np.where(least_micro_batches <= self.micro_batches, result, np.inf)


def _parts_s(ops: OpWork, problem: Problem, device: int) -> FloatArray:
    """float64 [2, n + 1]: what each part of an op takes in full on a device, and the time of which it takes its share.

    Last comes a kernel that moves a byte.
    """
    kind = problem.cluster.devices[device]
    once_s, work_s = least_seconds(ops, kind, measured_seconds(problem.graph, kind))
    launch_s = launch_seconds(kind)
    byte_s = moving_seconds(kind, 1.0, kernels=0)
    return np.stack([np.append(once_s, launch_s), np.append(work_s, byte_s)])


def waiting_readers(graph: OpGraph) -> Readers:
    """Readers that wait for ops' tensors under every strategy: all but those that read a shape alone."""
    is_shape = shape_readers(graph.kinds)
    if not is_shape.any():
        return readers_of(graph)
    waits = ~is_shape[graph.consumers]
    kept = np.concatenate([[0], np.cumsum(waits)]).astype(np.int64)
    return Readers(graph.output_ptr, kept[graph.consumer_ptr], graph.consumers[waits])


def _paths(graph: OpGraph, costs: Costs, parts: FloatArray, most: int) -> list[IntArray]:
    """The longest paths with ops cut into 1, 2, 4 .. parts, each a list of ops. O((n + e) log most)."""
    from baselines.path_kernel import longest_path  # loads the compiler

    readers, gone = waiting_readers(graph), np.zeros(graph.n_ops, dtype=np.bool_)
    room = np.empty(graph.n_ops), np.empty(graph.n_ops, np.int64), np.empty(graph.n_ops, np.int64)
    free_s = np.zeros(graph.n_tensors)
    found: dict[bytes, IntArray] = {}
    for power in range(int(most).bit_length()):
        op_s = costs.least_launch_s + costs.least_work_s / np.minimum(2.0**power, parts)
        left = graph.topological_order.copy()
        length, _ = longest_path(left, graph.n_ops, gone, readers, op_s, free_s, *room)
        path = room[2][:length].copy()
        found[path.tobytes()] = path
    return list(found.values())
