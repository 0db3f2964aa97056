"""What MITE and DFS share: one pass over the units, each to the device with the smallest product of terms."""

from __future__ import annotations

import numpy as np

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
    n_devices = problem.cluster.n_devices
    structure = (*graph.inputs, graph.output_ptr, graph.tensor_producer)
    relative_slowness = slowness(problem)
    device = np.empty(units.n_units, dtype=np.int64)
    used_bytes, largest_bytes = np.empty(n_devices, np.int64), np.empty(n_devices, np.int64)

    def build(allowance: Allowance) -> Plan:
        failed = greedy_kernel.place(
            order,
            multi_objective,
            (units.ptr, units.members, problem.unit_of),
            structure,
            wire(units),
            units.op_s,
            importance,
            relative_slowness,
            units.allowed,
            (allowance.unit_bytes, allowance.working_bytes, problem.capacity_bytes),
            device,
            used_bytes,
            largest_bytes,
        )
        if failed >= 0:
            raise no_room(units, allowance, failed, used_bytes, largest_bytes)
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)


def wire(units: Units) -> tuple[IntArray, FloatArray, IntArray, FloatArray, FloatArray]:
    """Arrays that say how long a tensor takes: bytes and measured seconds [m], hops, latency and bandwidth [D, D]."""
    problem = units.problem
    hops = problem.hops.copy()  # numba compiles anew for arrays that may not be written
    graph = problem.graph
    return graph.tensor_bytes, graph.tensor_transfer_s, hops, problem.latency_s, problem.bandwidth_bytes_per_s
