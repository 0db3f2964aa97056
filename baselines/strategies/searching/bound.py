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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baselines.paths import longest_path_s
from baselines.strategies.bounding.copies import Costs, Staged
from baselines.strategies.bounding.extents import Extents
from baselines.strategies.bounding.filling import Filling
from baselines.strategies.bounding.placed import Placed
from baselines.strategies.bounding.synchronised import Synchronised
from baselines.strategies.searching.families import FAMILIES, HYBRID
from env.bounds.bounds import lower_bound
from env.cluster import LANE, Cluster
from env.problem import Problem
from env.routes import TABLE_DEVICES
from env.times.op_times import OpWork, least_seconds, measured_seconds
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.axes import AXES
from graphs.transforms.splitting.storage_ops import on_storage
from graphs.transforms.splitting.zero import SPLIT_FROM
from graphs.transforms.strategy import PLACED

ALL, ONE_DEVICE, WITH_HOST, NO_STRATEGY = "all", "one device", "one device with its host", "none"
_STRAIGHT, _V_SHAPED = ("gpipe", "1f1b", "zb-h1", "zb-h2", "memory"), ("zbv", "v-half")
_LOOPED = "interleaved"  # of as many micro-batches as there are devices, or more
LAID_OUT = (*_STRAIGHT, *_V_SHAPED, _LOOPED)  # orders whose layout of stages is known here
_ROUNDING = 1e-9  # relative: a score adds up millions of numbers


def strategy_bounds(graph: OpGraph, cluster: Cluster, keeps_statistics: bool = True) -> Mapping[str, float]:
    """Seconds that no strategy can beat, under `ALL`, `ONE_DEVICE`, `NO_STRATEGY` and names of `families.FAMILIES`.

    Where devices have hosts, what updates do and keep may be there, parameters among it, and under `WITH_HOST` is the
    bound of one device.
    `NO_STRATEGY` is that of placements of the graph as it is (`env.bounds`). Infinite where none of a family can be,
    for want of devices or of memory for what is kept. They hold for all ways to cut into even or uneven parts, for
    subsets of the devices, and for unequal ones. Takes less than a second for 10,000 ops.

    Args:
        keeps_statistics: strategies with ``statistics=local``, which change what is computed, do not count.

    Raises:
        InfeasibleError, MismatchError: as `env.problem.Problem`.
    """
    problem = Problem(graph, cluster)
    result = {ONE_DEVICE: _one_device_s(problem), NO_STRATEGY: _placement_s(problem)}
    has_host = np.flatnonzero(cluster.host_devices >= 0)
    extents = Extents.of(graph, keeps_statistics)
    if graph.is_training and len(has_host):
        graph = _without_updates(graph)
        problem = Problem(graph, cluster)
        result[WITH_HOST] = _one_device_s(problem, has_host)
        extents = replace(extents, added=np.zeros_like(extents.added))  # hosts may do that, too
    devices = cluster.compute_devices
    result |= dict.fromkeys(FAMILIES, np.inf)
    if len(devices) > 1:
        keeps_updates = not graph.is_training or not len(has_host)
        result |= _families(problem, devices, extents, Placed(graph, cluster, keeps_updates))
    return {ALL: min(result.values()), **{name: float(seconds) for name, seconds in result.items()}}


def _without_updates(graph: OpGraph) -> OpGraph:
    """The graph whose updates take no time, and of whose parameters nothing is kept: hosts may do and have all that."""
    is_update = graph.phase == Phase.UPDATE
    flops, moved, kernels = (np.where(is_update, 0, each) for each in (graph.flops, graph.bytes_moved, graph.kernels))
    time_s = np.where(is_update[:, None] & ~np.isnan(graph.time_s), 0.0, graph.time_s)
    fixed_s = np.where(is_update[:, None], 0.0, graph.fixed_s)
    states, parameter = [], graph.parameter_bytes.copy()
    index = {name: op for op, name in enumerate(graph.op_names)} if graph.states else {}
    updates = {name for name, updates in zip(graph.op_names, is_update.tolist(), strict=True) if updates}
    for state in graph.states:
        buffer_bytes = state.parameter_bytes if not state.frozen and updates.isdisjoint(state.users) else 0
        parameter[index[state.users[0]]] -= state.parameter_bytes - buffer_bytes
        states.append(replace(state, parameter_bytes=buffer_bytes, gradient_bytes=0, optimizer_bytes=0))
    none = np.zeros_like(graph.optimizer_bytes)
    kept: dict[str, Any] = {
        "parameter_bytes": np.maximum(parameter, 0),
        "gradient_bytes": none,
        "optimizer_bytes": none,
        "states": tuple(states),
    }
    costs: dict[str, Any] = {
        "flops": flops,
        "bytes_moved": moved,
        "kernels": kernels,
        "time_s": time_s,
        "fixed_s": fixed_s,
    }
    return replace(graph, **costs, **kept)


def _placement_s(problem: Problem) -> float:
    """That of placements; of very many devices the longest path, as if nothing were ever sent."""
    if problem.cluster.n_devices > TABLE_DEVICES:
        return longest_path_s(problem.graph, problem.kind_s.min(axis=1)) * (1.0 - _ROUNDING)
    placements = lower_bound(problem)
    return np.inf if placements.memory_reason else placements.value_s


def _one_device_s(problem: Problem, among: IntArray | None = None) -> float:
    """All of the work on the device that takes least for it, of those (or these) with room for what is kept."""
    devices = np.array([d for d, device in enumerate(problem.cluster.devices) if device.kind != LANE], dtype=np.int64)
    devices = devices if among is None else among
    fits = problem.capacity_bytes[devices] >= int(problem.graph.kept_bytes.sum())
    ops, seconds = OpWork.of(problem.graph), [np.inf]
    for kind in np.unique(problem.kind_of[devices[fits]]).tolist():
        device = problem.kinds[kind]
        if device.rates is None:
            seconds.append(float(problem.kind_s[:, kind].sum()))
            continue
        # Micro-batches may fill tiles better, and another order may keep the host ahead.
        once_s, work_s = least_seconds(ops, device, measured_seconds(problem.graph, device))
        seconds.append(float(once_s[problem.graph.phase != Phase.UPDATE].sum() + work_s.sum()))
    return min(seconds) * (1.0 - _ROUNDING)


def _families(problem: Problem, devices: IntArray, extents: Extents, placed: Placed) -> dict[str, float]:
    graph, count = problem.graph, len(devices)
    costs, room = Costs.of(problem, devices, extents.added), _Room.of(problem, devices)
    is_update = on_storage(graph)
    places = np.arange(2, count + 1)
    along, anyhow = extents.along, np.where(is_update, np.inf, extents.most)
    replicas = [room.whole(places, level) if extents.keeps_states else room.shared(places) for level in range(4)]
    families = dict.fromkeys(axis.family for axis in AXES.values())
    limits = {name: (_parts(name, extents, anyhow, is_update), room.shared(places)) for name in families}
    limits["dp"] = along["batch"], replicas[0]
    limits |= {f"zero{k}": (np.where(is_update, np.inf, along["batch"]), replicas[k]) for k in (1, 2, 3)}
    staged = Staged.of(graph, costs, anyhow, extents)
    paths = staged.paths if extents.keeps_batch else ()
    synchronised = Synchronised.of(problem, devices, costs, anyhow, paths)
    exchanged_s = np.array([synchronised.least_s(k) for k in places.tolist()])

    def flat_s(parts: FloatArray, fits: BoolArray) -> float:
        """Seconds of meshes without stages."""
        return _least(np.maximum(costs.area_s(parts, places), exchanged_s), fits)

    result = {name: flat_s(parts, fits) for name, (parts, fits) in limits.items()}
    filling = Filling(graph, costs, extents, anyhow, staged, placed, synchronised)
    result |= _pipelines(filling, room, count)
    # Without stages: two axes, or one that cuts the batch in some modules and weights in others.
    result[HYBRID] = flat_s(anyhow, room.shared(places))
    if count >= 4 and room.shared(np.array([count])).all():
        k = np.concatenate([np.full(count // places - 1, places) for places in range(2, count // 2 + 1)])
        p = np.concatenate([np.arange(2, count // places + 1) for places in range(2, count // 2 + 1)])
        known_s = min(result[HYBRID], _least(staged.least_s(k, p, p), room.shared(k * p)))
        for is_v in (False, True):
            known_s = filling.least_s(count, (2, count // 2), is_v, known_s)
        result[HYBRID] = known_s
        each = np.array([count // k for k in range(2, count // 2 + 1)])
        placed_s = np.array([filling.placed_s(k, p) for k, p in enumerate(each.tolist(), start=2)])
        result[PLACED] = _least(placed_s, room.shared(np.arange(2, count // 2 + 1) * each))
    return {name: seconds * (1.0 - _ROUNDING) for name, seconds in result.items()}


def _parts(family: str, extents: Extents, anyhow: FloatArray, is_update: BoolArray) -> FloatArray:
    """float64 [n]: parts into which the axes of a family may cut each op; `anyhow`: along any row, updates freely.

    Axes that split storage, but for those of replicas, whose levels of ZeRO are families, cut updates freely.
    """
    axes = [axis for axis in AXES.values() if axis.family == family]
    if any(len(axis.words) > 1 for axis in axes):
        return anyhow
    if any(not axis.words for axis in axes):
        parts = extents.most
    else:
        parts = np.prod([extents.along[axis.words[0]] for axis in axes], axis=0, dtype=np.float64)
    return np.where(is_update, np.inf, parts) if any(axis.splits_storage for axis in axes) else parts


def _pipelines(filling: Filling, room: _Room, devices: int) -> dict[str, float]:
    """Bounds of stages without a mesh, by order."""
    stages = np.arange(2, devices + 1)
    one, fits = np.ones_like(stages), room.shared(stages)
    if not fits.any():
        return {}
    looped_s = _least(filling.staged.least_s(one, stages, stages), fits)
    straight_s, v_shaped_s = (filling.least_s(devices, (1, 1), is_v) for is_v in (False, True))
    by_order = {**dict.fromkeys(_STRAIGHT, straight_s), **dict.fromkeys(_V_SHAPED, v_shaped_s), _LOOPED: looped_s}
    return {f"pp {order}": seconds for order, seconds in by_order.items()}


def _least(seconds: FloatArray, fits: BoolArray) -> float:
    return float(seconds[fits].min(initial=np.inf))


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
        split = sum(size for size, least in zip(self.kept, SPLIT_FROM, strict=True) if zero >= least)
        needed = sum(self.kept) - split + split // places - (3 * self.states if zero else 0)
        result: BoolArray = needed <= self.room[places - 1]
        return result

    def shared(self, devices: IntArray) -> BoolArray:
        """bool [k]: whether so many devices, int64 [k], have room for one of everything together."""
        result: BoolArray = sum(self.kept) <= np.cumsum(self.room.astype(np.float64))[devices - 1]
        return result
