"""Dynamic programming over ideals: the best contiguous split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baselines import prices
from baselines.meter import OutOfTimeError, charge
from baselines.pipelines.atoms import Atoms
from baselines.pipelines.chains import Lattice, OverBudgetError, Visits, best_chain, ideals, largest_cost_s, no_chain
from baselines.pipelines.contraction import Quotient, without_light_parts
from baselines.pipelines.dp_linear import (
    MemoryOf,
    Order,
    affordable,
    chain_plan,
    cuts,
    least_loaded,
    linear_orders,
    views,
    within_memory,
)
from env.plan import Plan
from env.problem import Problem

_MOST_IDEALS, _MOST_COARSE_IDEALS = 2**18, 2**16
_MOST_VISITS = 2**25  # slices looked at in all, a few seconds
_EXACT_PART, _COARSE_PART = 1 / 2, 1 / 16  # of the slices left, what one graph may take
_LIGHT = (*(2.0**-k for k in range(4, 11)), 0.0)  # parts of a device's share of the work; coarse graphs come first
_LOOKED_AT = (
    "there are too many contiguous splits to look at, so cuts were looked for in two linear orders only",
    "there are too many contiguous splits to look at, so cuts were looked for between {} parts of the graph only",
)


@dataclass(frozen=True, eq=False)
class SplitLevel:
    """A graph to be split, coarse or not: its atoms, once per view, and all its ideals."""

    views: list[Atoms]
    lattice: Lattice


def dp_contiguous(problem: Problem, seed: int) -> Plan:
    """The contiguous split whose largest load is least: dynamic programming over ideals.

    Source: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020
    (arXiv:2006.16423), section 5.1. A split is contiguous if its devices can be put in a row so that no tensor goes
    back; every prefix of the row then holds a downward-closed set of ops, an ideal. For every ideal and every number
    of devices used of each class of interchangeable ones, the least largest load follows from those of smaller
    ideals. `baselines.pipelines.contraction.contract` says what is kept together and how training graphs are
    contiguous.

    The split is exact for blocking communication where all routes into a class cost the same (as in the paper;
    unlike kinds of devices, pins and memory included). A slice then costs what `env.simulation.loads` says, whatever
    the rest of the split. Overlapped, it costs the largest of its computing, of receiving each outside tensor once, and
    of sending once each tensor that is needed elsewhere. That is exact with two devices, and with one exclusive link to
    and from every device where no tensor is needed on three. It is too low where a device sends a tensor to several
    others or links are shared, and too high where a device has several links. Where routes are unlike, transfers are
    costed twice, by the mean and by the fastest routes of a class; the better split counts, and its slices are swapped
    between the devices of a class. Memory is exact where it is kept bytes only, as in the paper; what lasts for part
    of a step is charged as in `place_within_memory`.

    The best cuts of two linear orders (`baselines.pipelines.dp_linear`) are upper bounds to begin with, then those of
    ever finer graphs, in which parts with little work are joined to what follows them, and last that of the graph
    itself. Only slices that cost less than the best split so far are looked at. Where there are more than 262,144
    ideals or, altogether, more than 33 million slices to look at, the best split so far is returned, and its note says
    so. So it is never worse than `dp_linear`. O(I S) memory and O(slices * (tensors of an op + S C)) time for I ideals,
    S states and C classes.

    Raises:
        InfeasibleError: no contiguous split fits into memory and respects the pins.
    """
    orders = linear_orders(problem)
    rows = [views(problem, quotient) for quotient in orders]
    levels, visits = _levels(problem, orders[0]), Visits(_MOST_VISITS)

    def build(memory_of: MemoryOf) -> Plan:
        found: list[Plan] = []
        for view in range(len(rows[0])):
            found += _splits([row[view] for row in rows], levels, view, memory_of, visits)
        if not found:
            raise no_chain(rows[0][0].atoms, memory_of(rows[0][0].atoms))
        return least_loaded(problem, found)

    return within_memory(problem, build)


def _splits(
    orders: Sequence[Order], levels: Sequence[SplitLevel], view: int, memory_of: MemoryOf, visits: Visits
) -> list[Plan]:
    """The best cuts of the linear orders and the best split of the finest level, if it is better than these."""
    chains = [cut for order in orders for cut in cuts(order, memory_of)]
    limit_s = min((chain.value_s for _, chain in chains), default=largest_cost_s(orders[0].atoms))
    finest, better, gave_up = 0, None, False
    for level in levels:
        atoms = level.views[view]
        exact = atoms.count == orders[0].atoms.count
        if gave_up and not exact:
            continue
        part = _EXACT_PART if exact else _COARSE_PART
        try:
            chain = best_chain(atoms, level.lattice, memory_of(atoms), affordable(atoms), limit_s, visits, part)
        except OverBudgetError:
            gave_up = True
            continue
        except OutOfTimeError:
            if not chains:
                raise
            break
        finest = atoms.count
        if chain:
            limit_s, better = chain.value_s, (atoms, chain)
    note = () if finest == orders[0].atoms.count else (_LOOKED_AT[finest > 0].format(finest),)
    return [chain_plan(*found, *note) for found in (*chains, better) if found]


def _levels(problem: Problem, quotient: Quotient) -> list[SplitLevel]:
    """An ordered quotient, coarse versions of it first, those whose ideals are not too many."""
    share_s = float(problem.mean_op_s.sum()) / problem.cluster.n_devices
    result: list[SplitLevel] = []
    for part in _LIGHT:
        coarse = without_light_parts(problem, quotient, part * share_s) if part else quotient
        if result and coarse.count == result[-1].views[0].count:
            continue
        atoms = [order.atoms for order in views(problem, coarse)]
        most = _MOST_COARSE_IDEALS if part else _MOST_IDEALS
        lattice = ideals(atoms[0], most)
        charge(prices.IDEAL_S * (most if lattice is None else lattice.count))
        if lattice is not None:
            result.append(SplitLevel(atoms, lattice))
    return result
