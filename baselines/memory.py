"""Memory while placing: a static account per device, checked and tightened by scoring.

Whether a plan fits is known only after everything is placed (docs/score.md, "Memory" and "Throughput"). So a heuristic
places against an `Allowance`, the finished plan is scored, and where it overflows the heuristic tries again with a
tighter one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.meter import charge
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.formatting import exact_bytes
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from env.simulation.simulator import Schedule

_ATTEMPTS = 12
_RELENT = 0.7  # what is left of the charges for activations when nothing fits under them


@dataclass(frozen=True, eq=False)
class Allowance:
    """The static account of one attempt (U units). A device holds a set of units if the sum of their ``unit_bytes``
    plus the largest of their ``working_bytes`` is at most its memory; both int64 [U].
    """

    unit_bytes: IntArray
    working_bytes: IntArray


class Ledger:
    """Running account of one attempt, for heuristics that place unit by unit; devices on one memory share it."""

    def __init__(self, units: Units, allowance: Allowance) -> None:
        self._units, self._allowance = units, allowance
        n_devices = units.problem.cluster.n_devices
        self._memory = units.problem.memory_owner
        self.used_bytes = np.zeros(n_devices, dtype=np.int64)  # charged so far in each one's memory, [D]
        self._largest_bytes = np.zeros(n_devices, dtype=np.int64)
        self.load_s: FloatArray = np.zeros(n_devices)  # seconds of work placed so far, [D]
        self.last_device = -1  # of the unit placed last

    def fits(self, unit: int) -> BoolArray:
        """bool [D]: devices where the unit may run and still has room."""
        needed = self._allowance.unit_bytes[unit] + np.maximum(self._largest_bytes, self._allowance.working_bytes[unit])
        result: BoolArray = self._units.allowed[unit] & (self.used_bytes + needed <= self._units.problem.capacity_bytes)
        return result

    def feasible(self, unit: int) -> IntArray:
        """Devices where the unit may run and still has room, increasing.

        Raises:
            InfeasibleError: there is none.
        """
        devices = np.flatnonzero(self.fits(unit))
        if not len(devices):
            raise no_room(self._units, self._allowance, unit, self.used_bytes, self._largest_bytes)
        return devices

    def place(self, unit: int, device: int) -> None:
        """Charge the unit to a device."""
        there = self._memory == self._memory[device]
        self.used_bytes[there] += self._allowance.unit_bytes[unit]
        self._largest_bytes[there] = max(self._largest_bytes[device], self._allowance.working_bytes[unit])
        self.load_s[device] += self._units.op_s[unit, device]
        self.last_device = device


def no_room(
    units: Units, allowance: Allowance, unit: int, used_bytes: IntArray, largest_bytes: IntArray
) -> InfeasibleError:
    """The error for a unit that no device has room for, given what is placed (int64 [D] each)."""
    needed = int(allowance.unit_bytes[unit] + allowance.working_bytes[unit])
    reserved = np.maximum(largest_bytes - allowance.working_bytes[unit], 0)
    free = units.problem.capacity_bytes - used_bytes - reserved
    free = np.where(units.allowed[unit], free, np.iinfo(np.int64).min)
    device = int(free.argmax())
    others = int(units.size[unit]) - 1
    group = f" with the {others} ops of its colocation group" if others else ""
    left = max(0, int(free[device]))
    return InfeasibleError(
        f"op {units.label[unit]!r}{group} needs {exact_bytes(needed)} on {units.problem.cluster.devices[device].name}, "
        f"where {exact_bytes(left)} are free, and no other device has more room for it.",
        needed - left,
    )


def place_within_memory(units: Units, build: Callable[[Allowance], Plan]) -> Plan:
    """Call ``build`` again and again until its plan is within memory under the problem's objective.

    At first only kept bytes are charged. Other bytes on an overflowing device (at its peak) are charged, from then on,
    to the units that put them there, so that they do not meet on a device of that size again.

    Raises:
        InfeasibleError: none of the attempts fits; names op, device, bytes needed and bytes free.
    """
    held, share = np.zeros(units.n_units, dtype=np.int64), 1.0
    failed: list[tuple[int, Plan]] = []
    for attempt in range(_ATTEMPTS):
        if attempt:
            charge(prices.HEURISTIC_S * units.problem.graph.n_ops)
        charged = (share * held).astype(np.int64)
        try:
            plan = build(Allowance(units.kept_bytes + charged, np.maximum(units.working_bytes - charged, 0)))
        except InfeasibleError:
            if not failed:
                raise  # kept bytes and one op's tensors at a time are the least any placement needs
            share *= _RELENT
            continue
        over = excess_bytes(units.problem, plan)
        if over.max() <= 0:
            return plan
        failed.append((int(over.max()), plan))
        held = np.maximum(held, _held(units, plan, over > 0))
    raise overflow(units.problem, min(failed, key=lambda attempt: attempt[0])[1])


def excess_bytes(problem: Problem, plan: Plan) -> IntArray:
    """int64 [D]: by how much each device's memory is exceeded under the problem's objective, 0 or less if it fits."""
    if problem.objective == THROUGHPUT:
        return loads(problem, plan).held_bytes - problem.capacity_bytes
    from env.simulation.simulator import Simulator  # loads the compiler: only when something is placed

    return Simulator(problem).score(plan).peak_bytes - problem.capacity_bytes


def place_one_by_one(units: Units, order: IntArray, choose: Callable[[int, IntArray, Ledger], int]) -> Plan:
    """Place units (int64 [U]) in this order, each where ``choose(unit, feasible devices, ledger)`` says.

    Raises:
        InfeasibleError: as `place_within_memory`.
    """

    def build(allowance: Allowance) -> Plan:
        ledger = Ledger(units, allowance)
        device = np.empty(units.n_units, dtype=np.int64)
        for unit in order.tolist():
            device[unit] = choose(unit, ledger.feasible(unit), ledger)
            ledger.place(unit, int(device[unit]))
        return Plan(device[units.problem.unit_of])

    return place_within_memory(units, build)


def overflow(problem: Problem, plan: Plan) -> InfeasibleError:
    """The error for a plan that exceeds a device's memory."""
    if problem.objective == THROUGHPUT:
        reason = loads(problem, plan).steady.reason
    else:
        from env.simulation.simulator import Simulator
        from env.simulation.timeline import overflow_reason

        _, schedule = Simulator(problem).schedule(plan)
        reason = overflow_reason(problem, schedule)
    assert reason is not None, "the score and its reason disagree about memory"
    return InfeasibleError(reason, int(excess_bytes(problem, plan).max()))


def _held(units: Units, plan: Plan, full: BoolArray) -> IntArray:
    """int64 [U]: bytes on the full devices, bool [D], beside kept bytes, by the unit that puts them there."""
    problem = units.problem
    if problem.objective == THROUGHPUT:
        steady = loads(problem, plan).steady
        per_op = steady.held_by(full[steady.entry_device])
        return np.add.reduceat(per_op[units.members], units.ptr[:-1])
    from env.simulation.simulator import Simulator

    _, schedule = Simulator(problem).schedule(plan)
    held = np.zeros(units.n_units, dtype=np.int64)
    for d in np.flatnonzero(full).tolist():
        held = np.maximum(held, _held_at_peak(units, schedule, d))
    return held


def _held_at_peak(units: Units, schedule: Schedule, device: int) -> IntArray:
    """int64 [U]: bytes in a device's memory at its peak, beside kept bytes, by the unit that puts them there.

    An output counts for its producer, a copy from elsewhere for its first consumer there.
    """
    from env.simulation.timeline import memory_steps

    graph, memory = units.problem.graph, units.problem.memory_owner
    times_s, size_bytes = memory_steps(units.problem, schedule)[device]
    peak_s = times_s[size_bytes.argmax()]
    _, consumer, tensor = graph.edge_list
    here = memory[schedule.device[graph.tensor_producer]] == device
    read = memory[schedule.device[consumer]] == device
    owner = np.where(here, graph.tensor_producer, graph.n_ops)
    np.minimum.at(owner, tensor[read & ~here[tensor]], consumer[read & ~here[tensor]])
    since_s = np.where(here, schedule.op_start_s[graph.tensor_producer], np.inf)
    until_s = np.where(here, schedule.op_end_s[graph.tensor_producer], 0.0)
    arrives = (memory[schedule.transfer_target] == device) & ~here[schedule.transfer_tensor]
    np.minimum.at(since_s, schedule.transfer_tensor[arrives], schedule.transfer_start_s[arrives])
    in_use = arrives | here[schedule.transfer_tensor]
    np.maximum.at(until_s, schedule.transfer_tensor[in_use], schedule.transfer_end_s[in_use])
    np.maximum.at(until_s, tensor[read], schedule.op_end_s[consumer[read]])
    live = (since_s <= peak_s) & (peak_s < until_s)
    runs = (memory[schedule.device] == device) & (schedule.op_start_s <= peak_s) & (peak_s < schedule.op_end_s)
    size = np.where(here, graph.tensor_memory_bytes, graph.tensor_bytes)
    per_op = np.bincount(owner[live], size[live], graph.n_ops) + graph.workspace_bytes * runs
    return np.add.reduceat(per_op[units.members], units.ptr[:-1]).astype(np.int64)
