"""Outcome of a search over strategies: the best, the best of each family, and why families are not possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baselines.strategies.estimating.estimate import Estimate, Figures
from baselines.strategies.searching.families import FAMILIES, HYBRID, IN_PARTS, family_of
from baselines.strategies.searching.ladder import ladder_of
from baselines.strategies.searching.records import Pool, Scored


@dataclass(frozen=True)
class StrategyOutcome:
    """Outcome of a search over strategies.

    Attributes:
        best: the fastest that fits; None if none does.
        best_of: the fastest of each family that fits, the graph as it is aside, by names of
            `baselines.strategies.searching.families.FAMILIES`; `IN_PARTS` first.
        front: those that no other one beats both in time and in memory, fastest first.
        ladder: the best of each of `baselines.strategies.searching.ladder.RUNGS` that is possible, in their order;
            estimates where the simulator did not score it.
        nearest: the fastest that fits by estimate, on several devices; None if none does.
        frugal: the strategy that lacks least memory, by estimate; of use where nothing fits. None where none is legal.
        fitting: all that fit, fastest first.
        beyond: the fastest that fits of what the tool cannot run, and why it cannot, where it is faster than the best.
        estimated, scored: how many strategies were estimated, and scored by the simulator.
        refused: why a family is not possible, e.g. that parts of a batch change statistics, by its name.
        interrupted: the search was ended by Ctrl-C.
    """

    best: Scored | None
    best_of: Mapping[str, Scored]
    front: tuple[Scored, ...] = ()
    ladder: Mapping[str, Figures] = field(default_factory=dict)
    nearest: Estimate | None = None
    frugal: Estimate | None = None
    fitting: tuple[Scored, ...] = ()
    beyond: tuple[Scored, str] | None = None
    estimated: int = 0
    scored: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False


def outcome_of(pool: Pool, is_interrupted: bool) -> StrategyOutcome:
    """The outcome of all estimates and scores in the pool."""
    fitting, estimates = fastest_first(pool), pool.estimates.values()
    best_of: dict[str, Scored] = {}
    for found in fitting:
        if not found.strategy.is_none:
            best_of.setdefault(family_of(found.strategy), found)
    refused = _refusals(pool, best_of)
    return StrategyOutcome(
        best=fitting[0] if fitting else None,
        best_of={name: best_of[name] for name in (IN_PARTS, *FAMILIES) if name in best_of},
        front=tuple(_front(fitting)),
        ladder={name: one for name, one in ladder_of(pool).items() if family_of(one.strategy) not in refused},
        nearest=min(
            (one for one in estimates if one.fits and one.strategy.devices > 1),
            key=lambda estimate: estimate.step_time_s,
            default=None,
        ),
        frugal=min(estimates, key=lambda estimate: (estimate.missing_bytes, estimate.step_time_s), default=None),
        fitting=tuple(fitting),
        beyond=_beyond(pool, fitting),
        estimated=len(estimates),
        scored=len(pool.scored),
        refused=refused,
        interrupted=is_interrupted,
    )


def fastest_first(pool: Pool) -> list[Scored]:
    """Scored strategies that fit, fastest first; of equal ones the shorter text first."""
    fitting = (found for found in pool.scored.values() if found.fits)
    return sorted(fitting, key=lambda found: (found.step_time_s, len(found.strategy.text), found.strategy.text))


def _beyond(pool: Pool, fitting: Sequence[Scored]) -> tuple[Scored, str] | None:
    """The fastest that the tool cannot run, and why, where it is faster than what it can."""
    faster = [one for one in pool.beyond.values() if one.fits]
    one = min(faster, key=lambda one: (one.step_time_s, len(one.strategy.text)), default=None)
    if one is None or (fitting and fitting[0].step_time_s <= one.step_time_s):
        return None
    return one, pool.lacking[one.strategy]


def _refusals(pool: Pool, best_of: Mapping[str, Scored]) -> dict[str, str]:
    """A reason for each family of which nothing is possible; hybrids fail as their parts do.

    A pipeline without micro-batches says nothing of those with some, which there may have been no time for.
    """
    possible = {HYBRID, *best_of, *map(family_of, pool.estimates)}
    reasons: dict[str, str] = {}
    for strategy, reason in pool.refused.items():
        is_plain = strategy.stages > 1 and strategy.micro_batches == 1
        if not is_plain and (family := family_of(strategy)) not in possible:
            reasons.setdefault(family, reason)
    lost = {family: reason for family, reason in pool.unwritten.items() if family not in {HYBRID, *best_of}}
    return lost | reasons


def _front(fitting: Sequence[Scored]) -> Iterator[Scored]:
    """Strategies that need less memory than every faster one; the given ones are sorted, fastest first."""
    least = math.inf
    for found in fitting:
        if found.peak_bytes < least:
            least = found.peak_bytes
            yield found
