"""From a result back to its schedule: the simulator repeats the recorded order."""

from __future__ import annotations

from env.problem import Problem
from env.simulation.simulator import Schedule, Score, Simulator
from placement.solving.result import Result


def schedule_of(problem: Problem, result: Result) -> tuple[Score, Schedule]:
    """Score and schedule of a result for this problem, every device running its ops in the result's order.

    Raises:
        MismatchError: the result is infeasible and so has no schedule, or it is for another graph.
    """
    return Simulator(problem).schedule(result.plan())
