"""Critical path: the longest path to the fastest device."""

from __future__ import annotations

import numpy as np

from baselines.memory import Ledger, place_one_by_one
from baselines.paths import fastest_first, longest_paths
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def critical_path(problem: Problem, seed: int) -> Plan:
    """Units on the longest path to the fastest device with room, all others to the one with the least work so far.

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    Work is seconds of the ops placed on the device; of equally loaded devices the fastest. The others come
    colocation groups first, then topologically. O(n + e + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    path = next(longest_paths(problem, np.zeros(problem.graph.n_ops, dtype=np.bool_)))
    on_path = np.zeros(units.n_units, dtype=np.bool_)
    on_path[problem.unit_of[path]] = True
    order = units.components_first(units.topological_order)
    order = np.concatenate([order[on_path[order]], order[~on_path[order]]])
    speed_rank = np.argsort(fastest_first(problem))

    def choose(unit: int, feasible: IntArray, ledger: Ledger) -> int:
        rank = speed_rank[feasible]
        best = rank.argmin() if on_path[unit] else np.lexsort((rank, ledger.load_s[feasible]))[0]
        return int(feasible[best])

    return place_one_by_one(units, order, choose)
