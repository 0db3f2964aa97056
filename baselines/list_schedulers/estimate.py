"""The list schedulers' own estimate of the schedule, in which links are never busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baselines.kernel_records import inputs_of, readers_of, room_of, wire_of
from baselines.memory import Allowance, no_room, place_within_memory
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class FinishEstimate:
    """A scheduler's own schedule, with links that are never busy (n ops): device int64, start and end float64 s."""

    device: IntArray
    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        """End of the last op."""
        return float(self.end_s.max())


Scheduler = Callable[[Allowance], FinishEstimate]


def place_as_estimated(problem: Problem, scheduler: Callable[[Units], Scheduler]) -> Plan:
    """Devices and order of starts of an estimate that fits into memory.

    Raises:
        InfeasibleError: as `place_within_memory`.
    """
    units = Units.of(problem)
    schedule = scheduler(units)

    def build(allowance: Allowance) -> Plan:
        estimate = schedule(allowance)
        order = np.empty(problem.graph.n_ops)
        order[np.lexsort((problem.graph.topological_position, estimate.end_s, estimate.start_s))] = np.arange(
            len(order)
        )
        return Plan(estimate.device, order)

    return place_within_memory(units, build)


def rank_order(problem: Problem, priority: FloatArray) -> IntArray:
    """int64 [n]: ops by falling priority, float64 [n]; equals in topological order."""
    return np.lexsort((problem.graph.topological_position, -priority)).astype(np.int64)


def ready_order(problem: Problem, priority: FloatArray) -> IntArray:
    """int64 [n]: a topological order that always goes on with the ready op of highest priority. O(n log n + e)."""
    from baselines.list_schedulers import list_kernel

    graph = problem.graph
    op_of = rank_order(problem, priority)
    return list_kernel.by_priority(op_of, np.argsort(op_of), np.diff(graph.inputs[0]), readers_of(graph))


def insert(
    units: Units,
    order: IntArray,
    allowance: Allowance,
    look_ahead_s: FloatArray | None = None,
    first_choice: IntArray | None = None,
) -> FinishEstimate:
    """Place op after op where it would finish first, in the first idle interval there that holds it.

    Only devices with room are considered. The first op of a colocation group fixes the device of all, where its finish
    plus the time of the group's other ops is least. An op that takes no time needs no idle interval.

    Args:
        units: what is placed.
        order: int64 [n], a topological order.
        allowance: the account of memory.
        look_ahead_s: float64 [n, D], added to the finish of an op on a device when devices are compared.
        first_choice: int64 [n], the device of an op that overrules all that, as long as it has room, or -1.

    Raises:
        InfeasibleError: a unit finds no room.
    """
    from baselines.list_schedulers import list_kernel

    problem = units.problem
    n, n_devices = problem.op_s.shape
    estimate = FinishEstimate(np.empty(n, np.int64), np.empty(n), np.empty(n))
    room = room_of(units, allowance.unit_bytes, allowance.working_bytes)
    failed = list_kernel.insert(
        order,
        np.zeros((n, n_devices)) if look_ahead_s is None else look_ahead_s,
        np.full(n, -1, dtype=np.int64) if first_choice is None else first_choice,
        problem.unit_of,
        inputs_of(problem.graph),
        wire_of(problem),
        problem.op_s,
        units.op_s,
        room,
        estimate.device,
        estimate.start_s,
        estimate.end_s,
    )
    if failed >= 0:
        raise no_room(units, allowance, failed, room.used_bytes, room.largest_bytes)
    return estimate


def start_earliest(units: Units, op_of: IntArray, allowance: Allowance, favourite: IntArray) -> FinishEstimate:
    """Again and again start the op that can start first, on the device where it can, as `m_etf` and `m_sct` do.

    Args:
        units: what is placed.
        op_of: int64 [n], the ops by rank: of those that can start first, the first of this list does.
        allowance: the account of memory.
        favourite: int64 [n], the consumer that a device awaits after each op, or -1.

    Raises:
        InfeasibleError: a unit finds no room.
    """
    from baselines.list_schedulers import list_kernel

    problem, graph = units.problem, units.problem.graph
    n = graph.n_ops
    estimate = FinishEstimate(np.empty(n, np.int64), np.empty(n), np.empty(n))
    room = room_of(units, allowance.unit_bytes, allowance.working_bytes)
    failed = list_kernel.start_earliest(
        op_of,
        np.argsort(op_of),
        favourite,
        problem.unit_of,
        inputs_of(graph),
        readers_of(graph),
        wire_of(problem),
        problem.op_s,
        room,
        estimate.device,
        estimate.start_s,
        estimate.end_s,
    )
    if failed >= 0:
        raise no_room(units, allowance, failed, room.used_bytes, room.largest_bytes)
    return estimate
