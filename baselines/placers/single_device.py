"""Everything on one device: the plan every other one must beat."""

from __future__ import annotations

import numpy as np

from baselines.memory import excess_bytes, overflow
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.units import Units
from graphs.arrays import numbered


def single_device(problem: Problem, seed: int) -> Plan:
    """Every op on one device, the best of those that have the memory. It takes a score for each kind of device.

    Ops that are pinned elsewhere run on the fastest device allowed for them, so the plan is as single as possible.

    Raises:
        InfeasibleError: no device has the memory; the sentence is about the device that misses least.
    """
    units = Units.of(problem)
    elsewhere = np.where(units.allowed, units.op_s, np.inf).argmin(axis=1)
    # Devices that are alike and may run every op take equally long: one of them is enough.
    of_its_own = problem.cluster.n_devices + np.arange(problem.cluster.n_devices)
    _, devices = numbered(np.where(units.allowed.all(axis=0), problem.kind_of, of_its_own))
    plans = [Plan(np.where(units.allowed[:, d], d, elsewhere)[problem.unit_of]) for d in devices.tolist()]
    scorer = Scorer(problem)
    values = [scorer.value(plan) for plan in plans]  # a batch would compile a second loop for D placements
    if min(values) == np.inf:
        missing = [int(excess_bytes(problem, plan).max()) for plan in plans]
        raise overflow(problem, plans[int(np.argmin(missing))])
    return plans[int(np.argmin(values))]
