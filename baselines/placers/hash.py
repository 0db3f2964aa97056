"""Hash placement."""

from __future__ import annotations

import hashlib

import numpy as np

from baselines.memory import Ledger, place_one_by_one
from baselines.paths import slowness
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def hash_placement(problem: Problem, seed: int) -> Plan:
    """Each unit on a device drawn by a hash of its name, in proportion to the devices' speed. O(U D).

    Source: R. Mayer, C. Mayer, L. Laich, "The TensorFlow Partitioning and Scheduling Problem: It's the Critical
    Path!", DIDL 2017, partitioning strategies (doi:10.48550/arXiv.1711.01912).
    Capacity is the device's speed: by memory, a host CPU would draw nearly every op. The hash is SHA-256 of the seed
    and the name of the unit's first op, the same on every machine. Only devices with room take part in the draw,
    colocation groups draw first.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    drawn = [_fraction(f"{seed}:{name}") for name in units.label]
    # A device on which nothing takes any time is as good as infinitely fast, which has no proportion.
    capacity = 1.0 / np.maximum(slowness(problem), 1e-9)

    def choose(unit: int, feasible: IntArray, _: Ledger) -> int:
        share = np.cumsum(capacity[feasible])
        return int(feasible[np.searchsorted(share / share[-1], drawn[unit], side="right")])

    return place_one_by_one(units, units.components_first(np.arange(units.n_units)), choose)


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) * 2.0**-53
