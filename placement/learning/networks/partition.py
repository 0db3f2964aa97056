"""First groups of the hierarchical policy: units that are likely to run on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray
from graphs.transforms.coarsen import to_size


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
