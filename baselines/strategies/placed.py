"""`placed_rows`: the device of each op within a replica, where a strategy has the ops of replicas placed one by one.

One place of the mesh is placed by itself, with the costs of its part, on as many devices as the strategy says; all
others follow it, so that the ranks of a collective hold the same ops. The search is as of a graph without a strategy,
within a fixed amount of work, so that one strategy always means the same placement.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from baselines import prices
from baselines.budget import Budget
from baselines.portfolio import searched
from baselines.registry import METHODS, SEARCHES
from baselines.strategies.folding import SPATIAL, grid_of, one_place
from env.cluster import LANE, Cluster
from env.problem import Problem
from graphs.arrays import IntArray
from graphs.opgraph import OpGraph
from graphs.transforms.derived import Derived
from graphs.transforms.splitting import Zero, copies_of, split_as
from graphs.transforms.strategy import Strategy

_SEED, _SEARCH = 0, "local_search"


def placing_s(graph: OpGraph) -> float:
    """Seconds of work in `placed_rows`."""
    return prices.PLACED_OP_S * graph.n_ops


def placed_rows(again: Derived, cluster: Cluster, strategy: Strategy) -> IntArray:
    """int64 [n]: for every op of a graph after recomputation the row of the strategy's devices that it is on.

    An op that runs again does so where it ran first.

    Raises:
        StrategyError: the graph cannot be cut so.
        InfeasibleError: no placement of a part was found that fits.
    """
    what_counts = replace(strategy, bucket_bytes=0, fused_updates=False, reduce="", recompute=(), offload=())
    return _placed(again.graph, again.origin.tobytes(), cluster, what_counts)


@lru_cache(maxsize=8)
def _placed(graph: OpGraph, first: bytes, cluster: Cluster, strategy: Strategy) -> IntArray:
    """`placed_rows`, which strategies share that exchange and keep things in other ways."""
    one = _part(graph, np.frombuffer(first, dtype=np.int64), strategy)
    part, numbers = one_place(cluster, grid_of(cluster, strategy).reshape(strategy.stages, -1), has_hosts=False)
    budget = Budget(placing_s(graph))
    searches = [(_SEARCH, SEARCHES[_SEARCH], 1.0)]
    found = searched(Problem(one.graph, part), _SEED, METHODS, searches, budget, every=False).best.plan
    if budget.interrupted:  # what was found by then would pass for what this strategy means
        raise KeyboardInterrupt
    row_of = np.empty(part.n_devices, dtype=np.int64)
    row_of[numbers[:, 0]] = np.arange(strategy.stages)
    rows = np.zeros(graph.n_ops, dtype=np.int64)
    rows[one.origin] = row_of[found.device]
    return rows


def _part(graph: OpGraph, first: IntArray, strategy: Strategy) -> Derived:
    """One place of the mesh; what comes of one op stays together, and exchanges cost nothing.

    Parts of images are not alike, so the whole graph stands for these.
    """
    axes = [rule.axis() for rule in strategy.mesh if rule.name not in SPATIAL]
    copies = copies_of(graph, axes, folded=True)
    one = Derived.identity(graph)
    if copies is not None:
        zero = Zero.of(strategy.zero, strategy.reduces_each)
        one = split_as(copies, zero, synchronised=strategy.statistics == "sync" and graph.is_training)
    together = np.where(graph.colocation >= 0, graph.colocation, graph.n_ops + first)
    _, group = np.unique(together[one.origin], return_inverse=True)
    pins = tuple(() if each == (LANE,) else each for each in one.graph.pins)
    return replace(one, graph=replace(one.graph, pins=pins, colocation=group.reshape(-1).astype(np.int64)))
