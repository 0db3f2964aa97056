"""How often a step is run until its median is known: often where it is short or noisy, a few times where it is long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from placement.measuring.machine.figures import relative_spread
from placement.measuring.machine.speeds import synchronise
from placement.processes.starting import Report, StepProgress, tell_nobody

# Standard error of a median, in interquartile ranges over the square root of the number of samples, of normal samples:
# 1.2533 standard deviations, of which there are 1.349 in an interquartile range.
_ERROR_OF_MEDIAN = 1.2533 / 1.349


@dataclass(frozen=True)
class Repeats:
    """When a step has been run often enough.

    Attributes:
        dropped: most steps that warm up.
        dropped_s: the warm-up ends when they took this long, but not before the first.
        least: fewest steps that count, where they are long.
        settled: fewest steps that count before their median can be known well enough.
        most: most steps that count.
        budget_s: no more than the fewest are run when those that count took this long.
        precision: a median is known well enough where its standard error is no larger than this share of it.
    """

    dropped: int = 5
    dropped_s: float = 5.0
    least: int = 3
    settled: int = 10
    most: int = 200
    budget_s: float = 10.0
    precision: float = 0.01

    @classmethod
    def exactly(cls, steps: int, dropped: int) -> Repeats:
        """That many steps, of which the first ``dropped`` warm up."""
        counted = steps - dropped
        return cls(dropped, math.inf, counted, counted, counted, math.inf, 0.0)

    def warm_up(self, times_s: Sequence[float]) -> int:
        """How many of these steps, the first ones, warm up."""
        total_s = 0.0
        for number, seconds in enumerate(times_s):
            if number >= self.dropped or (number and total_s >= self.dropped_s):
                return number
            total_s += seconds
        return len(times_s)

    def is_over(self, times_s: Sequence[float]) -> bool:
        """True if these steps, warm-up and all, are enough."""
        counted = times_s[self.warm_up(times_s) :]
        n = len(counted)
        if n < self.least:
            return False
        if n >= self.most or sum(counted) >= self.budget_s:
            return True
        error = _ERROR_OF_MEDIAN * relative_spread(counted) / math.sqrt(n)
        return n >= self.settled and error <= self.precision

    def expected(self, times_s: Sequence[float]) -> int:
        """How many steps it will be in all, warm-up included, if the next ones take as long as the last one.

        Short steps that differ may need more.
        """
        last_s, done = times_s[-1], self.warm_up(times_s)
        left_s = self.dropped_s - sum(times_s)
        warming = min(self.dropped, max(1, done + _fitting(left_s, last_s)))
        warm = done if done < len(times_s) else max(done, warming)
        counted = min(max(self.least, _fitting(self.budget_s, last_s)), max(self.least, self.settled), self.most)
        return max(warm + counted, len(times_s))


def beforehand(repeats: Repeats, predicted_s: float) -> StepProgress:
    """The progress before the first step."""
    return StepProgress(0, repeats.expected([predicted_s]), predicted_s)


def _fitting(seconds: float, step_s: float) -> int:
    """How many steps it takes to fill some time."""
    return math.ceil(min(1e9, max(0.0, seconds) / max(step_s, 1e-9)))


def seconds_of(step: Callable[[], object], places: Sequence[torch.device] = ()) -> float:
    """Seconds of a step, run once, until these devices have done what it started."""
    start_s = perf_counter()
    step()
    for place in places:
        synchronise(place)
    return perf_counter() - start_s


def run_steps(
    step: Callable[[], float],
    repeats: Repeats,
    all_gather: Callable[[float], list[float]] = lambda seconds: [seconds],
    report: Report = tell_nobody,
) -> tuple[list[float], int]:
    """Run a step until that is enough, in as many processes as run it together.

    Args:
        step: runs once; returns the seconds it took.
        all_gather: called before each step and after the last one, with what the step before took here (0 before the
            first): what it took each process, by rank, once all of them are there.

    Returns:
        The seconds of each step here, and how many of them, the first ones, warm up. A step takes as long as the
        slowest process, and by that all of them agree when to stop.
    """
    own_s: list[float] = []
    slowest_s: list[float] = []
    all_gather(0.0)
    while not repeats.is_over(slowest_s):
        own_s.append(step())
        slowest_s.append(max(all_gather(own_s[-1])))
        report(StepProgress(len(slowest_s), repeats.expected(slowest_s), slowest_s[-1]))
    return own_s, repeats.warm_up(slowest_s)
