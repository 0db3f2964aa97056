"""The mixed-integer programme of the objective throughput, as arrays for HiGHS (see `baselines.exact.milp`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from baselines.exact.milp_transfers import DEVICE, MilpRows, Terms, Transfers, nets_of
from baselines.exact.symmetry import canonical, interchangeable, unit_sequence
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.opgraph import FloatArray, IntArray

# HiGHS' tolerances are absolute, 1e-6: in these units far below any difference between two placements.
_LOAD_SCALE = 10_000.0  # the value of the placement to start from
_MEMORY_SCALE = 1000.0  # the memory of a device


@dataclass(frozen=True, eq=False)
class MilpModel:
    """Minimise a column where ``0 <= x <= upper`` and ``row_lower <= A x <= row_upper`` (c columns, r rows).

    Attributes:
        problem: what it is a model of.
        unit_column: int64 [U, D], the column that says that a unit runs on a device, -1 where it does not.
        load_column: the column of the largest load, which is to be minimised.
        scale: units of load per second.
        upper: float64 [c].
        whole: bool [c], which columns are integers.
        row_lower, row_upper: float64 [r].
        row_ptr: int64 [r + 1]; column: int64 and value: float64: A by rows, CSR.
        warm: float64 [c], the placement to start from as a solution.
    """

    problem: Problem
    unit_column: IntArray
    load_column: int
    scale: float
    upper: FloatArray
    whole: BoolArray
    row_lower: FloatArray
    row_upper: FloatArray
    row_ptr: IntArray
    column: IntArray
    value: FloatArray
    warm: FloatArray

    def device(self, solution: FloatArray) -> IntArray:
        """int64 [n]: the placement that a solution, float64 [c], stands for."""
        chosen = np.where(self.unit_column >= 0, solution[self.unit_column], -1.0)
        best: IntArray = chosen.argmax(axis=1)
        return best[self.problem.unit_of]

    def without(self, device: IntArray) -> MilpModel:
        """The model but for one placement, int64 [n], which it does not know to be too large."""
        column = self.unit_column[self.problem.unit_of, device]
        column = np.unique(column[column >= 0])
        return replace(
            self,
            row_lower=np.append(self.row_lower, -np.inf),
            row_upper=np.append(self.row_upper, len(self.unit_column) - 1.0),
            row_ptr=np.append(self.row_ptr, len(self.column) + len(column)),
            column=np.concatenate([self.column, column]),
            value=np.concatenate([self.value, np.ones(len(column))]),
        )


def build_model(problem: Problem, start: IntArray, limit_s: float) -> MilpModel:
    """The model of a problem around a placement.

    Args:
        problem: any.
        start: int64 [n], a feasible placement.
        limit_s: only placements of at most this value are of interest: devices on which a single unit takes longer are
            left out. At least the value of ``start``, if that is a solution of the model.

    O(U D + r) for r rows: for a tensor of one consumer one for each device and link, else up to D (D + consumers).
    """
    return _Builder(problem, start, limit_s).build()


class _Builder:
    """Writes a model; `build_model` says what its arguments are."""

    def __init__(self, problem: Problem, start: IntArray, limit_s: float) -> None:
        self._problem, self._units, self._rows = problem, Units.of(problem), MilpRows()
        self._alike = interchangeable(problem)
        self._start = canonical(self._units, start, self._alike)[self._units.first_op]
        self._value_s = loads(problem, Plan(start)).value_s
        self._scale = _LOAD_SCALE / self._value_s if self._value_s > 0 else 1.0
        useful = self._units.allowed & (self._units.op_s <= limit_s * (1 + 1e-9))
        self._x = self._unit_columns(useful)
        self._transfers = Transfers(problem, self._rows, self._x, self._start)

    def build(self) -> MilpModel:
        for net in nets_of(self._problem):
            self._transfers.add(net)
        load = self._limits()
        self._break_symmetry()
        rows = self._rows
        whole = np.zeros(len(rows.warm), dtype=np.bool_)
        whole[self._x[self._x >= 0]] = True
        return MilpModel(
            problem=self._problem,
            unit_column=self._x,
            load_column=load,
            scale=self._scale,
            upper=np.array(rows.upper),
            whole=whole,
            row_lower=np.array(rows.row_lower),
            row_upper=np.array(rows.row_upper),
            row_ptr=np.array(rows.row_ptr, dtype=np.int64),
            column=np.array(rows.column, dtype=np.int64),
            value=np.array(rows.value),
            warm=np.array(rows.warm),
        )

    def _unit_columns(self, useful: BoolArray) -> IntArray:
        """One column for each unit and useful device, bool [U, D]; each unit runs somewhere."""
        x = np.full(useful.shape, -1, dtype=np.int64)
        for u, d in np.argwhere(useful).tolist():
            x[u, d] = self._rows.add_column(self._start[u] == d)
        for row in x:
            self._rows.add([(int(column), 1.0) for column in row[row >= 0]], lower=1.0, upper=1.0)
        return x

    # -- limits ---------------------------------------------------------------------------------------------------

    def _limits(self) -> int:
        """No device or link is busy for longer than the largest load, the column returned; memory suffices."""
        load = self._rows.add_column(self._value_s * self._scale, upper=np.inf)  # HiGHS is slower with a limit here
        busy = {(DEVICE, d): self._computing(d) for d in range(self._problem.cluster.n_devices)}
        for resource, terms in self._transfers.load.items():
            busy.setdefault(resource, []).extend(terms)
        for terms in busy.values():
            if terms:
                spent = [(column, -seconds * self._scale) for column, seconds in terms]
                self._rows.add([(load, 1.0)], spent, lower=0.0)
        units = self._units
        is_tight = units.kept_bytes.sum() + units.working_bytes.max() > self._problem.capacity_bytes
        for owner in np.unique(self._problem.memory_owner[is_tight]).tolist():
            self._memory(owner)
        return load

    def _computing(self, device: int) -> Terms:
        users = np.flatnonzero(self._x[:, device] >= 0)
        return [(int(self._x[u, device]), float(self._units.op_s[u, device])) for u in users]

    def _memory(self, owner: int) -> None:
        """Kept bytes and the largest working set fit: what every order of work needs at least (docs/score.md)."""
        units, rows = self._units, self._rows
        capacity, there = int(self._problem.capacity_bytes[owner]), self._problem.memory_owner == owner
        scale = _MEMORY_SCALE / max(capacity, 1)
        kept, working_set = units.kept_bytes * scale, units.working_bytes * scale
        users = [(u, d) for u, d in np.argwhere((self._x >= 0) & there).tolist()]
        held = [(int(self._x[u, d]), float(kept[u])) for u, d in users]
        working = rows.add_column(working_set[there[self._start]].max(initial=0.0), upper=np.inf)
        for u, d in users:
            if working_set[u] > 0:
                rows.add([(working, 1.0), (int(self._x[u, d]), -float(working_set[u]))], lower=0.0)
        rows.add(held, [(working, 1.0)], upper=capacity * scale)

    def _break_symmetry(self) -> None:
        """Equal devices are opened in order: the i-th longest unit runs on one of the first i of them.

        The few columns this fixes help more than a full ordering, which keeps HiGHS from using the symmetry itself.
        """
        for members in self._alike:
            for i, unit in enumerate(unit_sequence(self._units)[: len(members)].tolist()):
                for column, _ in self._transfers.on(unit, members[i + 1 :]):
                    self._rows.upper[column] = 0.0
