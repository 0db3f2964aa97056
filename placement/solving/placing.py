"""`placing`: how a graph is placed as it is, within one budget with a search over strategies.

Given time, a thread of its own places it while strategies are searched, until one of them has beaten it. Where the
answer must depend on evaluations alone, or workers place it, one follows the other.
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Self

from baselines.budget import Budget, SearchHandle
from baselines.strategies.searching.records import Rival
from baselines.strategies.searching.settings import DEFAULTS
from placement.results.result import Result
from placement.solving.methods import AUTO
from placement.solving.solver import Solver

_POLL_S = 0.1  # how long Ctrl-C may wait
_TURN_S = 0.0005  # of Python's lock: the threads of an annealing ask for it often, and hold it briefly


class PlacementSearch(ABC):
    """Placing the graph of a solver by `AUTO`, beside a search over strategies."""

    def __init__(self, solver: Solver, budget: Budget) -> None:
        """
        Args:
            budget: of both; what is spent here is counted there.
        """
        self._solver, self._budget = solver, budget

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    @abstractmethod
    def rival(self) -> Rival:
        """The answer to beat, found in a small part of the budget. Called once, before the others."""

    @abstractmethod
    def best(self, best_s: float) -> Result:
        """The best placement, not looked for any longer where none can beat a strategy's step time. Called once."""

    @abstractmethod
    def give_up(self) -> None:
        """Place no more."""

    def _against(self, known_s: Callable[[], float]) -> Rival:
        return Rival(known_s, DEFAULTS.placing_share, self._solver.lower_bound_s, self.give_up)

    def _is_beaten(self, placed_s: float, best_s: float) -> bool:
        """Whether no placement can be as fast as a strategy that takes `best_s`; any may, before one is known."""
        is_known = not math.isinf(placed_s)
        return best_s <= self._solver.lower_bound_s or (is_known and Rival(lambda: placed_s).is_beaten_by(best_s))

    def _counted(self, result: Result) -> Result:
        self._budget.spend(result.evaluations or 0)
        self._budget.interrupted |= result.interrupted
        return result


class _InTurn(PlacementSearch):
    """First a little, and once strategies have been searched with what is left; with all evaluations in any case.

    Strategies count by themselves, and the same seed takes the same way again and further, so that with as many
    evaluations the answer is never worse than what `AUTO` finds alone.
    """

    _quick: Result

    def rival(self) -> Rival:
        budget, share = self._budget, DEFAULTS.placing_quick_share
        self._quick = self._placed(share * budget.seconds, share * budget.evaluations)
        return self._against(lambda: _value_s(self._quick))

    def best(self, best_s: float) -> Result:
        budget, quick_s = self._budget, _value_s(self._quick)
        if self._is_beaten(quick_s, best_s) or budget.interrupted:
            return self._counted(self._quick)
        is_near = quick_s <= DEFAULTS.near_placed * best_s and not math.isinf(quick_s)
        seconds = budget.left_s() if is_near else min(budget.left_s(), DEFAULTS.placing_share * budget.seconds)
        return self._counted(min(self._quick, self._placed(seconds, budget.evaluations), key=_value_s))

    def give_up(self) -> None:
        """It has not begun, or has ended."""

    def _placed(self, seconds: float, evaluations: float) -> Result:
        """The placement found within limits; an infinite one is no limit."""
        limits = None if math.isinf(seconds) else seconds, None if math.isinf(evaluations) else math.ceil(evaluations)
        result = self._solver.solve(AUTO, *limits)
        self._budget.interrupted |= result.interrupted  # also where it is not the better one
        return result


class _Alongside(PlacementSearch):
    """In a thread of its own, so that it loses no time, and cores that one of both leaves idle serve the other."""

    def __init__(self, solver: Solver, budget: Budget) -> None:
        super().__init__(solver, budget)
        self._handle = SearchHandle()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._result: Future[Result] | None = None
        self._usual_s = sys.getswitchinterval()
        self._began_s = time.monotonic()

    def rival(self) -> Rival:
        quick_s = min(DEFAULTS.placing_quick_share * self._budget.seconds, DEFAULTS.most_placing_quick_s)
        most_s = DEFAULTS.placing_share * self._budget.seconds
        self._began_s = time.monotonic()
        sys.setswitchinterval(min(_TURN_S, self._usual_s))
        self._result = self._pool.submit(self._solver.solve, AUTO, self._budget.left_s(), handle=self._handle)

        def is_known() -> bool:
            known = not math.isinf(self._handle.best_s)
            return time.monotonic() - self._began_s > (quick_s if known else most_s)

        self._await(is_known)
        return replace(self._against(lambda: self._handle.best_s), settle=self._settle)

    def best(self, best_s: float) -> Result:
        assert self._result is not None, "there is no rival yet"
        placed_s = self._handle.best_s
        if self._is_beaten(placed_s, best_s) or placed_s > DEFAULTS.near_placed * best_s or self._budget.interrupted:
            self.give_up()
        self._await(lambda: False)
        return self._counted(self._result.result())

    def give_up(self) -> None:
        self._handle.is_stopped = True

    def _settle(self, is_enough: Callable[[], bool]) -> None:
        """Wait while what is known will soon be much better, at most until it `is_enough`."""
        until_s = self._began_s + DEFAULTS.settled_share * self._budget.seconds
        self._await(lambda: not self._handle.is_racing or is_enough() or time.monotonic() > until_s)

    def __exit__(self, *_: object) -> None:
        self.give_up()
        self._pool.shutdown()
        sys.setswitchinterval(self._usual_s)

    def _await(self, is_enough: Callable[[], bool]) -> None:
        """Wait for the result, or until something else is enough."""
        assert self._result is not None
        while not (self._result.done() or is_enough()):
            try:
                wait([self._result], timeout=_POLL_S)
            except KeyboardInterrupt:
                if self._budget.interrupted:
                    raise  # asked twice: leave at once
                self._budget.interrupted = True
                self.give_up()


def placing(solver: Solver, budget: Budget, by_workers: bool = False) -> PlacementSearch:
    """How the graph of a solver is placed beside a search over strategies, within the budget of both.

    Args:
        by_workers: the solver's searches are done elsewhere.
    """
    is_timed = 0 < budget.seconds < math.inf and math.isinf(budget.evaluations)
    return _Alongside(solver, budget) if is_timed and not by_workers else _InTurn(solver, budget)


def _value_s(result: Result) -> float:
    return math.inf if result.objective_s is None else result.objective_s
