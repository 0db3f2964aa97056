"""Batch split: the most important ops to the fastest device."""

from __future__ import annotations

import numpy as np

from baselines.memory import Ledger, place_one_by_one
from baselines.paths import fastest_first, importance
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def batch_split(problem: Problem, seed: int) -> Plan:
    """Units by falling importance, cut into D batches of equally many ops, the i-th to the i-th fastest device.

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    A colocation group is as important as its most important op. A unit that its batch's device has no room for goes
    to the next slower one, after the slowest to the fastest. O(n log n + e + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    n_devices = problem.cluster.n_devices
    order = np.argsort(-units.largest(importance(problem)), kind="stable")
    before = np.cumsum(units.size[order]) - units.size[order]
    batch = np.empty(units.n_units, dtype=np.int64)
    batch[order] = before * n_devices // problem.graph.n_ops
    speed_rank = np.argsort(fastest_first(problem))

    def choose(unit: int, feasible: IntArray, _: Ledger) -> int:
        return int(feasible[((speed_rank[feasible] - batch[unit]) % n_devices).argmin()])

    return place_one_by_one(units, order, choose)
