"""`SearchSettings`: every number by which the search over strategies is tuned, in one printable record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """How a search over strategies spends its budget, and what it takes for promising.

    None of them changes what a strategy's score is. Those from `scoring_share` on share a budget with placements.

    Attributes:
        sketch_share, climb_share, grid_share: of the time, when each part of the estimating ends.
        climbs: meshes from which hill climbing starts.
        most_steps: of one climb.
        patience: strategies scored in a row without a better one, after which the search ends.
        slack: times the best: estimates that are worth scoring.
        near_memory: of a device's memory: estimates that lack no more may fit.
        batch, round_share: strategies scored before the next are chosen, side by side where there are workers, and
            their part of what is left: the answer must not depend on the number of workers.
        most_in_vain: refused strategies that communicate alike, after which no other one is tried.
        most_estimates: at most, and estimates_each for each strategy that may be scored: evaluations may be all that
            limits them.
        far_behind: times the rival: above it an estimate is slower indeed, where not every mesh was estimated.
        hopeless, enough: where so many estimates are at least `hopeless` times as slow as the rival, no further mesh is
            estimated.
        behind_share, most_behind: of the time, where all estimates are slower than the rival; divided by how many times
            they are slower, at most `most_behind`.
        beaten: times as fast as the rival: no improvement of it could make up for that.
        hope: quantile of the estimates' errors that corrects an estimate where nothing like it was scored.
        weary: added to an estimate for each strategy like it that was scored and brought no gain.
        scoring_share: of the budget goes into this search; in the rest the best is carried out once more.
        quick_s: for this search, whatever the budget.
        placements_each: evaluations of placements that cost as much as one strategy's.
        placing_share: of the budget is kept for placing the graph as it is, unless a strategy has won.
        placing_quick_share, most_placing_quick_s: of the budget, and at most so many seconds: time to place the graph
            before any strategy is estimated.
        near_placed: times the best strategy: placements below it may win.
        beyond_share, most_lacking, most_beyond: of the time, at most so many estimates, and scores, tell what it costs
            that the tool of the answer cannot run every strategy.
        placed_share, most_placed: of the time, for at most so many meshes whose parts are placed, where that may win.
        placed_slack: times the best: what placed parts may promise, which is the most that there is to gain.
    """

    sketch_share: float = 0.2
    climb_share: float = 0.35
    grid_share: float = 0.5
    climbs: int = 8
    most_steps: int = 40
    patience: int = 24
    slack: float = 1.25
    near_memory: float = 0.15
    batch: int = 8
    round_share: float = 0.25
    most_in_vain: int = 2
    most_estimates: int = 20_000
    estimates_each: int = 200
    far_behind: float = 1.1
    hopeless: float = 2.0
    enough: int = 24
    behind_share: float = 0.35
    most_behind: float = 4.0
    beaten: float = 2.0
    hope: float = 0.25
    weary: float = 0.01
    scoring_share: float = 0.9
    quick_s: float = 1.0
    placements_each: int = 100
    placing_share: float = 0.2
    placing_quick_share: float = 0.05
    most_placing_quick_s: float = 5.0
    near_placed: float = 1.5
    beyond_share: float = 0.1
    most_lacking: int = 200
    most_beyond: int = 3
    placed_share: float = 0.2
    placed_slack: float = 1.1
    most_placed: int = 2


DEFAULTS = SearchSettings()
