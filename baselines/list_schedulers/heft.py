"""HEFT: heterogeneous earliest finish time."""

from __future__ import annotations

from baselines.list_schedulers.estimate import Scheduler, insert, place_as_estimated, rank_order
from baselines.paths import upward_rank
from env.plan import Plan
from env.problem import Problem
from env.units import Units


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
    return place_as_estimated(problem, scheduler)


def scheduler(units: Units) -> Scheduler:
    """HEFT itself, for any account of memory."""
    order = rank_order(units.problem, upward_rank(units.problem))
    return lambda allowance: insert(units, order, allowance)
