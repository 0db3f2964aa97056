"""Units of placement for policies: their features, coarse groups of them, and orders of the ops in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from env.gym.op_features import OpFeatures
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray, Phase
from graphs.transforms.coarsen import to_size
from placement.learning.networks import grouping_kernel as kernel

KIND_BUCKETS = 16
N_FEATURES = 8 + len(Phase) + KIND_BUCKETS


@dataclass(frozen=True, eq=False)
class UnitView:
    """Features of units, normalised so that they mean the same whatever the graph and the machine (U units, n ops)."""

    problem: Problem

    @cached_property
    def units(self) -> Units:
        return Units.of(self.problem)

    @cached_property
    def of_ops(self) -> OpFeatures:
        return OpFeatures(self.problem)

    @property
    def rank_s(self) -> FloatArray:
        """float64 [n]: upward rank of each op."""
        return self.of_ops.upward_rank_s

    @cached_property
    def position(self) -> FloatArray:
        """float64 [U]: 0 at the start of the longest path, near 1 at its end."""
        place: FloatArray = 1.0 - self.units.largest(self.rank_s) / max(self.rank_s.max(), 1e-30)
        return place

    @cached_property
    def total_s(self) -> float:
        """Seconds of all ops, each on its fastest device."""
        return float(self.problem.fastest_s.sum()) or 1e-30

    @cached_property
    def links(self) -> tuple[IntArray, IntArray, FloatArray]:
        """``(source, target, seconds)``: transfers between units, both ways, the heaviest first."""
        problem = self.problem
        producer, consumer, tensor = problem.graph.edge_list
        a, b = problem.unit_of[producer], problem.unit_of[consumer]
        weight = problem.mean_transfer_s[tensor]
        apart = a != b
        source, target = np.concatenate([a[apart], b[apart]]), np.concatenate([b[apart], a[apart]])
        seconds = np.concatenate([weight[apart], weight[apart]])
        heaviest = np.lexsort((target, source, -seconds))
        return source[heaviest], target[heaviest], seconds[heaviest]

    @cached_property
    def features(self) -> Tensor:
        """float32 [U, F]."""
        problem, units = self.problem, self.units
        graph = problem.graph
        count = units.n_units
        capacity = max(1.0, float(problem.capacity_bytes.max()))
        out_s = np.bincount(graph.tensor_producer, problem.mean_transfer_s, graph.n_ops)
        source, _, seconds = self.links
        through = units.largest(self.of_ops.downward_rank_s + self.rank_s) / max(self.rank_s.max(), 1e-30)
        columns = [
            self.position,
            through,
            _log(np.add.reduceat(problem.mean_op_s[units.members], units.ptr[:-1]) / self.total_s * count),
            _log(np.add.reduceat(out_s[units.members], units.ptr[:-1]) / self.total_s * count),
            _log(np.bincount(source, seconds, count) / self.total_s * count),
            np.sqrt(units.kept_bytes / capacity),
            np.sqrt(units.working_bytes / capacity),
            np.log1p(np.bincount(source, minlength=count)) / 4,
            *(units.largest((graph.phase == phase).astype(float)) for phase in Phase),
        ]
        kinds = np.zeros((count, KIND_BUCKETS))
        np.add.at(kinds, (problem.unit_of, self.of_ops.kind_bucket(KIND_BUCKETS)), 1.0)
        kinds /= kinds.sum(axis=1, keepdims=True)
        return torch.tensor(np.column_stack([*columns, kinds]), dtype=torch.float32)


def _log(values: FloatArray) -> FloatArray:
    """Spread over orders of magnitude, near 0 for what is average."""
    return np.log10(values + 1e-3)


class PerGraph(nn.Module):
    """A tensor for each graph by its hash, kept and loaded with the parameters of a policy."""

    def __contains__(self, key: str) -> bool:
        return key in self._buffers

    def __getitem__(self, key: str) -> Tensor:
        return self.get_buffer(key)

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.register_buffer(key, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._buffers.clear()
        for name, value in state_dict.items():
            if name.startswith(prefix):
                self[name.removeprefix(prefix)] = value.clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


def coarse_groups(problem: Problem, n_groups: int) -> IntArray:
    """int64 [U], at most `n_groups` groups of equal work along heavy edges, whatever their device."""
    fine = to_size(problem.graph, n_groups).group_of
    return _at_most(fine[Units.of(problem).first_op], _op_seconds(problem), n_groups)


def groups_of_plan(problem: Problem, plan: Plan, n_groups: int, rng: np.random.Generator) -> IntArray:
    """int64 [U], groups that each lie on one device of `plan`, so that the plan is one choice per group.

    A random one of the coarsenings of the graph, cut where the plan changes device, the smallest pieces put together
    with others of their device that are close in the graph's order.
    """
    first = Units.of(problem).first_op
    device = plan.device[first]
    wanted = int(n_groups * rng.uniform(0.3, 0.9))
    coarse = to_size(problem.graph, max(wanted, 1)).group_of[first]
    _, pieces = np.unique(coarse * problem.cluster.n_devices + device, return_inverse=True)
    return _merged(problem, pieces.astype(np.int64), device, n_groups)


def _merged(problem: Problem, piece: IntArray, device: IntArray, n_groups: int) -> IntArray:
    """Join the lightest pieces with the next of their device until `n_groups` are left."""
    seconds = _op_seconds(problem)
    position = problem.graph.topological_position
    at = np.array([position[members].mean() for members in problem.units])
    while (count := int(piece.max()) + 1) > n_groups:
        weight = np.bincount(piece, seconds, count)
        centre = np.bincount(piece, at, count) / np.bincount(piece, minlength=count)
        of_device = np.zeros(count, dtype=np.int64)
        of_device[piece] = device
        surplus = count - n_groups
        target = np.arange(count)
        for p in np.argsort(weight)[: max(1, surplus // 2)]:
            others = np.flatnonzero(
                (of_device == of_device[p]) & (np.arange(count) != p) & (target == np.arange(count))
            )
            if len(others) and target[p] == p and not (target == p).sum() > 1:
                target[p] = others[np.argmin(np.abs(centre[others] - centre[p]))]
        if (target == np.arange(count)).all():  # one piece a device is left
            break
        _, piece = np.unique(target[piece], return_inverse=True)
        piece = piece.astype(np.int64)
    return piece


def _at_most(group: IntArray, seconds: FloatArray, n_groups: int) -> IntArray:
    """Number groups from 0; where there are more than `n_groups`, the lightest share the last numbers."""
    _, group = np.unique(group, return_inverse=True)
    weight = np.bincount(group, seconds)
    rank = np.empty(len(weight), dtype=np.int64)
    rank[np.argsort(-weight, kind="stable")] = np.arange(len(weight))
    numbered = np.where(rank < n_groups, rank, n_groups - 1 - (rank - n_groups) % max(1, n_groups // 2))
    return numbered[group].astype(np.int64)


def _op_seconds(problem: Problem) -> FloatArray:
    """float64 [U]."""
    return np.array([problem.mean_op_s[members].sum() for members in problem.units])


def within_pins(problem: Problem, device: IntArray) -> IntArray:
    """int64 [k, n]: units that may not run on their device go to the fastest that they may run on."""
    allowed = problem.allowed[np.arange(problem.graph.n_ops), device]
    if allowed.all():
        return device
    unit_s = np.zeros((problem.n_units, problem.cluster.n_devices))
    np.add.at(unit_s, problem.unit_of, np.where(problem.allowed, problem.op_s, np.inf))
    return np.where(allowed, device, unit_s.argmin(axis=1)[problem.unit_of])


def on_devices(problem: Problem, device: IntArray, shift_s: FloatArray | None = None) -> IntArray:
    """int64 [k, n]: places in line by the longest path to the end of the graph, with everything on its device.

    Args:
        device: int64 [k, n].
        shift_s: float64 [k, n], added to the path of each op; nothing by default.
    """
    result = np.empty(device.shape, dtype=np.int64)
    shift_s = np.zeros(device.shape) if shift_s is None else shift_s
    kernel.orders(device, shift_s, *_structure(problem), result)
    return result


def correction_of(problem: Problem, plan: Plan) -> FloatArray:
    """float64 [n]: the shift of every op with which `on_devices` gives the plan's own order, where it has one."""
    n = problem.graph.n_ops
    if plan.order is None:
        return np.zeros(n)
    path_s = np.empty(n)
    kernel.path(plan.device, *_structure(problem), path_s)
    line = np.argsort(plan.order, kind="stable")
    wanted_s = np.empty(n)
    # Ops of equal paths are told apart by less than any time that matters.
    wanted_s[line] = np.sort(path_s)[::-1] - np.arange(n) * 1e-12 * path_s.max()
    return wanted_s - path_s


def _structure(problem: Problem) -> tuple[IntArray, FloatArray, IntArray, IntArray, IntArray, FloatArray]:
    graph = problem.graph
    readers = graph.output_ptr, graph.consumer_ptr, graph.consumers
    return graph.topological_order, problem.op_s, *readers, problem.mean_transfer_s


def majority(problem: Problem, group: IntArray, device: IntArray, n_groups: int) -> IntArray:
    """int64 [n_groups]: the device with most of the work of each group; ``group`` int64 [U], ``device`` int64 [n]."""
    n_devices = problem.cluster.n_devices
    key = group[problem.unit_of] * n_devices + device
    share = np.bincount(key, problem.mean_op_s + 1e-12, n_groups * n_devices).reshape(n_groups, n_devices)
    found: IntArray = share.argmax(axis=1)
    return found


def check_devices(problem: Problem, n_devices: int) -> None:
    """Refuse a cluster of another size.

    Raises:
        MismatchError: says both numbers.
    """
    if problem.cluster.n_devices != n_devices:
        raise MismatchError(
            f"this policy places on {n_devices} devices, but cluster {problem.cluster.name!r} has "
            f"{problem.cluster.n_devices}; train one for it, or use method pretrained."
        )
