"""`PlacedBeside`: a graph placed as it is within one budget with a search over strategies, before it and after it."""

from __future__ import annotations

import math

from baselines.budget import Budget
from baselines.strategies.searching.records import Rival
from baselines.strategies.searching.settings import DEFAULTS
from placement.results.result import Result
from placement.solving.methods import AUTO
from placement.solving.solver import Solver


class PlacedBeside:
    """First a little, and once strategies have been searched with what is left; with all evaluations in any case.

    Strategies count by themselves, and the same seed takes the same way again and further, so that with as many
    evaluations the answer is never worse than what `AUTO` finds alone.
    """

    def __init__(self, solver: Solver, budget: Budget) -> None:
        """
        Args:
            budget: of both; what is spent here is counted there.
        """
        self._solver, self._budget = solver, budget
        share = DEFAULTS.placing_quick_share
        quick_s = min(share * budget.seconds, DEFAULTS.most_placing_quick_s)
        self._quick = self._placed(math.inf if math.isinf(budget.seconds) else quick_s, share * budget.evaluations)

    def rival(self) -> Rival:
        """The answer to beat, found in a small part of the budget."""
        return Rival(_value_s(self._quick), DEFAULTS.placing_share, self._solver.lower_bound_s)

    def best(self, best_s: float) -> Result:
        """The best placement, not looked for any longer where none can beat a strategy's step time. Called once."""
        budget, quick_s = self._budget, _value_s(self._quick)
        if self._is_beaten(quick_s, best_s) or budget.interrupted or budget.limit.is_over():
            return self._counted(self._quick)
        is_near = quick_s <= DEFAULTS.near_placed * best_s and not math.isinf(quick_s)
        seconds = budget.left_s() if is_near else min(budget.left_s(), DEFAULTS.placing_share * budget.seconds)
        return self._counted(min(self._quick, self._placed(seconds, budget.evaluations), key=_value_s))

    def _is_beaten(self, placed_s: float, best_s: float) -> bool:
        """Whether no placement can be as fast as a strategy that takes `best_s`; any may, before one is known."""
        is_known = not math.isinf(placed_s)
        return best_s <= self._solver.lower_bound_s or (is_known and Rival(placed_s).is_beaten_by(best_s))

    def _counted(self, result: Result) -> Result:
        self._budget.spend(result.evaluations or 0)
        return result

    def _placed(self, seconds: float, evaluations: float) -> Result:
        """The placement found within limits; an infinite one is no limit."""
        part = Budget(
            seconds, math.inf if math.isinf(evaluations) else math.ceil(evaluations), limit=self._budget.limit
        )
        result = self._solver.solve_within(AUTO, part)
        self._budget.spend(0, part.worked_s)
        self._budget.interrupted |= part.interrupted  # also where it is not the better one
        return result


def _value_s(result: Result) -> float:
    return math.inf if result.objective_s is None else result.objective_s
