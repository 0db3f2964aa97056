"""m-SCT: a device awaits the favourite child of its last op, which a linear programme names; within memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.list_schedulers.estimate import (
    Scheduler,
    place_as_estimated,
    rank_order,
    start_earliest,
)
from baselines.meter import charge
from baselines.paths import importance, upward_rank
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.units import Units
from graphs.arrays import pointers
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from highspy import HighsLp

MOST_ARCS = 10_000  # about 3 s of linear programme; more is not worth its time
_TIE = 1e-3  # weight of all waiting beside the makespan
_ROUNDING = 1e-6  # by which the solver may miss a corner

Entries = tuple[IntArray, IntArray, FloatArray]


@dataclass(frozen=True, eq=False)
class Arcs:
    """Pairs of ops of which one follows the other, each once (a arcs, each array [a]).

    Attributes:
        producer, consumer: int64, ops.
        transfer_s: float64, mean seconds of the slowest tensor between them; 0 inside a colocation group.
        apart: bool, no device may run both.
    """

    producer: IntArray
    consumer: IntArray
    transfer_s: FloatArray
    apart: BoolArray

    @property
    def costly(self) -> BoolArray:
        """bool [a]: where running both ends on one device saves time."""
        return (self.transfer_s > 0) & ~self.apart


def m_sct(problem: Problem, seed: int) -> Plan:
    """m-ETF, but a device rather awaits its last op's favourite child than starts something else.

    Sources: C. Hanen, A. Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small
    communication delays", Discrete Applied Mathematics 108(3), 2001; with memory: B. Jeon, L. Cai, P. Srivastava et
    al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020 (doi:10.1145/3419111.3421302).
    As in the latter, a free device whose last op's favourite child has all its inputs computed, and could start nowhere
    sooner, starts only that child or an urgent op, one whose inputs have arrived everywhere. An urgent op that another
    device can start as soon goes there. All else is as in `baselines.list_schedulers.m_etf`. The proven factor is for
    equal devices, transfers shorter than ops and no limit of memory; without these it is a heuristic. O(e D + n D (log
    n + D)) after the linear programme of `relaxation`, with room for 5 n D numbers.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    return place_as_estimated(problem, scheduler)


def scheduler(units: Units) -> Scheduler:
    """SCT itself, for any account of memory."""
    op_of = rank_order(units.problem, upward_rank(units.problem))
    favourite = favourite_children(units.problem)
    return lambda allowance: start_earliest(units, op_of, allowance, favourite)


def arcs(problem: Problem) -> Arcs:
    """The arcs of a problem's graph, by producer and consumer."""
    producer, consumer, tensor = problem.graph.edge_list
    pair, which = np.unique(producer * problem.graph.n_ops + consumer, return_inverse=True)
    transfer_s = np.zeros(len(pair))
    np.maximum.at(transfer_s, which.reshape(-1), problem.mean_transfer_s[tensor])
    producer, consumer = np.divmod(pair, problem.graph.n_ops)
    together = problem.unit_of[producer] == problem.unit_of[consumer]
    apart = np.logical_not(np.any(problem.allowed[producer] & problem.allowed[consumer], axis=1))
    return Arcs(producer, consumer, np.where(together, 0.0, transfer_s), apart)


def favourite_children(problem: Problem) -> IntArray:
    """int64 [n]: the consumer that should run where each op ran, without a transfer, or -1; no op is named twice.

    These are the arcs of which the linear programme keeps less than half; no two arcs of one op can be. With more than
    `MOST_ARCS` costly arcs there is no linear programme, and arcs become favourites one by one, those on the longest
    paths first, as long as neither end has one: a greedy choice without the proven factor, in O(n + e log e).
    """
    found = arcs(problem)
    greedy = int(found.costly.sum()) > MOST_ARCS
    share = np.zeros(len(found.producer)) if greedy else relaxation(problem, found)[0]
    wanted = np.flatnonzero(found.costly & (share < 0.5 - _ROUNDING))
    after_s = upward_rank(problem)
    until_s = importance(problem) - after_s + problem.mean_op_s
    length_s = until_s[found.producer] + found.transfer_s + after_s[found.consumer]
    result, parent = np.full((2, problem.graph.n_ops), -1, dtype=np.int64)
    for arc in wanted[np.argsort(-length_s[wanted], kind="stable")].tolist():
        producer, consumer = found.producer[arc], found.consumer[arc]
        if result[producer] < 0 and parent[consumer] < 0:
            result[producer], parent[consumer] = consumer, producer
    return result


def relaxation(problem: Problem, found: Arcs) -> tuple[FloatArray, float]:
    """The share of each arc's transfer that is waited for, float64 [a], and the seconds of the step that this allows.

    Minimise the makespan w over starts s and shares x in [0, 1], with mean times and as many devices as it takes:
    s_i + p_i + c_ij x_ij <= s_j for every arc, s_i + p_i <= w for every op without consumers, and at most one whole arc
    saved per producer and per consumer, the sum over its arcs of 1 - x being at most 1. That leaves open what is off
    the critical paths, so all waiting together counts for a thousandth beside w, and as much as can be is saved.

    Free arcs have no share, nor have those whose ends must be apart, so with k costly arcs out of a there are
    k + n + 1 variables, at most a + 3 n rows and 2 a + 3 k + 2 n entries, all sparse. Solved by the interior points of
    HiGHS and crossed over to a corner, in a third of a millisecond per arc.
    """
    import highspy

    model, unit_s = _model(problem, found)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("solver", "ipm")  # its time grows evenly; that of the simplex method now and then explodes
    solver.setOptionValue("parallel", "off")
    solver.passModel(model)
    charge(prices.RELAXATION_S * int(found.costly.sum()))
    solver.run()
    values = np.array(solver.getSolution().col_value)
    share = found.apart.astype(np.float64)
    share[found.costly] = values[: int(found.costly.sum())]
    return share, float(values[-1] * unit_s)


def _model(problem: Problem, found: Arcs) -> tuple[HighsLp, float]:
    """The linear programme over x [k costly arcs], s [n] and w, and the seconds its unit of time stands for."""
    import highspy

    n, costly = problem.graph.n_ops, np.flatnonzero(found.costly)
    k, arc = len(costly), np.arange(len(found.producer))
    unit_s = float(np.concatenate([problem.mean_op_s, found.transfer_s]).mean()) or 1.0  # HiGHS's tolerance is absolute
    op, transfer = problem.mean_op_s / unit_s, found.transfer_s / unit_s
    last = np.flatnonzero(np.bincount(found.producer, minlength=n) == 0)
    end = np.arange(len(last))
    blocks: list[tuple[FloatArray, list[Entries]]] = [
        (
            op[found.producer] + np.where(found.apart, transfer, 0.0),
            [
                (arc, k + found.consumer, np.ones(len(arc))),
                (arc, k + found.producer, -np.ones(len(arc))),
                (costly, np.arange(k), -transfer[costly]),
            ],
        ),
        (op[last], [(end, np.full(len(end), k + n), np.ones(len(end))), (end, k + last, -np.ones(len(end)))]),
    ]
    for side in (found.producer[costly], found.consumer[costly]):
        _, which, count = np.unique(side, return_inverse=True, return_counts=True)
        blocks.append((count.astype(np.float64) - 1, [(which.reshape(-1), np.arange(k), np.ones(k))]))
    lower, start, index, value = _stacked(blocks)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = k + n + 1, len(lower)
    waiting = transfer[costly] * (_TIE * upward_rank(problem).max() / unit_s / (transfer[costly].sum() or 1.0))
    model.col_cost_ = np.concatenate([waiting, np.zeros(n), [1.0]])
    model.col_lower_ = np.zeros(k + n + 1)
    model.col_upper_ = np.concatenate([np.ones(k), np.full(n + 1, np.inf)])
    model.row_lower_, model.row_upper_ = lower, np.full(len(lower), np.inf)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = start, index, value
    return model, unit_s


def _stacked(blocks: list[tuple[FloatArray, list[Entries]]]) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
    """Blocks of rows, each (lower bounds, entries (row, column, value)), as one matrix by rows.

    Returns:
        lower bounds [r], starts of the rows [r + 1], columns and values of the entries.
    """
    first = np.cumsum([0] + [len(lower) for lower, _ in blocks])
    row = np.concatenate([r + at for (_, entries), at in zip(blocks, first, strict=False) for r, _, _ in entries])
    column = np.concatenate([c for _, entries in blocks for _, c, _ in entries])
    value = np.concatenate([v for _, entries in blocks for _, _, v in entries])
    by_row = np.argsort(row, kind="stable")
    start = pointers(row, int(first[-1]))
    return np.concatenate([lower for lower, _ in blocks]), start, column[by_row], value[by_row]
