"""Divide path: one longest path after the other, each to one device."""

from __future__ import annotations

import numpy as np

from baselines.memory import Allowance, Ledger, place_within_memory
from baselines.paths import fastest_first, longest_paths
from env.plan import Plan
from env.problem import Problem
from env.units import Units


def divide_path(problem: Problem, seed: int) -> Plan:
    """Repeatedly the longest path of the ops that are left, whole, to the device with the least work so far.

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    An op takes its colocation group along. Where the device is full, the rest of the path goes to the next least
    loaded one; a pinned op leaves the path alone. The fastest of equally loaded devices comes first.
    O(P (n + e) + U D) for P paths.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    paths = _unit_paths(units)
    speed_rank = np.argsort(fastest_first(problem))

    def build(allowance: Allowance) -> Plan:
        ledger = Ledger(units, allowance)
        device = np.empty(units.n_units, dtype=np.int64)
        for path in paths:
            current = -1
            for unit in path:
                feasible = ledger.feasible(unit)
                chosen = current
                if current < 0 or current not in feasible:
                    chosen = int(feasible[np.lexsort((speed_rank[feasible], ledger.load_s[feasible]))[0]])
                    if current < 0 or units.allowed[unit, current]:
                        current = chosen
                device[unit] = chosen
                ledger.place(unit, chosen)
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)


def _unit_paths(units: Units) -> list[list[int]]:
    """Units by path, longest first; which ones does not depend on where earlier ones went."""
    gone = np.zeros(units.problem.graph.n_ops, dtype=np.bool_)
    result = []
    for path in longest_paths(units.problem, gone):
        result.append(list(dict.fromkeys(units.problem.unit_of[path].tolist())))
        for unit in result[-1]:
            gone[units.members[units.ptr[unit] : units.ptr[unit + 1]]] = True
    return result
