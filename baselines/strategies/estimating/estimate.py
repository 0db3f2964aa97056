"""`Estimate`: what a strategy takes, before it is scored, and the figures that a score has, too."""

from __future__ import annotations

from dataclasses import dataclass

from graphs.transforms.strategy import Strategy


@dataclass(frozen=True)
class Figures:
    """Time and memory that a strategy takes.

    Attributes:
        strategy: of which.
        step_time_s: seconds of a step.
        peak_bytes: memory of the fullest device.
        missing_bytes: what the device that lacks most is short of; 0 where everything fits.
    """

    strategy: Strategy
    step_time_s: float
    peak_bytes: int
    missing_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the memory of every device suffices."""
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Estimate(Figures):
    """Time and memory of a strategy, worked out without making its graph."""
