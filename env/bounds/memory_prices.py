"""Prices of time and memory: the dual of spreading work over devices, fractionally, where it must fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import distinct_rows
from graphs.opgraph import FloatArray, IntArray

MOST_COLUMNS = 6_000  # of a linear programme, solved in a tenth of a second
_ROUNDS = 3  # programmes of many units: the first of joined ones, the others of those in doubt under its prices
_CLOSE = 1e-9  # relative, of a bound to the best


@dataclass(frozen=True)
class Prices:
    """``time`` and ``memory``, float64 [K], per second and byte of each class, and the seconds they prove."""

    value_s: float
    time: FloatArray
    memory: FloatArray


@dataclass(frozen=True)
class Programme:
    """The least T of G units on K classes of devices: sum_u t_ud x_ud <= T and sum_u kept_u x_ud <= capacity_d.

    Its dual: with a price y_d >= 0 for a second of device d, sum y_d = 1, and z_d >= 0 for one of its bytes, the loads
    L_d <= T and kept bytes M_d <= capacity_d of any placement that fits obey
    T >= sum y_d L_d + sum z_d (M_d - capacity_d), which is at least what each unit costs where it costs least, in all,
    less sum z_d capacity_d. Any prices give a bound.

    Attributes:
        seconds: float64 [G, K], infinite where not allowed.
        kept: float64 [G], of all bytes.
        size: float64 [K], devices in each class.
        capacity: float64 [K], of one device, in the unit of ``kept``.
        one_by_one: the units take turns whatever their devices, as on a path: sum_d L_d <= T, and all y_d are 1.
    """

    seconds: FloatArray
    kept: FloatArray
    size: FloatArray
    capacity: FloatArray
    one_by_one: bool

    def best(self) -> Prices:
        """The best prices of up to some 6000 / K units, and good ones of more; of value 0 if none were found.

        Where there are more, units are joined that allow the same classes and have like speeds and bytes, or in later
        rounds that cost least on the same class by far.
        """
        most = max(MOST_COLUMNS // len(self.size), 1)
        best = Prices(0.0, self._any_time_prices(), np.zeros(len(self.size)))
        count = len(self.kept)
        label = np.arange(count) if count <= most else self._alike(most)
        for _ in range(_ROUNDS):
            joined = int(label.max(initial=0)) + 1 < count
            found = (self._joined(label) if joined else self)._solved()
            if found is None:
                break
            least_s, y, z = found
            value_s = self._value(y, z)
            if value_s > best.value_s:
                best = Prices(value_s, y, z)
            if not joined or value_s >= least_s * (1 - _CLOSE):
                break
            label = self._in_doubt(y, z, most)
        return best

    def _any_time_prices(self) -> FloatArray:
        return np.ones(len(self.size)) if self.one_by_one else np.full(len(self.size), 1.0 / self.size.sum())

    def _costs(self, y: FloatArray, z: FloatArray) -> FloatArray:
        allowed = np.isfinite(self.seconds)
        return np.where(allowed, np.where(allowed, self.seconds, 0.0) * y + self.kept[:, None] * z, np.inf)

    def _value(self, y: FloatArray, z: FloatArray) -> float:
        cheapest = float(self._costs(y, z).min(axis=1).sum())
        paid = float((z * self.capacity * self.size).sum())
        return cheapest - paid - 4 * len(self.kept) * np.finfo(np.float64).eps * (cheapest + paid)

    def _joined(self, label: IntArray) -> Programme:
        rows = int(label.max()) + 1
        seconds: FloatArray = np.column_stack([np.bincount(label, column, rows) for column in self.seconds.T])
        kept = np.bincount(label, self.kept, rows).astype(np.float64)
        return replace(self, seconds=seconds, kept=kept)

    def _alike(self, most: int) -> IntArray:
        """int64 [G]: labels of units that allow the same classes and have like speeds and bytes per second."""
        allowed = np.isfinite(self.seconds)
        kind = _kinds(allowed)
        tiny = 1e-12 * float(self.seconds[allowed].max(initial=0.0)) or 1.0
        logs = np.log(np.where(allowed, self.seconds, 0.0) + tiny)
        mean = (logs * allowed).sum(axis=1) / allowed.sum(axis=1)
        speeds = np.where(allowed, logs - mean[:, None], 0.0)
        speed = speeds[:, speeds.var(axis=0).argmax()]
        stratum = np.argsort(np.argsort(speed, kind="stable")) * int(np.sqrt(most)) // len(speed)
        return _runs(np.lexsort((np.log(self.kept + 1e-12) - mean, stratum, kind)), kind, most)

    def _in_doubt(self, y: FloatArray, z: FloatArray, most: int) -> IntArray:
        """int64 [G]: labels; a unit that costs nearly the same on two classes stays alone, others are joined."""
        costs = self._costs(y, z)
        cheapest = np.partition(costs, 1, axis=1)[:, :2] if len(y) > 1 else np.zeros((len(costs), 2))
        with np.errstate(invalid="ignore"):
            regret = (cheapest[:, 1] - cheapest[:, 0]) / np.maximum(cheapest[:, 0], 1e-300)
        order = np.argsort(regret, kind="stable")
        alone, rest = order[: most // 2], order[most // 2 :]
        label = np.empty(len(costs), dtype=np.int64)
        label[alone] = np.arange(len(alone))
        kind = _kinds(
            np.column_stack([np.isfinite(costs[rest]), costs[rest].argmin(axis=1)[:, None] == np.arange(len(y))])
        )
        label[rest] = len(alone) + _runs(np.lexsort((regret[rest], kind)), kind, most - len(alone))
        return label

    def _solved(self) -> tuple[float, FloatArray, FloatArray] | None:
        """Least T and its prices, by HiGHS, in units in which sums are about 1; None if there is no T."""
        import highspy

        row, column = np.nonzero(np.isfinite(self.seconds))
        entries, (g, k) = len(row), self.seconds.shape
        share = np.ones(1) if self.one_by_one else self.size
        loads = len(share)
        unit_s = float(self.seconds.min(axis=1).sum()) or 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = entries + 1, loads + k + g
        lp.col_cost_ = np.append(np.zeros(entries), 1.0)
        lp.col_lower_, lp.col_upper_ = np.zeros(entries + 1), np.full(entries + 1, np.inf)
        lp.row_lower_ = np.concatenate([np.full(loads + k, -np.inf), np.ones(g)])
        lp.row_upper_ = np.concatenate([np.zeros(loads), self.capacity * self.size, np.ones(g)])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.append(3 * np.arange(entries + 1), 3 * entries + loads)
        index = np.column_stack([np.minimum(column, loads - 1), loads + column, loads + k + row])
        lp.a_matrix_.index_ = np.concatenate([index.ravel(), np.arange(loads)])
        value = np.column_stack([self.seconds[row, column] / unit_s, self.kept[row], np.ones(entries)])
        lp.a_matrix_.value_ = np.concatenate([value.ravel(), -share])
        solver = highspy.Highs()
        for name, setting in (("output_flag", False), ("threads", 1), ("parallel", "off")):
            solver.setOptionValue(name, setting)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        dual = np.maximum(-np.array(solver.getSolution().row_dual)[: loads + k], 0.0)
        weight = float((dual[:loads] * share).sum())
        if not weight > 0:
            return None
        y = np.ones(k) if self.one_by_one else dual[:k] / weight
        return solver.getObjectiveValue() * unit_s, y, dual[loads:] * unit_s / weight


def _kinds(rows: NDArray[np.bool_]) -> IntArray:
    """int64 [G]: a number for each distinct row."""
    return distinct_rows(rows)[1]


def _runs(order: IntArray, kind: IntArray, most: int) -> IntArray:
    """int64 [G]: labels of about ``most`` runs of equal length along an order, each of one kind."""
    begins = np.arange(len(order)) % -(-len(order) // most) == 0
    begins[1:] |= kind[order][1:] != kind[order][:-1]
    label = np.empty(len(order), dtype=np.int64)
    label[order] = np.cumsum(begins) - 1
    return label
