"""Weight stashing: the memory of PipeDream's asynchronous pipeline, in which every mini-batch updates the weights.

Mini-batches follow each other without a flush, so that the largest load of a device or link sets the pace: the
objective ``throughput``. The backward pass of a mini-batch uses the weights of its forward pass, so a stage keeps a
version for each mini-batch that it has in flight: stage s of p keeps p - s (Narayanan et al., SOSP 2019, section 3.3).
Activations in flight are counted by the score itself (docs/score.md, "Throughput").
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baselines.strategies.stages import even_cuts, stages_from
from env.cluster import Cluster
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import MismatchError, StrategyError
from graphs.kept import trained_bytes
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.sequencing import stage_numbers


def balanced_stages(graph: OpGraph, op_s: FloatArray, n_stages: int) -> tuple[IntArray, BoolArray]:
    """`stages_from` the ops at which `even_cuts` cuts, for devices that are alike and have a stage each.

    Args:
        op_s: float64 [n], seconds of each op, on whatever device.

    Raises:
        StrategyError: fewer forward ops that take time than stages.
    """
    times = np.repeat(op_s[:, None], n_stages, axis=1)
    return stages_from(graph, even_cuts(graph, times, range(n_stages)), times)


def asynchronous(graph: OpGraph, cluster: Cluster, n_stages: int) -> tuple[Problem, Plan]:
    """PipeDream's pipeline of stages of about equal time, for the objective throughput.

    Stage s runs on the s-th of the cluster's main devices. `env.simulation.scoring.loads` gives the seconds for each
    mini-batch, and memory in steady state with all versions of the weights.

    Raises:
        StrategyError: fewer devices, or fewer ops that take time, than stages.
    """
    devices = cluster.compute_devices
    if n_stages > len(devices):
        raise StrategyError(
            f"a pipeline of {n_stages} stages needs as many devices, and cluster {cluster.name!r} has {len(devices)}; "
            "take fewer stages or a larger cluster."
        )
    op_s = Problem(graph, cluster).op_s[:, devices].mean(axis=1)
    stage, _ = balanced_stages(graph, op_s, n_stages)
    return Problem(with_stashed_weights(graph, stage), cluster, THROUGHPUT), Plan(devices[stage])


def stages_in_order(graph: OpGraph, device: IntArray) -> IntArray:
    """int64 [n]: number of every op's stage, the ops of one device being a stage and the pipeline starting at 0.

    Args:
        graph: what is placed.
        device: int64 [n], device of each op.

    Raises:
        MismatchError: the forward pass goes back to a stage that it has left, so that there is no pipeline.
    """
    forward = np.flatnonzero(graph.phase == Phase.FORWARD)
    used = np.unique(device)
    first = np.full(1 + int(used.max(initial=0)), graph.n_ops, dtype=np.int64)
    working = forward[np.array([graph.kinds[i] != "input" for i in forward.tolist()], dtype=np.bool_)]
    np.minimum.at(first, device[working], graph.topological_position[working])
    rank = np.empty(len(first), dtype=np.int64)
    rank[used[np.argsort(first[used], kind="stable")]] = np.arange(len(used))
    stage = rank[device]
    producer, consumer, _ = graph.edge_list
    is_forward = np.zeros(graph.n_ops, dtype=np.bool_)
    is_forward[working] = True
    back = is_forward[producer] & is_forward[consumer] & (stage[consumer] < stage[producer])
    if back.any():
        e = int(np.argmax(back))
        raise MismatchError(
            f"op {graph.op_names[consumer[e]]!r} of stage {stage[consumer[e]]} waits for "
            f"{graph.op_names[producer[e]]!r} of stage {stage[producer[e]]}, so this placement is no "
            "pipeline; give each device a stretch of the model."
        )
    return stage


def with_stashed_weights(graph: OpGraph, stage: IntArray) -> OpGraph:
    """The graph whose ops keep a version of the trained weights for each mini-batch in flight: p - s in stage s.

    Versions beyond the one that is kept anyway are added to the parameter bytes; times stay as they are.

    Args:
        graph: a training step; of another one nothing changes.
        stage: int64 [n], stage of each op, 0 .. p - 1.

    Raises:
        MismatchError: not one stage for each op.
    """
    stages = stage_numbers(graph, stage)
    more = stages.max() - stages
    return replace(graph, parameter_bytes=graph.parameter_bytes + more * trained_bytes(graph))
