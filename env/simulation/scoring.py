"""`Scorer`: the objective of a plan, whichever objective the problem has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.loads import loads

if TYPE_CHECKING:
    from env.simulation.simulator import Simulator


class Scorer:
    """Scores plans of one problem by its objective."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._simulator: Simulator | None = None

    @property
    def simulator(self) -> Simulator:
        """Made when first used: it loads the compiler."""
        from env.simulation.simulator import Simulator

        self._simulator = self._simulator or Simulator(self.problem)
        return self._simulator

    def value(self, plan: Plan) -> float:
        """Objective in seconds, infinite where a device's memory does not suffice.

        For throughput, the plan's order changes memory only.
        """
        if self.problem.objective == THROUGHPUT:
            found = loads(self.problem, plan)
            return found.value_s if found.feasible else math.inf
        score = self.simulator.score(plan)
        return score.step_time_s if score.feasible else math.inf
