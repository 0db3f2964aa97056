"""`StepProgress`: how far a process is that runs a step over and over, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepProgress:
    """How far a measurement is.

    Attributes:
        done: steps that have been run.
        expected: how many it will be, as far as can be told.
        step_s: how long the last one took, or before the first how long one is predicted to take.
    """

    done: int
    expected: int
    step_s: float


Report = Callable[[StepProgress], None]


def tell_nobody(progress: StepProgress) -> None:
    """A `Report` for where nobody waits."""
