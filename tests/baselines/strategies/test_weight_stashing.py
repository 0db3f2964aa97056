"""Versions of weights that PipeDream's asynchronous pipeline keeps, and what they do to memory in steady state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallel.stashing import asynchronous, stages_in_order, with_stashed_weights
from training_steps import chain_of_stages

from baselines.strategies.applied import applied
from env import THROUGHPUT, Cluster, Plan, Problem
from env.simulation.scoring import loads
from graphs import MismatchError, Op, OpGraph, Tensor
from graphs.errors import StrategyError
from graphs.transforms.strategy import Strategy

MIB = 1 << 20


def test_a_stage_keeps_a_version_for_each_mini_batch_in_flight() -> None:
    graph, stage = chain_of_stages(4)
    stashed = with_stashed_weights(graph, stage)
    kept = np.bincount(stage, stashed.parameter_bytes).tolist()
    assert kept == [2 * MIB * versions for versions in (4, 3, 2, 1)]
    for key in ("gradient_bytes", "optimizer_bytes", "workspace_bytes", "flops", "bytes_moved"):
        assert np.array_equal(getattr(stashed, key), getattr(graph, key))


def test_one_stage_keeps_what_it_keeps_anyway() -> None:
    graph, stage = chain_of_stages(1)
    assert with_stashed_weights(graph, stage) == graph


def test_without_parts_a_version_is_the_share_of_one_copy() -> None:
    graph, stage = chain_of_stages(2)
    whole = replace(
        graph, parameter_bytes=graph.parameter_bytes * 4, gradient_bytes=0 * graph.gradient_bytes
    )  # with adam: the parameter, its gradient and two states
    whole = replace(whole, origin=replace(whole.origin, optimizer="adam"))
    more = with_stashed_weights(whole, stage).parameter_bytes - whole.parameter_bytes
    assert np.bincount(stage, more).tolist() == [2 * MIB, 0]


def test_versions_count_in_steady_state() -> None:
    graph, stage = chain_of_stages(4)
    cluster = Cluster.preset("8xA100-nvswitch")
    plain = loads(Problem(graph, cluster, THROUGHPUT), Plan(stage))
    stashed = loads(Problem(with_stashed_weights(graph, stage), cluster, THROUGHPUT), Plan(stage))
    assert stashed.value_s == plain.value_s
    more = (stashed.held_bytes - plain.held_bytes)[:4].tolist()
    assert more == [2 * MIB * (versions - 1) for versions in (4, 3, 2, 1)]


def test_stages_of_a_placement_are_numbered_along_the_pipeline() -> None:
    graph, stage = chain_of_stages(3)
    device = np.array([5, 0, 2])[stage]
    assert np.array_equal(stages_in_order(graph, device), stage)


def test_a_placement_that_goes_back_is_no_pipeline() -> None:
    ops = [Op(name, flops=1.0) for name in "abc"]
    graph = OpGraph.build(ops, [Tensor("a", 1, ("b",)), Tensor("b", 1, ("c",))])
    with pytest.raises(MismatchError, match="op 'c' of stage 0 waits for 'b' of stage 1, so this placement is no pipe"):
        stages_in_order(graph, np.array([0, 1, 0]))


def test_a_stage_for_every_op_is_asked_for() -> None:
    graph, stage = chain_of_stages(2)
    with pytest.raises(MismatchError, match="expected a stage number, -1 or more, for each of 16 ops"):
        with_stashed_weights(graph, stage[1:])


def test_asynchronous_stages_set_the_pace_and_keep_their_versions() -> None:
    graph, stage = chain_of_stages(4)
    cluster = Cluster.preset("8xA100-nvswitch")
    problem, plan = asynchronous(graph, cluster, 4)
    assert np.array_equal(plan.device, stage)
    found = loads(problem, plan)
    assert found.value_s == pytest.approx(problem.op_s[:, 0].sum() / 4, rel=0.05)
    kept = np.bincount(plan.device, problem.graph.parameter_bytes).tolist()
    assert kept == [2 * MIB * versions for versions in (4, 3, 2, 1)]
    with pytest.raises(StrategyError, match="a pipeline of 9 stages needs as many devices, and cluster"):
        asynchronous(graph, cluster, 9)


def test_as_a_strategy_it_is_refused_in_one_sentence() -> None:
    with pytest.raises(StrategyError, match="'pp4 pipedream mb1' has no step of its own"):
        applied(chain_of_stages(4)[0], Cluster.preset("8xA100-nvswitch"), Strategy.parse("pp4 pipedream"))
