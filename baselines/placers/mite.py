"""MITE: memory, importance, traffic and execution time in one product."""

from __future__ import annotations

import numpy as np

from baselines.paths import importance
from baselines.placers.greedy import place_by_product
from env.plan import Plan
from env.problem import Problem
from env.units import Units


def mite(problem: Problem, seed: int) -> Plan:
    """Each unit to the feasible device with the smallest product of four terms between 0 and 1.

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    For unit v on device d, each divided by its largest value over the feasible devices where it has no natural one:

    * Memory: bytes used on d, with v, over its capacity.
    * Importance: 1 - importance(v) * speed(d) / fastest feasible speed, the importance over the largest of the graph.
    * Traffic: seconds of transfers between v and placed neighbours, a tensor once per device.
    * Execution: seconds of work on d, with v.

    Terms below 0.001 count as 0.001. Colocation groups come first, then free ops, both topologically; of equal
    products the lower device number. O(n D + e D + m D^2).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    per_unit = units.largest(importance(problem))
    order = units.components_first(units.topological_order)
    return place_by_product(units, order, per_unit / max(per_unit.max(), np.finfo(np.float64).tiny), True)
