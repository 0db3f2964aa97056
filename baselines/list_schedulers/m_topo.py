"""m-TOPO: topological order, filled device after device to an even share of memory."""

from __future__ import annotations

import numpy as np

from baselines.memory import Allowance, Ledger, place_within_memory
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def m_topo(problem: Problem, seed: int) -> Plan:
    """Units in topological order to the first device until it has its share of the bytes, then to the next.

    Source: B. Jeon, L. Cai, P. Srivastava et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020
    (doi:10.1145/3419111.3421302). The share is that of its authors' code: all bytes / D + those of the largest unit,
    so the last devices may stay empty; times play no part. Beyond the paper: a unit that may not run on the device, or
    finds no room there, goes to the next one that can hold it; where no op has bytes, each counts as one. The order of
    starts is left to the default priority. O(n log n + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    size = unit_bytes(units)
    n_devices = problem.cluster.n_devices
    share = int(size.sum()) / n_devices + int(size.max())

    def build(allowance: Allowance) -> Plan:
        ledger = Ledger(units, allowance)
        device, filled, turn = np.empty(units.n_units, dtype=np.int64), np.zeros(n_devices), 0
        for unit in units.topological_order.tolist():
            chosen = turn
            if filled[turn] + size[unit] > share or not ledger.fits(unit)[turn]:
                holds = ledger.feasible(unit)
                in_turn = np.roll(holds, -np.searchsorted(holds, turn))
                chosen = int(in_turn[np.argmax(filled[in_turn] + size[unit] <= share)])
                turn = max(turn, chosen) if units.allowed[unit, turn] else turn
            filled[chosen] += size[unit]
            ledger.place(unit, chosen)
            device[unit] = chosen
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)


def unit_bytes(units: Units) -> IntArray:
    """int64 [U]: bytes each unit keeps, writes and works in; 1 per op where there are none."""
    graph = units.problem.graph
    per_op = graph.kept_bytes + graph.workspace_bytes
    np.add.at(per_op, graph.tensor_producer, graph.tensor_memory_bytes)
    if not per_op.any():
        per_op[:] = 1
    return np.add.reduceat(per_op[units.members], units.ptr[:-1])
