"""Expert: layer by layer, balanced by module, as people place networks by hand."""

from __future__ import annotations

import numpy as np

from baselines.layers import layers
from baselines.memory import Allowance, Ledger, place_within_memory
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray


def expert(problem: Problem, seed: int) -> Plan:
    """Contiguous runs of layers to the GPUs in cluster order, so that the largest load is least.

    After the human experts of A. Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
    2017, section 4 (doi:10.48550/arXiv.1706.04972), who give every recurrent layer a device of its own and cut
    convolutional networks into contiguous parts; here the parts have equal work rather than equally many layers.
    Layers are those of `baselines.layers`; backward and update ops run with their forward op. CPUs take part
    only where there is nothing else; ops that are pinned away from their layer's device, or find it full, go to the
    fastest device left for them. O(n log n + e + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    parts = layers(units)
    main = problem.cluster.compute_devices
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    flat = np.concatenate([np.array(part) for part in parts])
    load_s = np.add.reduceat(units.op_s[flat][:, main], starts, axis=0)

    def build(allowance: Allowance) -> Plan:
        size = np.add.reduceat(allowance.unit_bytes[flat], starts)
        room = problem.capacity_bytes[main] - allowance.working_bytes.max()
        wanted = np.repeat(main[balanced_cut(load_s, size, room)], [len(part) for part in parts])
        ledger = Ledger(units, allowance)
        device = np.empty(units.n_units, dtype=np.int64)
        for unit, first_choice in zip(flat.tolist(), wanted.tolist(), strict=True):
            feasible = ledger.feasible(unit)
            suits = (feasible == first_choice).any()
            device[unit] = first_choice if suits else feasible[units.op_s[unit, feasible].argmin()]
            ledger.place(unit, int(device[unit]))
        return Plan(device[problem.unit_of])

    return place_within_memory(units, build)


def balanced_cut(load_s: FloatArray, size_bytes: IntArray, room_bytes: IntArray) -> IntArray:
    """Cut a row of L parts into one run per device, in device order, so that the largest load is least.

    Args:
        load_s: float64 [L, D], seconds of each part on each device.
        size_bytes: int64 [L].
        room_bytes: int64 [D].

    Returns:
        int64 [L], device of each part. Where no cut has the room, the last device takes what is left over.
    """
    work_s = np.concatenate([np.zeros((1, load_s.shape[1])), np.cumsum(load_s, axis=0)])
    used = np.concatenate([[0], np.cumsum(size_bytes)])

    def ends(limit_s: float) -> list[int]:
        result, start = [], 0
        for d, room in enumerate(room_bytes.tolist()):
            by_time = int(np.searchsorted(work_s[:, d], work_s[start, d] + limit_s, side="right")) - 1
            by_size = int(np.searchsorted(used, used[start] + room, side="right")) - 1
            start = max(start, min(by_time, by_size))
            result.append(start)
        return result

    low, high = 0.0, float(work_s[-1].max())
    for _ in range(60):  # halves the interval down to the last digit
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == len(load_s) else (middle, high)
    cuts = ends(high)
    cuts[-1] = len(load_s)
    return np.repeat(np.arange(len(cuts)), np.diff([0, *cuts]))
