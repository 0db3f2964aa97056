"""`Scorer`: the objective of a placement, whichever objective the problem has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from env.problem import THROUGHPUT, Problem
from env.simulation.loads import loads

if TYPE_CHECKING:
    from env.simulation.simulator import Simulator


class Scorer:
    """Scores placements of one problem by its objective."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._simulator: Simulator | None = None

    @property
    def simulator(self) -> Simulator:
        """Made when first used: it loads the compiler."""
        from env.simulation.simulator import Simulator

        self._simulator = self._simulator or Simulator(self.problem)
        return self._simulator

    def value(
        self, device: ArrayLike, order: ArrayLike | None = None, transfer_order: ArrayLike | None = None
    ) -> float:
        """Objective in seconds, infinite where a device's memory does not suffice.

        Args:
            device: int [n].
            order: float [n], an explicit order; the default priority without. Of a throughput it changes memory only.
            transfer_order: int [x, 2], makes it a fixed sequence (docs/score.md).
        """
        if self.problem.objective == THROUGHPUT:
            found = loads(self.problem, device)
            return found.value_s if found.memory(order, transfer_order).fits else math.inf
        score = self.simulator.score(device, order=order, transfer_order=transfer_order)
        return score.step_time_s if score.feasible else math.inf
