"""`result_of`: a plan that was made elsewhere, an agent's say, as a `Result`."""

from __future__ import annotations

import time

from env.objectives import LATENCY
from env.plan import Plan, Priority
from env.problem import Problem
from placement.results.result import Result
from placement.solving.solver import Attempt, Finding, Solver

AGENT = "agent"  # the method of a placement that an episode has made


def result_of(problem: Problem, plan: Plan, method: str = AGENT) -> Result:
    """The result that a method has which proposes the plan; without an answer where it does not fit.

    Raises:
        InfeasibleError: the graph fits nowhere on the cluster, whatever the placement.
    """
    began_s = time.perf_counter()
    solver = Solver(problem.graph, problem.cluster, 0, LATENCY, Priority.LONGEST_PATH.value)
    return solver.result(Finding(plan, method), Attempt(method, began_s), as_given=True)
