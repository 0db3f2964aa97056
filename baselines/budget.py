"""`Budget`, which a search may spend, `SearchHandle`, by which it is watched and stopped, and `Found`, its answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from env.plan import Plan
from env.problem import Problem

ResultT = TypeVar("ResultT")
_POLL_S = 0.1  # how long Ctrl-C may wait


@dataclass
class SearchHandle:
    """A hold on a search that runs in another thread.

    Attributes:
        best_s: the best objective it has found so far, in seconds; infinite before the first.
        is_stopped: it has to end now, with its best.
        is_racing: it is finding out where to begin, and may find something much faster soon.
    """

    best_s: float = math.inf
    is_stopped: bool = False
    is_racing: bool = False

    def note(self, objective_s: float) -> None:
        """The search has found a plan that fits."""
        self.best_s = min(self.best_s, objective_s)


@dataclass
class Budget:
    """How long a search may go on; running from the moment it is made.

    Attributes:
        seconds: wall-clock time, 0 or more.
        evaluations: placements scored or solver branches; with the time unlimited, an answer depends on the seed only.
        target_s: an objective this small is proven optimal: there is nothing left to find.
        interrupted: the user has asked to stop (Ctrl-C).
        handle: of the search that spends it; its parts have the same.
    """

    seconds: float = math.inf
    evaluations: float = math.inf
    target_s: float = 0.0
    interrupted: bool = False
    spent: int = 0
    handle: SearchHandle = field(default_factory=SearchHandle, repr=False)
    _began_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds left, 0 or more; none for a search that was stopped."""
        if self.handle.is_stopped:
            return 0.0
        return max(0.0, self.seconds - (time.monotonic() - self._began_s))

    def evaluations_left(self) -> float:
        """Evaluations left, 0 or more."""
        return max(0.0, self.evaluations - self.spent)

    def spend(self, evaluations: int) -> None:
        """Count evaluations."""
        self.spent += evaluations

    def over(self) -> bool:
        """Whether the search must end now."""
        return self.interrupted or self.left_s() <= 0 or self.evaluations_left() <= 0

    def part(self, fraction: float) -> Budget:
        """A budget of its own with this fraction of what is left; `absorb` it afterwards."""
        evaluations = math.inf if math.isinf(self.evaluations) else math.ceil(fraction * self.evaluations_left())
        return Budget(fraction * self.left_s(), evaluations, self.target_s, self.interrupted, handle=self.handle)

    def part_s(self, seconds: float) -> Budget:
        """A budget of its own with this much time, whatever is left, and all evaluations; `absorb` it afterwards."""
        seconds = math.inf if math.isinf(self.seconds) else seconds
        return Budget(seconds, self.evaluations_left(), self.target_s, self.interrupted, handle=self.handle)

    def absorb(self, part: Budget) -> None:
        """Count what a part has spent."""
        self.spent += part.spent
        self.interrupted |= part.interrupted

    def reached(self, objective_s: float) -> bool:
        """Whether this objective is proven optimal, but for rounding."""
        return objective_s <= self.target_s * (1 + 1e-9)


@dataclass(frozen=True, eq=False)
class Found:
    """The answer of a search.

    Attributes:
        plan: at least as good as every plan it started from.
        lower_bound_s: what the search itself has proved; 0 if nothing.
        evaluations: placements scored.
    """

    plan: Plan
    lower_bound_s: float = 0.0
    evaluations: int = 0


# From plans that fit, best first, to a better one. Without any the search looks for one itself and raises
# `NotFoundError` where it finds none, another `InfeasibleError` where it has proved that there is none.
Search = Callable[[Problem, int, Sequence[Plan], Budget], Found]


def run_interruptible(work: Callable[[], ResultT], stop: Callable[[], None], budget: Budget) -> ResultT:
    """Run a solver that holds no Python lock in a thread, so that it can be ended with its best answer.

    Args:
        work: calls the solver and returns its answer.
        stop: makes `work` return soon; called on Ctrl-C, which is noted in `budget`, or where its search was stopped.

    Raises:
        whatever `work` raises.
    """
    done: list[ResultT] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # handed to the caller below
            failed.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    is_told = False
    while not ended.is_set():
        try:
            ended.wait(_POLL_S)  # Thread.join takes a thread for dead when it is interrupted
            if budget.handle.is_stopped and not is_told:
                is_told = True
                stop()
        except KeyboardInterrupt:
            if budget.interrupted:
                raise  # asked twice: leave at once
            budget.interrupted = True
            stop()
    if failed:
        raise failed[0]
    return done[0]
