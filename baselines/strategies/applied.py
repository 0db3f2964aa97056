"""`applied`: a strategy carried out on a graph and a cluster: the derived graph, where and in which order it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from baselines.strategies.allowed import check_allowed, check_independence, remarks
from baselines.strategies.costs import pipeline_costs
from baselines.strategies.devices import devices_of
from baselines.strategies.memory_order import MEMORY_ORDER, memory_order
from baselines.strategies.orders import PipelineOrder, pipeline_order
from baselines.strategies.stage_cuts import pipeline_stages
from env.cluster import LANE, Cluster
from env.collective_times import quickest
from env.collectives import fused_s
from env.plan import Plan
from env.problem import Problem
from graphs.arrays import FloatArray, IntArray
from graphs.errors import MismatchError, StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.collectives import ALGORITHMS, bucketed, reduce
from graphs.transforms.derived import Derived
from graphs.transforms.recomputing import recompute
from graphs.transforms.sequencing import sequenced
from graphs.transforms.splitting import Zero, split
from graphs.transforms.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Applied:
    """A strategy on a graph and a cluster.

    Attributes:
        strategy: what was asked for.
        derived: the graph it makes; its source is the graph as given.
        problem: that graph on the cluster, with lanes where it communicates.
        plan: device of every op, and the order that a pipeline prescribes.
        unordered: the derived graph before barriers put a pipeline's blocks in order, which come last in `derived`; its
            source is the graph as recomputation leaves it.
        exchanged: the same strategy's graph with collectives not spelt out, for counting them.
        stage: int64 [n], virtual stage of every op; all 0 without a pipeline.
        note: what a reader should know, e.g. that parts are uneven; "" for nothing.
    """

    strategy: Strategy
    derived: Derived
    problem: Problem
    plan: Plan
    unordered: Derived
    exchanged: Derived
    stage: IntArray
    note: str = ""


def applied(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Applied:
    """Carry out a strategy.

    The devices are those that the strategy names, else the cluster's in their order, CPUs beside other devices left
    out: stages first, then the axes of the mesh, tensor parallelism innermost, so that its parts are neighbours.

    Raises:
        StrategyError: graph or cluster do not allow the strategy.
        InfeasibleError: no order keeps to the memory, where the strategy asks for one that does.
    """
    check_allowed(graph, cluster, strategy)
    devices = devices_of(cluster, strategy)
    again = recompute(graph, strategy.recompute) if strategy.recompute else Derived.identity(graph)
    axes = [rule.axis() for rule in strategy.mesh]
    zero = Zero(strategy.zero) if strategy.zero else None
    whole = split(again.graph, axes, strategy.micro_batches, zero, synchronised=strategy.statistics == "sync")
    stage, order = np.zeros(again.graph.n_ops, dtype=np.int64), None
    is_apart = np.zeros(again.graph.n_ops, dtype=np.bool_)
    if strategy.stages > 1:
        # A single micro-batch leaves no choice of order.
        order = None if strategy.order == MEMORY_ORDER and strategy.micro_batches > 1 else order_of(strategy)
        stage, is_apart = pipeline_stages(again.graph, cluster, strategy, devices)
    exchanged = bucketed(whole, strategy.bucket_bytes, stage) if strategy.bucket_bytes else whole
    target = cluster.with_lanes() if exchanged.collectives else cluster
    unordered = _spelt_out(exchanged, strategy.reduce, cluster, _homes(exchanged, devices, stage, order))
    spelt_out, numbers = unordered, None
    if strategy.stages > 1:
        in_blocks = np.where(is_apart, -1, stage)
        try:
            if order is None:
                device = _devices(unordered, target, devices, stage, None)
                costs = pipeline_costs(Problem(unordered.graph, target), unordered, in_blocks, device)
                order = memory_order(costs, strategy.micro_batches)
            spelt_out, numbers = sequenced(unordered, in_blocks, order.sequences)
        except MismatchError as error:
            check_independence(whole, strategy)
            raise StrategyError(f"strategy {strategy.text!r} is not possible: {error}") from None
    elif strategy.micro_batches > 1 or strategy.recompute:
        numbers = _program_order(spelt_out)
    of_op = stage[spelt_out.origin]
    device = _devices(spelt_out, target, devices, stage, order)
    derived = replace(spelt_out, source=graph, origins=again.origin[spelt_out.origins])
    return Applied(
        strategy=strategy,
        derived=derived,
        problem=Problem(derived.graph, target),
        plan=Plan(device, numbers),
        unordered=unordered,
        exchanged=exchanged,
        stage=of_op,
        note=remarks(again.graph, derived.graph, cluster, strategy),
    )


def as_it_is(problem: Problem, plan: Plan) -> Applied:
    """A placement of the graph as it is, in the form of a strategy that rewrites nothing."""
    same = Derived.identity(problem.graph)
    return Applied(Strategy(), same, problem, plan, same, same, np.zeros(problem.graph.n_ops, dtype=np.int64))


def order_of(strategy: Strategy) -> PipelineOrder:
    """The order that a strategy of several stages asks for; 1F1B in the place of the one that keeps to the memory.

    Raises:
        StrategyError: a number of chunks or of micro-batches that the order does not have.
    """
    name = "1f1b" if strategy.order == MEMORY_ORDER else strategy.order
    try:
        return pipeline_order(name, strategy.stages, strategy.micro_batches, strategy.virtual_stages // strategy.stages)
    except MismatchError as error:
        raise StrategyError(f"strategy {strategy.text!r} is not possible: {error}") from None


def _program_order(derived: Derived) -> FloatArray:
    """float64 [n], an explicit order: micro-batch after micro-batch, each in the order in which its model computes.

    Without it, devices would run all forward passes first, and first copies before second ones, which saves no memory.
    What is for the whole step comes first, as soon as it is ready, and updates last.
    """
    is_whole = derived.micro_batch < 0
    is_update = derived.graph.phase == Phase.UPDATE
    turn = np.where(is_whole, np.where(is_update, derived.n_micro_batches, -1), derived.micro_batch)
    return turn * (derived.source.n_ops + 1.0) + derived.origin


def _homes(derived: Derived, devices: IntArray, stage: IntArray, order: PipelineOrder | None) -> IntArray:
    """int64 [n]: device of every op, also where it runs on that device's lane.

    Args:
        stage: int64, stage of every op of the source.
        order: says which device has which stage; None: each its own.
    """
    places = int(np.prod([axis.size for axis in derived.mesh], dtype=np.int64))
    of_op = stage[derived.origin]
    rank = of_op if order is None else np.array(order.devices, dtype=np.int64)[of_op]
    return np.asarray(devices[rank * places + derived.part], dtype=np.int64)


def _devices(
    derived: Derived, cluster: Cluster, devices: IntArray, stage: IntArray, order: PipelineOrder | None
) -> IntArray:
    """int64 [n]: device of every op; of communication the lane of its device. Arguments as of `_homes`."""
    device = _homes(derived, devices, stage, order)
    lanes = derived.graph.is_pinned_to(LANE)
    return np.asarray(np.where(lanes, cluster.lane_of[device], device), dtype=np.int64)


def _spelt_out(exchanged: Derived, algorithm: str, cluster: Cluster, home: IntArray) -> Derived:
    """Collectives by the algorithm asked for, or each by the quickest; those of many ranks fused."""
    ranks = [home[list(collective.ops)].tolist() for collective in exchanged.collectives]
    names = (algorithm,) * len(ranks) if algorithm else quickest(cluster, exchanged.collectives, ranks, ALGORITHMS)
    return reduce(exchanged, names, fused_s(cluster, exchanged.collectives, names, ranks))
