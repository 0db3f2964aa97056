"""What the search over strategies says about a strategy: an estimate, a score, and the outcome of the whole search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphs.transforms.strategy import Strategy


@dataclass(frozen=True)
class Figures:
    """What a strategy takes.

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
    """What a strategy takes, worked out without making its graph."""


@dataclass(frozen=True)
class Scored(Figures):
    """What the simulator says of a strategy that was carried out.

    Attributes:
        is_folded: scored for one of the replicas that do all the same, since the whole graph would be too large.
    """

    is_folded: bool = False


@dataclass(frozen=True)
class Tried:
    """What became of scoring a strategy.

    Attributes:
        scored: None where graph or cluster do not allow it.
        reason: why not.
        seconds: that scoring took.
    """

    scored: Scored | None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class StrategyOutcome:
    """What a search over strategies has found.

    Attributes:
        best: the fastest that fits; None if none does.
        best_of: the fastest of each family that fits, the graph as it is aside, by names of
            `baselines.strategies.searching.families.FAMILIES`; `IN_PARTS` first.
        front: those that no other one beats both in time and in memory, fastest first.
        frugal: the strategy that lacks least memory, by estimate; of use where nothing fits. None where none is legal.
        estimated, scored: how many strategies were estimated, and scored by the simulator.
        refused: why strategies were not considered that one would expect, e.g. that parts of a batch change statistics.
        interrupted: the search was ended by Ctrl-C.
    """

    best: Scored | None
    best_of: Mapping[str, Scored]
    front: tuple[Scored, ...] = ()
    frugal: Estimate | None = None
    estimated: int = 0
    scored: int = 0
    refused: tuple[str, ...] = field(default=())
    interrupted: bool = False
