"""HEFT: heterogeneous earliest finish time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baselines.greedy import wire
from baselines.memory import Allowance, no_room, place_within_memory
from baselines.paths import upward_rank
from baselines.plan import Plan
from baselines.units import Units
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Estimate:
    """HEFT's own schedule, in which links are never busy (n ops): device int64, start and end float64 seconds."""

    device: IntArray
    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        """End of the last op."""
        return float(self.end_s.max())


def heft(problem: Problem, seed: int) -> Plan:
    """Ops by falling upward rank, each to the device where it would finish first, in the first idle interval there.

    Source: H. Topcuoglu, S. Hariri, M. Wu, "Performance-Effective and Low-Complexity Task Scheduling for
    Heterogeneous Computing", IEEE TPDS 13(3), 2002, section 4.2 (doi:10.1109/71.993206).
    As published, links are never busy in its own estimate and an op waits for the *last* of its inputs. Beyond the
    paper: only devices with room are considered; the first op of a colocation group fixes the device of all, where
    its finish plus the time of the group's other ops is least; an op that takes no time needs no idle interval.
    The plan's order is that of the estimated starts. O(n log n + e D + n D g) for g idle intervals looked at per op
    and device, few as a rule and n at worst.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units(problem)
    rank = upward_rank(problem)

    def build(allowance: Allowance) -> Plan:
        estimate = _schedule(units, rank, allowance)
        order = np.empty(problem.graph.n_ops)
        order[np.lexsort((_position(problem), estimate.end_s, estimate.start_s))] = np.arange(len(order))
        return Plan(estimate.device, order)

    return place_within_memory(units, build)


def estimated_schedule(problem: Problem) -> Estimate:
    """HEFT's own schedule, without contention and with kept bytes and one op's tensors as the only memory.

    Raises:
        InfeasibleError: a unit finds no room.
    """
    units = Units(problem)
    least = Allowance(units.kept_bytes, units.working_bytes)
    return _schedule(units, upward_rank(problem), least)


def _schedule(units: Units, rank: FloatArray, allowance: Allowance) -> Estimate:
    """Place ops by falling rank, float64 [n], equals in topological order."""
    from baselines import heft_kernel

    problem = units.problem
    n, n_devices = problem.op_s.shape
    device, start_s, end_s = np.empty(n, np.int64), np.empty(n), np.empty(n)
    used_bytes, largest_bytes = np.empty(n_devices, np.int64), np.empty(n_devices, np.int64)
    failed = heft_kernel.schedule(
        np.lexsort((_position(problem), -rank)),
        problem.group_of,
        (*problem.graph.inputs, problem.graph.tensor_producer),
        wire(units),
        problem.op_s,
        units.op_s,
        units.allowed,
        (allowance.unit_bytes, allowance.working_bytes, problem.capacity_bytes),
        device,
        start_s,
        end_s,
        used_bytes,
        largest_bytes,
    )
    if failed >= 0:
        raise no_room(units, allowance, failed, used_bytes, largest_bytes)
    return Estimate(device, start_s, end_s)


def _position(problem: Problem) -> IntArray:
    """int64 [n]: where each op stands in the topological order."""
    position = np.empty(problem.graph.n_ops, dtype=np.int64)
    position[problem.graph.topological_order] = np.arange(len(position))
    return position
