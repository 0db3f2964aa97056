"""Random placement."""

from __future__ import annotations

import numpy as np

from baselines.memory import place_one_by_one
from env.plan import Plan
from env.problem import Problem
from env.units import Units


def random_placement(problem: Problem, seed: int) -> Plan:
    """Each unit on a device drawn evenly from those allowed that still have room. O(U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    drawn = np.random.default_rng(seed).random(units.n_units)
    return place_one_by_one(
        units, np.arange(units.n_units), lambda unit, feasible, _: int(feasible[int(drawn[unit] * len(feasible))])
    )
