"""`look_beyond`: strategies that the tool of a search cannot run, scored to tell what the tool costs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from baselines.budget import Budget
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.outcome import fastest_first
from baselines.strategies.searching.records import Pool, Tried
from graphs.errors import StrategyError
from graphs.transforms.strategy import Strategy


def look_beyond(
    pool: Pool,
    budget: Budget,
    kept_s: float,
    estimator: Estimator,
    tried: Callable[[Sequence[Strategy]], Iterable[Tried]],
    scoring_s: Callable[[Estimate], float],
) -> None:
    """Estimate what is lacking, and score the few that promise to be faster than the best of what is not.

    Args:
        kept_s: seconds of the budget that are left for this; half of them for estimates.
        tried: scores strategies.
        scoring_s: how long scoring a strategy may take.
    """
    best = next(iter(fastest_first(pool)), None)
    promising: list[tuple[float, Estimate]] = []
    for strategy in itertools.islice(_in_turn(pool), pool.settings.most_lacking):
        if budget.interrupted or budget.left_s() < kept_s / 2:
            break
        with contextlib.suppress(StrategyError):
            found = estimator.estimate(strategy)
            step_s = pool.corrected_s(found)
            if found.fits and (best is None or step_s < best.step_time_s):
                promising.append((step_s, found))
    for _, found in sorted(promising, key=lambda pair: pair[0])[: pool.settings.most_beyond]:
        if budget.interrupted or scoring_s(found) > budget.left_s():
            break
        budget.spend(1)
        (made,) = tried([found.strategy])
        if made.scored is not None:
            pool.beyond[found.strategy] = made.scored


def _in_turn(pool: Pool) -> Iterator[Strategy]:
    """Strategies that are lacking: in turn those met last, which are near the best, and those met first."""
    met = list(pool.lacking)
    return iter(dict.fromkeys(one for pair in zip(reversed(met), met, strict=True) for one in pair))
