"""Lower bounds on a step over all strategies, and over those of a family (docs/score.md, "Bounds over strategies").

Every strategy gives each op a copy at each of K places of a mesh, in one of p stages of K devices, and if it is cut in
time one for each of m micro-batches. A copy pays the launches in full and a share of the work; the shares of all
copies add up to 1 at least, and more where an op cannot be cut that far. Exchanges, repeated forward passes and
waiting for others come on top and are left out. So a step takes at least

* the **area**: launches and work of all copies, spread over K p devices;
* the **path**: along every path of the graph, one launch and a share of the work of each op, for one place and one
  micro-batch. The mean share over places and micro-batches is 1 / (K m) at least.

More micro-batches shorten the path and cost launches, so that the larger of both is least where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from baselines.strategies.searching.extents import Extents
from baselines.strategies.searching.families import FAMILIES, HYBRID, PIPELINES
from env.bounds.area import Work
from env.bounds.bounds import lower_bound
from env.cluster import Cluster
from env.problem import Problem
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.sharding import SHAPE_ONLY

ALL, ONE_DEVICE, NO_STRATEGY = "all", "one device", "none"
_ROUNDING = 1e-9  # relative: a score adds up millions of numbers
_HALVINGS = 50


def strategy_bounds(graph: OpGraph, cluster: Cluster) -> Mapping[str, float]:
    """Seconds that no strategy can beat, under `ALL`, `ONE_DEVICE`, `NO_STRATEGY` and names of `families.FAMILIES`.

    `NO_STRATEGY` is that of placements of the graph as it is (`env.bounds`). Infinite where none of a family can be,
    for want of devices or of memory for what is kept. They hold for all ways to cut into even or uneven parts, for
    subsets of the devices, and for unequal ones. Takes less than a second for 10,000 ops.

    Raises:
        InfeasibleError, MismatchError: as `env.problem.Problem`.
    """
    problem = Problem(graph, cluster)
    placements = lower_bound(problem)
    result = {
        ONE_DEVICE: _one_device_s(problem),
        NO_STRATEGY: np.inf if placements.memory_reason else placements.value_s,
    }
    devices = cluster.compute_devices
    result |= dict.fromkeys(FAMILIES, np.inf)
    if len(devices) > 1:
        result |= _families(problem, devices)
    return {ALL: min(result.values()), **{name: float(seconds) for name, seconds in result.items()}}


def _one_device_s(problem: Problem) -> float:
    """All of the work on the device that takes least for it, among those that have room for what is kept."""
    devices = problem.cluster.compute_devices
    fits = problem.capacity_bytes[devices] >= int(problem.graph.kept_bytes.sum())
    seconds = problem.op_s[:, devices[fits]].sum(axis=0)
    return float(seconds.min(initial=np.inf)) * (1.0 - _ROUNDING)


def _families(problem: Problem, devices: IntArray) -> dict[str, float]:
    graph, count = problem.graph, len(devices)
    extents, costs, room = Extents.of(graph), _Costs.of(problem, devices), _Room.of(problem, devices)
    is_update = graph.phase == Phase.UPDATE
    places = np.arange(2, count + 1)
    along, anyhow = extents.along, np.where(is_update, np.inf, extents.most)
    limits = {
        "dp": (along["batch"], room.whole(places, 0)),
        **{f"zero{k}": (np.where(is_update, np.inf, along["batch"]), room.whole(places, k)) for k in (1, 2, 3)},
        "tp": (extents.most, room.shared(places)),
        "cp": (along["sequence"], room.shared(places)),
        "ep": (anyhow, room.shared(places)),
        "spatial": (along["height"] * along["width"], room.shared(places)),
    }
    result = {name: _least(costs.area_s(parts, places), fits) for name, (parts, fits) in limits.items()}
    staged = _Staged.of(problem, costs, anyhow, extents)
    one = np.ones(1, dtype=np.int64)
    pipeline_s = _least(staged.least_s(one, one * count), room.shared(one * count))
    result |= dict.fromkeys(PIPELINES, pipeline_s)
    hybrid = places[places <= count // 2]
    result[HYBRID] = _least(staged.least_s(hybrid, count // hybrid), room.shared(hybrid * (count // hybrid)))
    meshes = places[places >= 4]  # of two axes, without stages
    result[HYBRID] = min(result[HYBRID], _least(costs.area_s(anyhow, meshes), room.shared(meshes)))
    return {name: seconds * (1.0 - _ROUNDING) for name, seconds in result.items()}


def _least(seconds: FloatArray, fits: BoolArray) -> float:
    return float(seconds[fits].min(initial=np.inf))


@dataclass(frozen=True, eq=False)
class _Costs:
    """Seconds of ops, launches apart from what is divided among parts (n ops, D devices).

    Attributes:
        launch_s, work_s: float64 [n], on the device where they cost least at the prices below.
        least_launch_s, least_work_s: float64 [n], on the device where they take least.
        price_sum: float64 [D], of the dearest 1, 2 .. D devices, the prices of all adding up to 1.
    """

    launch_s: FloatArray
    work_s: FloatArray
    least_launch_s: FloatArray
    least_work_s: FloatArray
    price_sum: FloatArray

    @staticmethod
    def of(problem: Problem, devices: IntArray) -> _Costs:
        """Prices of a second of each device are those that prove the area bound with every op divided at will."""
        graph = problem.graph
        columns, first, kind, size = np.unique(
            problem.op_s[:, devices], axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        work = Work(columns, size.astype(np.float64), np.arange(graph.n_ops), graph.n_ops)
        price = work.area(np.ones(graph.n_ops, dtype=np.bool_))[1]
        overhead_s = np.array([problem.cluster.devices[d].launch_overhead_s for d in devices[first].tolist()])
        is_modelled = np.isnan(graph.time_s).all(axis=1)  # of a measured time, nobody knows what launches took
        launch_s = np.where(is_modelled, graph.kernels, 0)[:, None] * overhead_s
        rest_s = np.maximum(columns - launch_s, 0.0)
        each = np.sort(price[kind.reshape(-1)])[::-1]
        priced = (launch_s * price).min(axis=1), (rest_s * price).min(axis=1)
        return _Costs(*priced, launch_s.min(axis=1), rest_s.min(axis=1), np.cumsum(each))

    def area_s(self, parts: FloatArray, places: IntArray) -> FloatArray:
        """float64 [k]: seconds of every op at each of so many places, int64 [k], in no more parts than float64 [n]."""
        few, group = np.unique(np.minimum(parts, places.max(initial=1)), return_inverse=True)
        work_s = np.bincount(group, self.work_s, len(few))
        copies_s = (work_s / np.minimum(places[:, None], few)).sum(axis=1) + self.launch_s.sum()
        result: FloatArray = places * copies_s / self.price_sum[places - 1]
        return result


@dataclass(frozen=True, eq=False)
class _Staged:
    """Ops in groups that may be cut alike, for strategies of stages and micro-batches (G groups, P paths).

    Attributes:
        parts: float64 [G].
        work_s: float64 [G], at the prices of `costs`.
        once_s, often_s: launches of ops that may run once for all micro-batches, and of those that run for each.
        path_launch_s, path_work_s: float64 [P] and [P, G].
        micro_batches: so many at most.
        price_sum: as in `_Costs`.
    """

    parts: FloatArray
    work_s: FloatArray
    once_s: float
    often_s: float
    path_launch_s: FloatArray
    path_work_s: FloatArray
    micro_batches: int
    price_sum: FloatArray

    @staticmethod
    def of(problem: Problem, costs: _Costs, parts: FloatArray, extents: Extents) -> _Staged:
        most = len(costs.price_sum) * extents.micro_batches
        few, group = np.unique(np.minimum(parts, most), return_inverse=True)
        paths = _paths(problem.graph, costs, parts, most)
        return _Staged(
            parts=few,
            work_s=np.bincount(group, costs.work_s, len(few)),
            once_s=float(costs.launch_s[~extents.is_chunked].sum()),
            often_s=float(costs.launch_s[extents.is_chunked].sum()),
            path_launch_s=np.array([costs.least_launch_s[path].sum() for path in paths]),
            path_work_s=np.array([np.bincount(group[p], costs.least_work_s[p], len(few)) for p in paths]),
            micro_batches=extents.micro_batches,
            price_sum=costs.price_sum,
        )

    def area_s(self, places: IntArray, stages: IntArray, micro_batches: FloatArray) -> FloatArray:
        """float64 [k], as all arguments: seconds of the work of all copies on all devices."""
        work_s = (self.work_s / np.minimum(places[:, None], self.parts)).sum(axis=1)
        copies_s = places * (self.once_s + micro_batches * self.often_s + work_s)
        result: FloatArray = copies_s / self.price_sum[places * stages - 1]
        return result

    def path_s(self, places: IntArray, micro_batches: FloatArray) -> FloatArray:
        """float64 [k], as both arguments: seconds of the longest path, the mean over places and micro-batches."""
        share = 1.0 / np.minimum((places * micro_batches)[:, None], self.parts)
        result: FloatArray = (self.path_launch_s + share @ self.path_work_s.T).max(axis=1)
        return result

    def least_s(self, places: IntArray, stages: IntArray) -> FloatArray:
        """float64 [k], as both arguments: the larger of area and path, for whatever number of micro-batches.

        The area grows with it and the path shrinks: bisection to where they meet. Between `few` and `many` both are
        at least what is returned.
        """
        few, many = np.ones(len(places)), np.full(len(places), float(self.micro_batches))
        many = np.where(self.area_s(places, stages, few) >= self.path_s(places, few), few, many)
        few = np.where(self.path_s(places, many) >= self.area_s(places, stages, many), many, few)
        for _ in range(_HALVINGS):
            middle = np.sqrt(few * many)
            is_few = self.area_s(places, stages, middle) < self.path_s(places, middle)
            few, many = np.where(is_few, middle, few), np.where(is_few, many, middle)
        return np.maximum(self.area_s(places, stages, few), self.path_s(places, many))


def _paths(graph: OpGraph, costs: _Costs, parts: FloatArray, most: int) -> list[IntArray]:
    """The longest paths with ops cut into 1, 2, 4 .. parts, each a list of ops. O((n + e) log most)."""
    from baselines.kernel_records import readers_of
    from baselines.path_kernel import longest_path  # loads the compiler

    # What is made of a shape alone waits for no values, micro-batches or not: no path leads through it.
    gone = np.array([any(word in kind for word in SHAPE_ONLY) for kind in graph.kinds], dtype=np.bool_)
    room = np.empty(graph.n_ops), np.empty(graph.n_ops, np.int64), np.empty(graph.n_ops, np.int64)
    free_s = np.zeros(graph.n_tensors)
    found: dict[bytes, IntArray] = {}
    for power in range(int(most).bit_length()):
        op_s = costs.least_launch_s + costs.least_work_s / np.minimum(2.0**power, parts)
        left = graph.topological_order.copy()
        length, _ = longest_path(left, graph.n_ops, gone, readers_of(graph), op_s, free_s, *room)
        path = room[2][:length].copy()
        found[path.tobytes()] = path
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Room:
    """Bytes that are kept for the whole step, and room for them.

    Attributes:
        kept: parameters, gradients and optimizer state.
        states: how many of them there are; a part of each may be rounded down.
        room: int64 [D], bytes of each device, most first.
    """

    kept: tuple[int, int, int]
    states: int
    room: IntArray

    @staticmethod
    def of(problem: Problem, devices: IntArray) -> _Room:
        graph = problem.graph
        parts = graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes
        kept = int(parts[0].sum()), int(parts[1].sum()), int(parts[2].sum())
        return _Room(kept, len(graph.states), np.sort(problem.capacity_bytes[devices])[::-1])

    def whole(self, places: IntArray, zero: int) -> BoolArray:
        """bool [k]: whether so many replicas, int64 [k], have room, with storage split at this level of ZeRO."""
        parameters, gradients, states = self.kept
        split = sum(size for size, level in ((parameters, 3), (gradients, 2), (states, 1)) if zero >= level)
        needed = sum(self.kept) - split + split // places - (3 * self.states if zero else 0)
        result: BoolArray = needed <= self.room[places - 1]
        return result

    def shared(self, devices: IntArray) -> BoolArray:
        """bool [k]: whether so many devices, int64 [k], have room for one of everything together."""
        result: BoolArray = sum(self.kept) <= np.cumsum(self.room.astype(np.float64))[devices - 1]
        return result
