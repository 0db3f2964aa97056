"""Everything on one device: the plan every other one must beat."""

from __future__ import annotations

import numpy as np

from baselines.memory import overflow
from baselines.plan import Plan
from baselines.units import Units
from env.problem import Problem


def single_device(problem: Problem, seed: int) -> Plan:
    """Every op on one device, the one with the shortest step of those that have the memory. O(D) simulations.

    Ops that are pinned elsewhere run on the fastest device allowed for them, so the plan is as single as possible.

    Raises:
        InfeasibleError: no device has the memory; the sentence is about the device that misses least.
    """
    from env.simulator import Simulator

    units = Units(problem)
    elsewhere = np.where(units.allowed, units.op_s, np.inf).argmin(axis=1)
    plans = [
        Plan(np.where(units.allowed[:, d], d, elsewhere)[problem.group_of]) for d in range(problem.cluster.n_devices)
    ]
    simulator = Simulator(problem)
    scores = [simulator.score(plan.device) for plan in plans]  # a batch would compile a second loop for D placements
    missing = [int((score.peak_bytes - problem.capacity_bytes).max()) for score in scores]
    if min(missing) > 0:
        raise overflow(problem, plans[int(np.argmin(missing))])
    return plans[int(np.argmin([score.step_time_s if score.feasible else np.inf for score in scores]))]
