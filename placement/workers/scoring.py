"""`many_scored`: strategies scored side by side, each a task for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from baselines.strategies.searching.records import Tried
    from placement.workers.runner import Runner, Shared


def many_scored(runner: Runner, strategies: Sequence[Strategy]) -> list[Tried]:
    """What the simulator says of each, in their order."""
    return runner.run(score_strategy, strategies)


def score_strategy(shared: Shared, strategy: Strategy) -> Tried:
    """One strategy, carried out and scored."""
    from baselines.strategies.searching.scoring import tried  # loads all transforms

    return tried(shared.graph, shared.cluster, strategy)
