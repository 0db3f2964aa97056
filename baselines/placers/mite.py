"""MITE: memory, importance, traffic and execution time in one product; DFS has two of these terms."""

from __future__ import annotations

import numpy as np

from baselines.kernel_records import Members, inputs_of, room_of, wire_of
from baselines.memory import Allowance, no_room, place_within_memory
from baselines.paths import importance, slowness
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray


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


def place_by_product(units: Units, order: IntArray, importance: FloatArray, multi_objective: bool) -> Plan:
    """Place units (int64 [U]) in this order by Traffic * Execution, or by all four terms of `baselines.placers.mite`.

    Args:
        units: what is placed.
        order: all units.
        importance: float64 [U], between 0 and 1.
        multi_objective: take Memory and Importance into the product.

    Raises:
        InfeasibleError: as `place_within_memory`.
    """
    from baselines.placers import greedy_kernel

    problem, graph = units.problem, units.problem.graph
    relative_slowness = slowness(problem)
    device = np.empty(units.n_units, dtype=np.int64)

    def build(allowance: Allowance) -> Plan:
        room = room_of(units, allowance.unit_bytes, allowance.working_bytes)
        failed = greedy_kernel.place(
            order,
            multi_objective,
            Members(units.ptr, units.members, problem.unit_of),
            inputs_of(graph),
            graph.output_ptr,
            wire_of(problem),
            units.op_s,
            importance,
            relative_slowness,
            room,
            device,
        )
        if failed >= 0:
            raise no_room(units, allowance, failed, room.used_bytes, room.largest_bytes)
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)
