"""`applied`: a strategy carried out on a graph and a cluster: the derived graph, where and in which order it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from baselines.strategies.orders import PipelineOrder, pipeline_order
from baselines.strategies.stages import balanced_stages
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from graphs.arrays import FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.collectives import bucketed, reduce
from graphs.transforms.derived import Derived
from graphs.transforms.recompute import recompute
from graphs.transforms.sequencing import sequenced
from graphs.transforms.splitting import Zero, split
from graphs.transforms.splitting.sharding import STATISTICS
from graphs.transforms.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Applied:
    """A strategy on a graph and a cluster.

    Attributes:
        strategy: what was asked for.
        derived: the graph it makes; its source is the graph as given.
        problem: that graph on the cluster, with lanes where it communicates.
        plan: device of every op, and the order that a pipeline prescribes.
        exchanged: the same strategy's graph with collectives not spelt out, for counting them.
        stage: int64 [n], virtual stage of every op; all 0 without a pipeline.
    """

    strategy: Strategy
    derived: Derived
    problem: Problem
    plan: Plan
    exchanged: Derived
    stage: IntArray


def applied(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Applied:
    """Carry out a strategy.

    The devices are the cluster's, CPUs beside other devices left out, in their order: stages first, then the axes of
    the mesh, tensor parallelism innermost, so that its parts are neighbours.

    Raises:
        StrategyError: the mesh is larger than the cluster, or the graph does not allow the strategy.
    """
    devices = cluster.compute_devices
    if strategy.devices > len(devices):
        raise StrategyError(
            f"strategy {strategy.text!r} needs {strategy.devices} devices, and cluster {cluster.name!r} has "
            f"{len(devices)}; take a smaller mesh or a larger cluster."
        )
    _check_statistics(graph, strategy)
    again = recompute(graph, strategy.recompute) if strategy.recompute else Derived.identity(graph)
    axes = [rule.axis() for rule in strategy.mesh]
    whole = split(again.graph, axes, strategy.micro_batches, Zero(strategy.zero) if strategy.zero else None)
    exchanged = bucketed(whole, strategy.bucket_bytes) if strategy.bucket_bytes else whole
    spelt_out = reduce(exchanged, strategy.reduce or "ring") if exchanged.collectives else exchanged
    stage, order = np.zeros(again.graph.n_ops, dtype=np.int64), None
    numbers: FloatArray | None = None
    if strategy.stages > 1:
        order = _order(strategy)
        op_s = Problem(again.graph, cluster).op_s[:, devices].mean(axis=1)
        stage, is_apart = balanced_stages(again.graph, op_s, len(order.devices))
        spelt_out, numbers = sequenced(spelt_out, np.where(is_apart, -1, stage), order.sequences)
    target = cluster.with_lanes() if exchanged.collectives else cluster
    of_op = stage[spelt_out.origin]
    device = _devices(spelt_out, target, devices, of_op, order)
    derived = replace(spelt_out, source=graph, origins=again.origin[spelt_out.origins])
    return Applied(strategy, derived, Problem(derived.graph, target), Plan(device, numbers), exchanged, of_op)


def _order(strategy: Strategy) -> PipelineOrder:
    chunks = strategy.chunks
    if chunks == 1 and strategy.order in ("interleaved", "zbv", "v-half"):
        chunks = 2
    return pipeline_order(strategy.order, strategy.stages, strategy.micro_batches, chunks)


def _devices(
    derived: Derived, cluster: Cluster, devices: IntArray, stage: IntArray, order: PipelineOrder | None
) -> IntArray:
    """int64 [n]: device of every op; of communication the lane of its device."""
    places = int(np.prod([axis.size for axis in derived.mesh], dtype=np.int64))
    rank = stage if order is None else np.array(order.devices, dtype=np.int64)[stage]
    device = devices[rank * places + derived.part]
    lanes = np.array(["lane" in pins for pins in derived.graph.pins], dtype=np.bool_)
    if lanes.any():
        device = np.where(lanes, cluster.lane_of[device], device)
    return np.asarray(device, dtype=np.int64)


def _check_statistics(graph: OpGraph, strategy: Strategy) -> None:
    """Statistics of a batch are those of the whole batch, unless the strategy says that they may be local."""
    parts = strategy.micro_batches
    for rule in strategy.mesh:
        if rule.name in ("dp", "hp", "wp"):
            parts *= rule.size
    if parts == 1 or strategy.statistics != "exact" or not graph.is_training:
        return
    found = next((i for i, kind in enumerate(graph.kinds) if STATISTICS in kind), None)
    if found is not None:
        raise StrategyError(
            f"strategy {strategy.text!r} cuts the batch, and op {graph.op_names[found]!r} works with statistics of the "
            "whole batch, which would change; add '| statistics=local' to take those of each part, or cut something "
            "else."
        )
