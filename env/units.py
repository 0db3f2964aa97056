"""`Units`: the units of placement of a problem (colocation groups and free ops, or larger ones) as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Units:
    """Totals of the ops of each unit, which go to one device together (U units, n ops, D devices).

    Attributes:
        problem: graph and cluster.
        unit_of: int64 [n], unit of each op, 0 to U - 1.
    """

    problem: Problem
    unit_of: IntArray

    @staticmethod
    def of(problem: Problem) -> Units:
        """The smallest units, those of `Problem.units`."""
        return Units(problem, problem.unit_of)

    def grouped(self, group_of: IntArray) -> Units:
        """Groups of these units, int64 [U] from 0 without gaps, in the place of units."""
        return Units(self.problem, group_of[self.unit_of])

    @cached_property
    def n_units(self) -> int:
        return int(self.unit_of.max(initial=-1)) + 1

    @cached_property
    def ptr(self) -> IntArray:
        """int64 [U + 1]: the ops of unit u are ``members[ptr[u]:ptr[u + 1]]``, increasing."""
        sizes = np.bincount(self.unit_of, minlength=self.n_units)
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def members(self) -> IntArray:
        """int64 [n]: ops by unit."""
        return np.argsort(self.unit_of, kind="stable").astype(np.int64)

    @cached_property
    def size(self) -> IntArray:
        """int64 [U]: ops of each unit."""
        return np.diff(self.ptr)

    @cached_property
    def first_op(self) -> IntArray:
        """int64 [U]: the lowest op of each unit."""
        return self.members[self.ptr[:-1]]

    @cached_property
    def label(self) -> tuple[str, ...]:
        """U names: that of each unit's first op."""
        return tuple(self.problem.graph.op_names[i] for i in self.first_op.tolist())

    @cached_property
    def allowed(self) -> BoolArray:
        """bool [U, D]: devices on which all ops of a unit may run."""
        return np.logical_and.reduceat(self.problem.allowed[self.members], self.ptr[:-1], axis=0)

    @cached_property
    def op_s(self) -> FloatArray:
        """float64 [U, D]: seconds of all ops of each unit on each device."""
        return np.add.reduceat(self.problem.op_s[self.members], self.ptr[:-1], axis=0)

    @cached_property
    def kept_bytes(self) -> IntArray:
        """int64 [U]: bytes each unit keeps for the whole step."""
        return np.add.reduceat(self.problem.graph.kept_bytes[self.members], self.ptr[:-1])

    @cached_property
    def working_bytes(self) -> IntArray:
        """int64 [U]: inputs, outputs and workspace of the largest op of each unit, all there while it runs."""
        return np.maximum.reduceat(self.problem.working_bytes[self.members], self.ptr[:-1])

    @cached_property
    def topological_order(self) -> IntArray:
        """int64 [U]: units by their first op in the graph's topological order."""
        position = self.problem.graph.topological_position
        return np.argsort(np.minimum.reduceat(position[self.members], self.ptr[:-1]), kind="stable").astype(np.int64)

    def largest(self, per_op: FloatArray) -> FloatArray:
        """float64 [U]: the largest value, float64 [n], among the ops of each unit."""
        return np.maximum.reduceat(per_op[self.members], self.ptr[:-1])

    def components_first(self, order: IntArray) -> IntArray:
        """The same order of units, but colocation groups of several ops before free ops (Mayer et al. 2017)."""
        return order[np.argsort(self.size[order] == 1, kind="stable")]
