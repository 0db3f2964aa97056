"""`Units`: the units of placement of a problem (colocation groups and free ops) as arrays."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from env.problem import Problem
from env.unit_totals import UnitTotals
from graphs.opgraph import IntArray


class Units(UnitTotals):
    """What a heuristic must know of every unit of `Problem.groups` (U units, n ops, D devices)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, problem.group_of)

    @property
    def count(self) -> int:
        return self.n_units

    @cached_property
    def size(self) -> IntArray:
        """int64 [U]: ops of each unit."""
        return np.diff(self.ptr)

    @cached_property
    def label(self) -> tuple[str, ...]:
        """U names: that of each unit's first op."""
        return tuple(self.problem.graph.op_names[i] for i in self.first_op.tolist())

    def components_first(self, order: IntArray) -> IntArray:
        """The same order of units, but colocation groups of several ops before free ops (Mayer et al. 2017)."""
        return order[np.argsort(self.size[order] == 1, kind="stable")]
