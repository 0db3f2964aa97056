"""CPOP: critical path on a processor."""

from __future__ import annotations

import numpy as np

from baselines.list_schedulers.estimate import Scheduler, insert, place_as_estimated, ready_order
from baselines.paths import importance, longest_paths
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray


def cpop(problem: Problem, seed: int) -> Plan:
    """The critical path on the one device that runs it fastest; all other ops where they would finish first.

    Source: H. Topcuoglu, S. Hariri, M. Wu, "Performance-Effective and Low-Complexity Task Scheduling for
    Heterogeneous Computing", IEEE TPDS 13(3), 2002, section 4.3 (doi:10.1109/71.993206).
    As published, the ready op on the longest path (by mean times) comes first, ops are inserted into idle intervals,
    and links are never busy in its own estimate. Beyond the paper: the device of the critical path is the one that may
    run most of its ops, and among those the fastest; an op of the path that may not run there, or finds no room, goes
    where it would finish first. Groups and memory are as in `baselines.list_schedulers.heft`, and so is the complexity.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    return place_as_estimated(problem, scheduler)


def critical_device(problem: Problem) -> tuple[IntArray, int]:
    """The ops of the critical path, int64, in order, and the device meant for them."""
    path = next(longest_paths(problem, np.zeros(problem.graph.n_ops, dtype=np.bool_)))
    allowed = problem.allowed[path]
    seconds = np.where(allowed, problem.op_s[path], 0.0).sum(axis=0)
    return path, int(np.lexsort((seconds, -allowed.sum(axis=0)))[0])


def scheduler(units: Units) -> Scheduler:
    """CPOP itself, for any account of memory."""
    order = ready_order(units.problem, importance(units.problem))
    path, device = critical_device(units.problem)
    first_choice = np.full(units.problem.graph.n_ops, -1, dtype=np.int64)
    first_choice[path] = device
    return lambda allowance: insert(units, order, allowance, first_choice=first_choice)
