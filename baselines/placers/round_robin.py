"""Round-robin placement."""

from __future__ import annotations

from baselines.memory import Ledger, place_one_by_one
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def round_robin(problem: Problem, seed: int) -> Plan:
    """Units in topological order to the devices in turn, passing over devices that do not suit. O(U D).

    The released code of Mayer, Mayer, Laich 2017 (doi:10.48550/arXiv.1711.01912) does this under the name of hash.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    n_devices = problem.cluster.n_devices

    def choose(unit: int, feasible: IntArray, ledger: Ledger) -> int:
        return int(feasible[((feasible - ledger.last_device - 1) % n_devices).argmin()])

    return place_one_by_one(units, units.topological_order, choose)
