"""Greedy placement, for MITE and DFS: one pass, each unit to the device with the smallest product of terms."""

from __future__ import annotations

import numpy as np

from baselines.kernel_records import Members, inputs_of, room_of, wire_of
from baselines.memory import Allowance, no_room, place_within_memory
from baselines.paths import slowness
from env.plan import Plan
from env.units import Units
from graphs.opgraph import FloatArray, IntArray


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
