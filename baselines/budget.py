"""`Budget`, the work that a search may do, `WallLimit`, which stands on top of it, and `Found`, its answer."""

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
class WallLimit:
    """Wall-clock time that all parts of a search may take together, from the moment it is made.

    Attributes:
        has_ended: it has ended something, so that the answer depends on how fast this machine was.
    """

    seconds: float = math.inf
    has_ended: bool = False
    _began_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds left, 0 or more."""
        return max(0.0, self.seconds - (time.monotonic() - self._began_s))

    def is_over(self) -> bool:
        """True if no time is left; sets `has_ended` then."""
        return not self.has_time_for(0.0)

    def has_time_for(self, seconds: float) -> bool:
        """True if more than this many seconds are left; sets `has_ended` if not."""
        has_time = self.left_s() > seconds
        self.has_ended |= not has_time
        return has_time


@dataclass
class Budget:
    """How much work a search may do.

    Seconds are not read from a clock: each piece of work counts for as long as it takes on a quiet machine of two cores
    (`baselines.prices`). So an answer depends on the seed alone, whatever else the machine does.

    Attributes:
        seconds: such seconds, 0 or more.
        evaluations: placements scored or solver branches.
        target_s: an objective this small is proven optimal: there is nothing left to find.
        interrupted: the user has asked to stop (Ctrl-C).
        spent, worked_s: evaluations and seconds so far.
        limit: of the clock, on top; one for all parts.
    """

    seconds: float = math.inf
    evaluations: float = math.inf
    target_s: float = 0.0
    interrupted: bool = False
    spent: int = 0
    worked_s: float = 0.0
    limit: WallLimit = field(default_factory=WallLimit, repr=False)

    def left_s(self) -> float:
        """Seconds of work left, 0 or more; none once the clock's limit is over."""
        return 0.0 if self.limit.is_over() else max(0.0, self.seconds - self.worked_s)

    def evaluations_left(self) -> float:
        """Evaluations left, 0 or more."""
        return max(0.0, self.evaluations - self.spent)

    def spend(self, evaluations: int, seconds: float = 0.0) -> None:
        """Count evaluations and seconds of work."""
        self.spent += evaluations
        self.worked_s += seconds

    def over(self) -> bool:
        """True if the search must end now."""
        return self.interrupted or self.left_s() <= 0 or self.evaluations_left() <= 0

    def was_cut(self) -> bool:
        """True if Ctrl-C or the clock has ended it early."""
        return self.interrupted or self.limit.has_ended

    def part(self, fraction: float) -> Budget:
        """A budget of its own with this fraction of what is left; `absorb` it afterwards."""
        evaluations = math.inf if math.isinf(self.evaluations) else math.ceil(fraction * self.evaluations_left())
        return Budget(fraction * self.left_s(), evaluations, self.target_s, self.interrupted, limit=self.limit)

    def part_s(self, seconds: float) -> Budget:
        """A budget of its own with this much work, whatever is left, and all evaluations; `absorb` it afterwards."""
        seconds = math.inf if math.isinf(self.seconds) else seconds
        return Budget(seconds, self.evaluations_left(), self.target_s, self.interrupted, limit=self.limit)

    def absorb(self, part: Budget) -> None:
        """Count what a part has spent."""
        self.spend(part.spent, part.worked_s)
        self.interrupted |= part.interrupted

    def reached(self, objective_s: float) -> bool:
        """True if this objective is proven optimal, but for rounding."""
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


@dataclass(frozen=True)
class Limits:
    """Limits that a user sets; None where one is left open.

    Attributes:
        budget_s: seconds of work (`Budget.seconds`).
        evaluations: placements scored, or strategies.
        limit_s: seconds by the clock, on top.
    """

    budget_s: float | None = None
    evaluations: int | None = None
    limit_s: float | None = None

    def budget(self, default_s: float) -> Budget:
        """A budget that begins now; ``default_s`` seconds where neither seconds nor evaluations are set."""
        seconds = self.budget_s
        if seconds is None:
            seconds = default_s if self.evaluations is None else math.inf if self.evaluations else 0.0
        evaluations = math.inf if self.evaluations is None else self.evaluations
        limit = WallLimit(math.inf if self.limit_s is None else self.limit_s)
        return Budget(seconds, evaluations, limit=limit)


NO_LIMITS = Limits()


# From plans that fit, best first, to a better one. Without any the search looks for one itself and raises
# `NotFoundError` where it finds none, another `InfeasibleError` where it has proved that there is none.
Search = Callable[[Problem, int, Sequence[Plan], Budget], Found]


def run_interruptible(work: Callable[[], ResultT], stop: Callable[[], None], budget: Budget) -> ResultT:
    """Run a solver that holds no Python lock in a thread, so that it can be ended with its best answer.

    Args:
        work: calls the solver and returns its answer.
        stop: makes `work` return soon; called on Ctrl-C, which is noted in `budget`, or once the clock's limit
            is over.

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
            if not is_told and budget.limit.is_over():
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
