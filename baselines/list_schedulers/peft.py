"""PEFT: predict earliest finish time."""

from __future__ import annotations

import numpy as np

from baselines.kernel_records import readers_of
from baselines.list_schedulers.estimate import Scheduler, insert, place_as_estimated, ready_order
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray


def peft(problem: Problem, seed: int) -> Plan:
    """HEFT with a look ahead: an op goes where its finish plus the least that must still follow is smallest.

    Source: H. Arabnejad, J. Barbosa, "List Scheduling Algorithm for Heterogeneous Systems by an Optimistic Cost
    Table", IEEE TPDS 25(3), 2014 (doi:10.1109/TPDS.2013.57).
    As published, the ready op with the largest mean of its row of the table comes first, ops are inserted into idle
    intervals, and links are never busy in its own estimate. Pins, groups and memory are as in
    `baselines.list_schedulers.heft`, and so is the complexity, plus O(e D) for the table.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    return place_as_estimated(problem, scheduler)


def optimistic_cost_s(problem: Problem) -> FloatArray:
    """float64 [n, D]: seconds that must follow an op on a device, if all devices were free and transfers took the mean.

    0 for an op without consumers, and where an op may not run. Consumers of the same colocation group stay on the
    op's device. Equation 5 of the paper.
    """
    from baselines.list_schedulers import list_kernel

    graph = problem.graph
    result = np.empty_like(problem.op_s)
    list_kernel.optimistic_cost(
        graph.topological_order,
        readers_of(graph),
        problem.unit_of,
        problem.allowed,
        problem.op_s,
        problem.mean_transfer_s,
        result,
    )
    return result


def scheduler(units: Units) -> Scheduler:
    """PEFT itself, for any account of memory."""
    problem = units.problem
    cost_s = optimistic_cost_s(problem)
    order = ready_order(problem, cost_s.sum(axis=1) / problem.allowed.sum(axis=1))
    return lambda allowance: insert(units, order, allowance, look_ahead_s=cost_s)
