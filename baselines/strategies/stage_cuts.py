"""`stage_cuts`: where a strategy's pipeline is cut, as it says or by the times on the devices of each stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baselines.strategies.devices import devices_of, problem_of, recomputed
from baselines.strategies.orders import devices_of_stages
from baselines.strategies.stage_memory import stage_fill
from baselines.strategies.stages import even_cuts, forward_ops, named_cuts, sent_after, stages_from, work_s
from env.cluster import Cluster
from env.problem import Problem
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.opgraph import OpGraph
from graphs.transforms.derived import Derived
from graphs.transforms.strategy import VIRTUAL, Strategy

_STEP = 0.03  # of a stage's time: a cut is moved at least so far


def stage_cuts(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> tuple[str, ...]:
    """Names of the forward ops with which the second, third ... virtual stage begins: those that a strategy names.

    Without them those that `applied` chooses, so that a search can move one; () without a pipeline.

    Raises:
        StrategyError: too few devices, or too few ops for so many stages.
    """
    if strategy.stages == 1 or strategy.is_placed or strategy.cuts:
        return strategy.cuts
    again = recomputed(graph, strategy.recompute, strategy.micro_batches > 1).graph
    first_ops = _first_ops(problem_of(again, cluster), strategy, devices_of(cluster, strategy))
    return tuple(again.op_names[op] for op in first_ops.tolist())


def moved_cuts(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """`stage_cuts` with one cut earlier or later, where no more is sent than there, or as little as can be.

    Raises:
        StrategyError: as of `stage_cuts`.
    """
    cuts = stage_cuts(graph, cluster, strategy)
    forward = forward_ops(graph)
    problem = problem_of(graph, cluster)
    op_s = np.average(problem.kind_s, axis=1, weights=_of_each_kind(problem, devices_of(cluster, strategy)))
    sent, work = sent_after(graph, forward), work_s(graph, op_s[:, None])[forward, 0]
    done = np.concatenate([[0.0], np.cumsum(work)])
    index = {graph.op_names[op]: place for place, op in enumerate(forward.tolist())}
    if not all(name in index for name in cuts):
        return
    step_s = done[-1] / (len(cuts) + 1) * _STEP
    ends = [0, *(index[name] for name in cuts), len(forward)]
    for k in range(1, len(ends) - 1):
        for places in (np.arange(ends[k] - 1, ends[k - 1], -1), np.arange(ends[k] + 1, ends[k + 1])):
            # Far enough to matter, and not so far that a stage has nothing left to do.
            far = np.abs(done[places] - done[ends[k]]) >= step_s
            some = (done[places] > done[ends[k - 1]]) & (done[places] < done[ends[k + 1]])
            places = places[far & some]
            if len(places):
                little = np.flatnonzero(sent[places - 1] <= sent[ends[k] - 1])
                at = int(places[little[0] if len(little) else sent[places - 1].argmin()])
                yield (*cuts[: k - 1], graph.op_names[forward[at]], *cuts[k:])


def recomputed_in_stages(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, devices: IntArray
) -> tuple[Derived, IntArray, BoolArray]:
    """``(graph with second runs, stage, is_apart)``, the last two of every op of it, as of `stages_from`.

    A stage keeps what it received, and its second runs begin there. Were they to read what a stage before it computes
    again, that stage would have to do a part of its backward pass before this one, and the rest after it.

    Args:
        graph: before recomputation.
        devices: numbers of the strategy's devices, stages first.

    Raises:
        StrategyError: as of `pipeline_stages`.
    """
    again = recomputed(graph, strategy.recompute, strategy.micro_batches > 1)
    stage, is_apart = pipeline_stages(again.graph, cluster, strategy, devices)
    is_first = again.graph.phase == graph.phase[again.origin]
    producer, reader, _ = again.graph.edge_list
    if not (~is_first[producer] & (stage[producer] != stage[reader])).any():
        return again, stage, is_apart
    of_op, of_apart = np.zeros(graph.n_ops, dtype=np.int64), np.zeros(graph.n_ops, dtype=np.bool_)
    of_op[again.origin[is_first]] = stage[is_first]
    of_apart[again.origin[is_first]] = is_apart[is_first]
    again = recomputed(graph, strategy.recompute, strategy.micro_batches > 1, of_op.tobytes())
    return again, of_op[again.origin], of_apart[again.origin]


def pipeline_stages(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, devices: IntArray
) -> tuple[IntArray, BoolArray]:
    """``(stage, is_apart)`` of every op, as of `stages_from`.

    Args:
        graph: after recomputation.
        devices: numbers of the strategy's devices, stages first.

    Raises:
        StrategyError: too few ops for so many stages, or names of cuts that are none.
    """
    problem = problem_of(graph, cluster)
    first_ops = named_cuts(graph, strategy) if strategy.cuts else _first_ops(problem, strategy, devices)
    return stages_from(graph, first_ops, _stage_seconds(problem, strategy, devices))


def equal_cuts(problem: Problem, strategy: Strategy, devices: IntArray) -> IntArray:
    """int64 [V - 1]: the forward ops with which stages of about equal times begin, whether they fit or not.

    Raises:
        StrategyError: too few ops for so many stages.
    """
    return even_cuts(problem.graph, _stage_seconds(problem, strategy, devices), _stage_devices(strategy))


def is_overfull(graph: OpGraph, cluster: Cluster, strategy: Strategy, devices: IntArray, first_ops: IntArray) -> bool:
    """Whether a stage needs more than its devices' memory, about; never where a device has several stages."""
    if strategy.order in VIRTUAL:
        return False
    forward = forward_ops(graph)
    position = graph.topological_position
    begins = np.concatenate([[0], np.searchsorted(position[forward], position[first_ops])])
    fill = np.add.reduceat(stage_fill(graph, cluster, strategy, devices)[forward], begins, axis=0)
    return bool(np.diagonal(fill).max() > 1.0)


def _first_ops(problem: Problem, strategy: Strategy, devices: IntArray) -> IntArray:
    """`equal_cuts`, or others that fit where these do not."""
    graph, cluster = problem.graph, problem.cluster
    equal = equal_cuts(problem, strategy, devices)
    if not is_overfull(graph, cluster, strategy, devices, equal):
        return equal
    fill = stage_fill(graph, cluster, strategy, devices)
    return even_cuts(graph, _stage_seconds(problem, strategy, devices), _stage_devices(strategy), fill)


def _stage_devices(strategy: Strategy) -> tuple[int, ...]:
    """Device, or row of the mesh, of each virtual stage."""
    name = strategy.order if strategy.order in VIRTUAL else "1f1b"
    return devices_of_stages(name, strategy.stages, strategy.virtual_stages // strategy.stages)


def _of_each_kind(problem: Problem, devices: IntArray) -> IntArray:
    """int64 [K]: how many of the devices are of each kind of the problem."""
    return np.bincount(problem.kind_of[devices], minlength=problem.kind_s.shape[1])


def _stage_seconds(problem: Problem, strategy: Strategy, devices: IntArray) -> FloatArray:
    """float64 [n, V]: seconds of each op on each virtual stage, if its slowest device did all of it.

    Uneven shares of the batch count: a device with half as many samples as the mean takes half as long.
    """
    share = np.ones(1)
    for rule in strategy.mesh:
        parts = np.array(rule.shares) * rule.size / sum(rule.shares) if rule.shares else np.ones(rule.size)
        share = np.outer(share, parts).reshape(-1)
    grid = devices[: strategy.stages * len(share)].reshape(strategy.stages, len(share))
    of_stage = []
    for row in grid:
        slowest = np.zeros(problem.kind_s.shape[1])
        np.maximum.at(slowest, problem.kind_of[row], share)
        of_stage.append((problem.kind_s * slowest).max(axis=1))
    return np.stack(of_stage, axis=1)[:, list(_stage_devices(strategy))]
