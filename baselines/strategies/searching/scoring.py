"""`scored`: a strategy carried out and scored by the simulator."""

from __future__ import annotations

import numpy as np

from baselines.strategies.applied import applied
from baselines.strategies.searching.records import Scored
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy


def scored(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Scored:
    """Carry out a strategy and score it.

    Raises:
        StrategyError: graph or cluster do not allow it.
    """
    what = applied(graph, cluster, strategy)
    score = Simulator(what.problem).score(what.plan)
    over = score.peak_bytes - what.problem.capacity_bytes
    return Scored(strategy, score.step_time_s, int(np.max(score.peak_bytes)), max(0, int(np.max(over))))
