"""Dynamic programming over one linear order: the best cut of a row of ops into one run per device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from baselines.memory import Allowance, place_within_memory
from baselines.pipelines.atoms import Atoms, Classes, atoms_of
from baselines.pipelines.chains import (
    Memory,
    SliceChain,
    arranged,
    best_chain,
    charged,
    largest_cost_s,
    no_chain,
    shares,
)
from baselines.pipelines.contraction import Quotient, contract, linear_order, renumbered, segments, without_idle_ends
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.opgraph import IntArray

_MOST_ATOMS = 4096  # in longer rows cuts are looked for between runs of ops only
_MOST_STATES = 1024  # combinations of devices
_RUNS = 256  # into which a row is cut to begin with

MemoryOf = Callable[[Atoms], Memory]


def dp_linear(problem: Problem, seed: int) -> Plan:
    """The cut of a linear order of the ops into one run per device whose largest load is least.

    Source: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020
    (arXiv:2006.16423), section 5.1, "DPL": for every prefix of one depth-first order and every number of devices used
    of each class of interchangeable ones, the least largest load follows from those of shorter prefixes. Here it is the
    better of two orders, depth first and that of the graph. `baselines.pipelines.contraction.contract` says what is
    kept together and how training graphs are contiguous.

    A run's cost is exact for blocking communication where all routes into a class cost the same (as in the paper;
    unlike kinds of devices, pins and memory included), whatever the rest of the cut.
    Overlapped, it is the largest of its computing, of receiving each outside tensor once, and of sending once each
    tensor that is needed elsewhere. That is exact with two devices, and with one exclusive link to and from every
    device where no tensor is needed on three. It is too low where a device sends a tensor to several others or links
    are shared, and too high where a device has several links. Where routes are unlike, transfers are costed twice, by
    the mean and by the fastest routes of a class; the better cut counts, and its runs are swapped between the devices
    of a class. Memory is exact where it is kept bytes only, as in the paper; what lasts for part of a step is charged
    as in `place_within_memory`.

    Rows of more than 256 parts are first cut between 256 runs of them, and only slices that cost less than that are
    looked at then. Where a slice's cost is not exact, the runs are also cut for half the devices, a quarter and so on
    down to one, and the plan whose largest load really is least is taken. O(N^2 (S C + e / N)) at worst for N parts, C
    classes of equal devices and S combinations of them.

    More than 4,096 parts are first joined to as many runs of consecutive ones. Where devices are so unlike that there
    are more than 1,024 combinations of them, the slowest are left out. The plan's note says so.

    Raises:
        InfeasibleError: no cut of either order fits into memory and respects the pins.
    """
    orders = [order for quotient in linear_orders(problem) for order in views(problem, quotient)]
    units = Units.of(problem)

    def build(allowance: Allowance) -> Plan:
        def memory_of(atoms: Atoms) -> Memory:
            return charged(atoms, units, allowance)

        found = [_chain_plan(*cut) for order in orders for cut in cuts(order, memory_of)]
        if not found:
            raise no_chain(orders[0].atoms, memory_of(orders[0].atoms))
        return min(found, key=lambda plan: loads(problem, plan).value_s)

    return place_within_memory(units, build)


@dataclass(frozen=True, eq=False)
class Order:
    """Atoms in a linear order, and runs of them where they are many: cutting these is quick and bounds the rest."""

    atoms: Atoms
    runs: Atoms

    def costed_by(self, classes: Classes) -> Order:
        """The same with other transfer times."""
        atoms = replace(self.atoms, classes=classes)
        return Order(atoms, atoms if self.runs is self.atoms else replace(self.runs, classes=classes))


def linear_orders(problem: Problem) -> tuple[Quotient, Quotient]:
    """The parts of a problem, depth first and in the order of the graph, coarse enough to be cut."""
    quotient = contract(problem)
    quotient = without_idle_ends(problem, quotient, _memory_binds(problem))
    both = (renumbered(quotient, linear_order(problem, quotient, depth_first)) for depth_first in (True, False))
    first, second = (segments(problem, q, _MOST_ATOMS) if q.count > _MOST_ATOMS else q for q in both)
    return first, second


def _memory_binds(problem: Problem) -> bool:
    """True if the whole graph is too large for the smallest device."""
    graph = problem.graph
    total = graph.kept_bytes.sum() + graph.transfer_bytes.sum() + graph.workspace_bytes.max()
    return bool(total > problem.capacity_bytes.min())


def views(problem: Problem, quotient: Quotient) -> list[Order]:
    """A linear order; where routes are unlike, once with the mean and once with the nearest transfer times."""
    mean = Classes(problem)
    runs = segments(problem, quotient, _RUNS) if quotient.count > _RUNS else quotient
    atoms = atoms_of(quotient, mean)
    order = Order(atoms, atoms if runs is quotient else atoms_of(runs, mean))
    return [order] if mean.are_alike else [order, order.costed_by(Classes(problem, nearest=True))]


def cuts(order: Order, memory_of: MemoryOf) -> list[tuple[Atoms, SliceChain]]:
    """The best cut of an order; where a slice's cost is not exact, also of its runs for half the devices and so on.

    Fewer devices may do better than it seems, since shared links and several receivers are not seen by a slice.
    """
    if np.isinf(order.atoms.least_s).any():
        return []
    count = _affordable(order.atoms)
    rough = best_chain(order.runs, memory_of(order.runs), count, largest_cost_s(order.atoms))
    found = [(order.runs, rough)] if rough else []
    if order.runs is not order.atoms:
        limit_s = rough.value_s if rough else largest_cost_s(order.atoms)
        exact = best_chain(order.atoms, memory_of(order.atoms), count, limit_s)
        if exact:
            found = [(order.atoms, exact)]
        elif rough:  # the cut of the runs is proved best for all ops
            found = [(replace(order.runs, notes=order.atoms.notes), rough)]
    while found and len(found[-1][1].slices) > 1 and not order.atoms.classes.are_exact:
        fewer = -(-count // 2)
        count = fewer if (fewer < count).any() else np.eye(len(count), dtype=np.int64)[shares(order.runs).argmax()]
        rough = best_chain(order.runs, memory_of(order.runs), count, largest_cost_s(order.runs))
        if not rough:
            break
        found.append((order.runs, rough))
    return found


def _affordable(atoms: Atoms) -> IntArray:
    """int64 [C]: devices of each class to use, all of them unless that makes too many combinations."""
    count, share = atoms.classes.count.copy(), shares(atoms)
    suits = np.isfinite(atoms.op_s)
    needed = suits[suits.sum(axis=1) == 1].any(axis=0).astype(np.int64)  # one where an atom is pinned to the class
    while np.prod(count + 1.0) > _MOST_STATES and (count > needed).any():
        count[np.where(count > needed, share, np.inf).argmin()] -= 1
    return count


def _chain_plan(atoms: Atoms, chain: SliceChain) -> Plan:
    """The plan of a chain, with a note on what it leaves out of account."""
    notes = list(atoms.notes)
    if left_out := int((atoms.classes.count - _affordable(atoms)).sum()):
        notes.append(f"the {left_out} slowest devices were left out, since the cluster has too many unlike ones")
    text = "; ".join(notes)
    device = chain.device(atoms)
    if not atoms.classes.are_alike:
        device = arranged(atoms.classes.problem, device, atoms.classes.devices)
    return Plan(device, note=f"{text[0].upper()}{text[1:]}." if text else "")
