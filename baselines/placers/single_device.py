"""Everything on one device: the plan every other one must beat."""

from __future__ import annotations

import numpy as np

from baselines.memory import excess_bytes, overflow
from baselines.memory_orders import least_memory_order, program_order
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.units import Units
from graphs.arrays import nearly_least, numbered


def single_device(problem: Problem, seed: int) -> Plan:
    """Every op on one device, the best of those that have the memory. It takes two scores for each kind of device.

    It runs in program order, or by the default priority where ops that are pinned elsewhere make that faster. Where
    neither fits, an order that holds little at a time is tried.

    Ops that are pinned elsewhere run on the fastest device allowed for them, so the plan is as single as possible.

    Raises:
        InfeasibleError: no device has the memory; the sentence is about the device that misses least.
    """
    units = Units.of(problem)
    elsewhere = np.where(units.allowed, units.op_s, np.inf).argmin(axis=1)
    # Devices that are alike and may run every op take equally long: one of them is enough.
    of_its_own = problem.cluster.n_devices + np.arange(problem.cluster.n_devices)
    _, devices = numbered(np.where(units.allowed.all(axis=0), problem.kind_of, of_its_own))
    placed = [np.where(units.allowed[:, d], d, elsewhere)[problem.unit_of] for d in devices.tolist()]
    in_turn = program_order(problem.graph)
    scorer = Scorer(problem)
    plans = [plan for device in placed for plan in (Plan(device, in_turn), Plan(device))]
    values = [scorer.value(plan) for plan in plans]  # a batch would compile a second loop for D placements
    if min(values) == np.inf:
        frugal = least_memory_order(problem.graph)
        plans += [Plan(device, frugal) for device in placed]
        values += [scorer.value(plan) for plan in plans[len(values) :]]
    if min(values) == np.inf:
        missing = [int(excess_bytes(problem, plan).max()) for plan in plans]
        raise overflow(problem, plans[int(np.argmin(missing))])
    return plans[nearly_least(values)[0]]
