"""Min-cut: parts of equal work that exchange as little as possible, by METIS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from baselines.memory import Allowance, Ledger, place_within_memory
from baselines.network_levels import network_levels
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.units import Units
from graphs.arrays import distinct_rows
from graphs.opgraph import FloatArray, IntArray

_TOTAL_WEIGHT = 2**28  # METIS takes whole numbers, whose sum must stay below 2**31 in some builds
_UNBALANCE = 0.03  # how much larger than its share a part may become for a smaller cut; METIS's own default
_LEAST_SHARE = 1e-3  # of the weight, for a part of its own
_TRIALS = 4  # cuts from which METIS takes the smallest
_MEMORY_SHARES = (0.0, 0.5, 1.0)  # of memory in a unit's weight, until all parts fit


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """Traffic between units, as an undirected graph (U units, x edges).

    Attributes:
        ends: int64 [x, 2], units, the lower number first; no pair twice.
        seconds: float64 [x], mean time of all transfers if the two are on different devices.
    """

    ends: IntArray
    seconds: FloatArray

    @staticmethod
    def of(units: Units) -> UnitGraph:
        """A tensor counts once for every other unit that reads it. O(e log e)."""
        problem = units.problem
        producer, consumer, tensor = problem.graph.edge_list
        source, target = problem.unit_of[producer], problem.unit_of[consumer]
        _, once = np.unique(tensor * units.n_units + target, return_index=True)
        once = once[source[once] != target[once]]
        low, high = np.minimum(source, target)[once], np.maximum(source, target)[once]
        pair, at = np.unique(low * units.n_units + high, return_inverse=True)
        seconds = np.bincount(at.reshape(-1), problem.mean_transfer_s[tensor[once]], len(pair))
        return UnitGraph(np.stack([pair // units.n_units, pair % units.n_units], axis=1), seconds.astype(np.float64))

    def within(self, chosen: IntArray) -> UnitGraph:
        """The edges between chosen units (int64 [k], increasing), which are numbered from 0."""
        number = np.full(max(int(self.ends.max(initial=-1)), int(chosen.max(initial=-1))) + 1, -1)
        number[chosen] = np.arange(len(chosen))
        ends = number[self.ends]
        inside = (ends >= 0).all(axis=1)
        return UnitGraph(ends[inside], self.seconds[inside])


def min_cut(problem: Problem, seed: int) -> Plan:
    """Cut the graph into one part per device, with work in proportion to speed and the least transfer time between.

    METIS bisects the ops (G. Karypis, V. Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular
    Graphs", SIAM J. Sci. Comput. 20(1), 1998, doi:10.1137/S1064827595287997) and, with them, the devices, most distant
    groups first, until one device is left: dual recursive bipartitioning (F. Pellegrini, J. Roman, "Scotch", HPCN
    Europe 1996, doi:10.1007/3-540-61142-8_588). So unequal devices get parts of unequal size, and close devices get
    parts that exchange much. As in the graph partitioning baseline of A. Mirhoseini et al. (ICML 2017, section 4,
    doi:10.48550/arXiv.1706.04972), a vertex weighs its time and an edge its transfer.

    Here vertices are units of placement. Those that may run on the same main devices are cut together; CPUs take part
    only where there is nothing else. Where a part does not fit into memory, bytes count for half of a unit's weight,
    then for all of it, and at last units that find no room go to the device with room that they exchange most with.
    Deterministic for a seed. O((U + x) log D) for x pairs of units that exchange something.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    edges = UnitGraph.of(units)

    def build(allowance: Allowance) -> Plan:
        for memory_share in _MEMORY_SHARES:
            device = _parts(units, edges, allowance, memory_share, seed)
            if _fits(units, allowance, device):
                return Plan(device[problem.unit_of])
        return Plan(_repaired(units, edges, allowance, device)[problem.unit_of])

    return place_within_memory(units, build)


def _parts(units: Units, edges: UnitGraph, allowance: Allowance, memory_share: float, seed: int) -> IntArray:
    """int64 [U], device of each unit, whether it fits or not."""
    main = np.zeros(units.problem.cluster.n_devices, dtype=np.bool_)
    main[units.problem.cluster.compute_devices] = True
    on_main = units.allowed & main
    choices = np.where(on_main.any(axis=1, keepdims=True), on_main, units.allowed)
    kinds, kind_of = distinct_rows(choices)
    result = np.empty(units.n_units, dtype=np.int64)
    for kind, choice in enumerate(kinds):
        chosen = np.flatnonzero(kind_of == kind)
        _, devices = network_levels(units.problem, np.flatnonzero(choice))
        op_s, size = units.op_s[np.ix_(chosen, devices)], allowance.unit_bytes[chosen].astype(np.float64)
        weight = (1 - memory_share) * _shares(op_s.mean(axis=1)) + memory_share * _shares(size)
        total_s = op_s.sum(axis=0)
        speed = _shares(1.0 / total_s if total_s.min() > 1e-300 else np.ones(len(devices)))
        room = _shares(units.problem.capacity_bytes[devices].astype(np.float64))
        target = (1 - memory_share) * speed + memory_share * room
        result[chosen] = devices[bisected(edges.within(chosen), weight, target, _group_sizes(units, devices), seed)]
    return result


def _group_sizes(units: Units, devices: IntArray) -> list[int]:
    """Devices in a group of each level, innermost first: 1, then more and more."""
    levels, _ = network_levels(units.problem, devices)
    return [math.prod(level.count for level in levels[:k]) for k in range(len(levels))]


def _shares(values: FloatArray) -> FloatArray:
    """Values divided by their sum; equal shares where that is 0."""
    total = values.sum()
    return values / total if total > 0 else np.full(len(values), 1.0 / max(1, len(values)))


def bisected(edges: UnitGraph, weight: FloatArray, target: FloatArray, group_sizes: list[int], seed: int) -> IntArray:
    """Parts of a graph, by recursive bisection with METIS.

    Args:
        edges: of k vertices.
        weight: float64 [k], 0 or more.
        target: float64 [p], the share of the weight that each part should have; all above 0.
        group_sizes: parts in a group of every level, innermost first and starting with 1: consecutive parts of a
            group are separated only after the groups.
        seed: of METIS.

    Returns:
        int64 [k], part of each vertex.
    """
    n_parts = len(target)
    if n_parts == 1 or len(weight) <= 1:
        return np.full(len(weight), target.argmax(), dtype=np.int64)
    group = max(size for size in group_sizes if size < n_parts)
    left = n_parts // group // 2 * group or group
    share = float(target[:left].sum() / target.sum())
    deepest = math.ceil(math.log2(n_parts))
    right_half = _bisection(edges, weight, share, (1 + _UNBALANCE) ** (1 / deepest) - 1, seed)
    result = np.empty(len(weight), dtype=np.int64)
    for first, half, parts in ((0, ~right_half, target[:left]), (left, right_half, target[left:])):
        chosen = np.flatnonzero(half)
        result[chosen] = first + bisected(edges.within(chosen), weight[chosen], parts, group_sizes, seed)
    return result


def _bisection(edges: UnitGraph, weight: FloatArray, share: float, unbalance: float, seed: int) -> BoolArray:
    """bool [k]: vertices of the second half; the first has about this share of the weight."""
    import pymetis

    if not _LEAST_SHARE < share < 1 - _LEAST_SHARE:  # METIS refuses a part of next to nothing
        return np.full(len(weight), share < 0.5)
    whole = pymetis.zero_copy_dtype()
    source = np.concatenate([edges.ends[:, 0], edges.ends[:, 1]])
    by_source = np.argsort(source, kind="stable")
    neighbour = np.concatenate([edges.ends[:, 1], edges.ends[:, 0]])[by_source]
    # An edge without weight would be refused; in whole numbers, every edge weighs something.
    cost = 1 + np.floor(np.tile(_shares(edges.seconds), 2)[by_source] * _TOTAL_WEIGHT)
    found = pymetis.part_graph(
        2,
        pymetis.CSRAdjacency(np.searchsorted(source[by_source], np.arange(len(weight) + 1)), neighbour),
        vweights=np.round(_shares(weight) * _TOTAL_WEIGHT).astype(whole),
        eweights=cost.astype(whole),
        tpwgts=[share, 1.0 - share],
        recursive=True,
        options=pymetis.Options(seed=seed % 2**31, ncuts=_TRIALS, ufactor=max(1, round(1000 * unbalance)), numbering=0),
    )
    second: BoolArray = np.array(found.vertex_part, dtype=np.bool_)
    return second


def _fits(units: Units, allowance: Allowance, device: IntArray) -> bool:
    """True if every part fits, int64 [U]."""
    n_devices = units.problem.cluster.n_devices
    used = np.zeros(n_devices, dtype=np.int64)
    largest = np.zeros(n_devices, dtype=np.int64)
    memory = units.problem.memory_owner[device]
    np.add.at(used, memory, allowance.unit_bytes)
    np.maximum.at(largest, memory, allowance.working_bytes)
    return bool((used + largest <= units.problem.capacity_bytes).all())


def _repaired(units: Units, edges: UnitGraph, allowance: Allowance, wanted: IntArray) -> IntArray:
    """int64 [U]: where each unit is wanted, if there is room; units with the least choice and the most bytes first.

    Raises:
        InfeasibleError: a unit finds no room anywhere.
    """
    ledger = Ledger(units, allowance)
    device = wanted.copy()
    ends = np.concatenate([edges.ends, edges.ends[:, ::-1]])
    by_unit = np.argsort(ends[:, 0], kind="stable")
    neighbour, seconds = ends[by_unit, 1], np.tile(edges.seconds, 2)[by_unit]
    ptr = np.searchsorted(ends[by_unit, 0], np.arange(units.n_units + 1))
    for unit in np.lexsort((-allowance.unit_bytes, units.allowed.sum(axis=1))).tolist():
        feasible = ledger.feasible(unit)
        if not (feasible == wanted[unit]).any():
            near = slice(ptr[unit], ptr[unit + 1])
            exchanged_s = np.bincount(device[neighbour[near]], seconds[near], len(ledger.load_s))[feasible]
            device[unit] = feasible[np.lexsort((ledger.load_s[feasible], -exchanged_s))[0]]
        ledger.place(unit, int(device[unit]))
    return device
