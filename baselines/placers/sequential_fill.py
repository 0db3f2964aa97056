"""Sequential fill: what automatic device maps do."""

from __future__ import annotations

import numpy as np

from baselines.layers import layers
from baselines.memory import Allowance, Ledger, place_within_memory
from env.plan import Plan
from env.problem import Problem
from env.units import Units


def sequential_fill(problem: Problem, seed: int) -> Plan:
    """Layers in forward order to the first device until it is full, then the next, CPUs last; time plays no part.

    After ``device_map="sequential"`` of Hugging Face Accelerate (big model inference, ``infer_auto_device_map``):
    a layer goes whole to the first device, not before that of the last layer, that can hold it beside room for the
    largest op's inputs and outputs; a layer that no device left can hold is split. Unlike there, the device that
    overflows in the simulator is filled less in the next attempt. Layers are those of `baselines.layers`;
    backward and update ops run with their forward op. O(n log n + e + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    parts = layers(units)
    main = problem.cluster.compute_devices
    in_turn = np.concatenate([main, np.setdiff1d(np.arange(problem.cluster.n_devices), main)])
    rank = np.argsort(in_turn)

    def build(allowance: Allowance) -> Plan:
        ledger = Ledger(units, allowance)
        room = problem.capacity_bytes - allowance.working_bytes.max()
        device = np.empty(units.n_units, dtype=np.int64)
        turn = 0
        for part in parts:
            size = allowance.unit_bytes[part].sum()
            holds = (ledger.used_bytes + size <= room)[in_turn[turn:]]
            turn += int(holds.argmax()) if holds.any() else 0
            for unit in part:
                suits = np.zeros(len(in_turn), dtype=np.bool_)
                suits[rank[ledger.feasible(unit)]] = True
                later = suits[turn:]
                device[unit] = in_turn[turn + later.argmax() if later.any() else suits.argmax()]
                ledger.place(unit, int(device[unit]))
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)
