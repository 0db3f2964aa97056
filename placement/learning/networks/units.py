"""`UnitView`: a problem as the networks see it, a row for every unit of placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from env.gym.op_features import OpFeatures
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray, Phase

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
