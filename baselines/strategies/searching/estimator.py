"""`Estimator`: what a strategy takes, quickly, for choosing which ones to score exactly."""

from __future__ import annotations

from baselines.strategies.searching.records import Estimate
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy


class Estimator:
    """Estimates of strategies for one graph on one cluster."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster

    def estimate(self, strategy: Strategy) -> Estimate:
        """What a strategy takes.

        Raises:
            StrategyError: graph or cluster do not allow it.
        """
        found = scored(self.graph, self.cluster, strategy)
        return Estimate(strategy, found.step_time_s, found.peak_bytes, found.missing_bytes)
