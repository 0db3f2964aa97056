"""`scored`: a strategy carried out and scored by the simulator."""

from __future__ import annotations

import numpy as np

from baselines import prices
from baselines.strategies.applied import applied
from baselines.strategies.folding import expected_ops, is_to_be_folded
from baselines.strategies.searching.records import Scored, Tried
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError, StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy


def scored(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Scored:
    """Carry out a strategy and score it; folded where its graph would be too large (`baselines.strategies.folding`).

    Raises:
        StrategyError: graph or cluster do not allow it.
    """
    what = applied(graph, cluster, strategy, folded=is_to_be_folded(graph, cluster, strategy))
    score = Simulator(what.problem).score(what.plan)
    over = score.peak_bytes - what.problem.capacity_bytes
    # Offloaded bytes do not count as memory of the devices; a host must have room for them, too.
    hosts = what.problem.cluster.host_devices if strategy.offload else np.array([-1])
    peak_bytes = int(np.max(np.delete(score.peak_bytes, hosts[hosts >= 0])))
    missing_bytes = max(0, int(np.max(over)))
    return Scored(strategy, score.step_time_s, peak_bytes, missing_bytes, what.is_folded)


def tried(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Tried:
    """`scored`, or why it is not possible."""
    try:
        return Tried(scored(graph, cluster, strategy))
    except (StrategyError, InfeasibleError) as error:
        return Tried(None, str(error))


def scoring_s(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> float:
    """Seconds of work in `scored`, by about how many ops the graph has that it makes."""
    is_folded = is_to_be_folded(graph, cluster, strategy)
    ops = graph.n_ops * strategy.micro_batches if is_folded else expected_ops(graph, strategy)
    return prices.SCORING_OP_S * ops
