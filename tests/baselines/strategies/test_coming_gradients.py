"""Gradients come in the backward pass and stay until the step ends."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from baselines.strategies.applied import applied
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from env.simulation.timeline import memory_steps
from graphs.capture import capture
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy

ONE, TWO = Cluster.preset("1xH100"), Cluster.preset("8xH100-nvswitch")


def wide() -> nn.Module:
    """More parameters than activations, most of them in the layers that the backward pass reaches last."""
    return nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))


@cache
def graph_of() -> OpGraph:
    return capture(wide(), (torch.zeros(8, 4, 32),), train=True, loss=lambda y: y.mean())


def test_gradients_come_in_the_backward_pass_and_stay() -> None:
    graph = graph_of()
    assert (graph.standing_bytes == graph.parameter_bytes + graph.optimizer_bytes).all()
    assert graph.coming_bytes.sum() == graph.gradient_bytes.sum()
    assert all(graph.phase[graph.coming_bytes > 0] == Phase.BACKWARD)
    problem, plan = Problem(graph, ONE), Plan(np.zeros(graph.n_ops, dtype=np.int64), np.arange(graph.n_ops))
    score, schedule = Simulator(problem).schedule(plan)
    (times_s, held), *_ = memory_steps(problem, schedule)
    before = schedule.op_start_s[graph.coming_bytes > 0].min()
    assert held.max() == score.peak_bytes[0]
    assert held[times_s < before].max() < held.max() - graph.gradient_bytes.sum() // 2
    # All are there until the last update has ended, as `zero_grad` comes after it.
    assert held[times_s < schedule.op_end_s.max()][-1] >= graph.kept_bytes.sum()


def test_buffers_are_there_from_the_beginning() -> None:
    graph = graph_of()
    fused = on_stack(graph, "fused")  # as Megatron's
    unknown = dataclasses.replace(graph, tensor_in_place=np.zeros(graph.n_tensors, dtype=np.bool_))
    for each in (fused, unknown):
        assert (each.standing_bytes == each.kept_bytes).all()
        assert not each.coming_bytes.any()


@pytest.mark.parametrize(
    ("text", "comes"),
    [
        *(("none", True), ("mb2", True), ("tp2", True), ("dp2 zero2", True), ("dp2 zero3 | mb2", True)),
        *(("dp2", False), ("dp2 zero1", False), ("dp2 | mb2", False)),
    ],
)
def test_buckets_are_kept_for_the_whole_step(text: str, comes: bool) -> None:
    split = applied(graph_of(), TWO, Strategy.parse(text)).derived.graph
    assert split.coming_bytes.sum() == (split.gradient_bytes.sum() if comes else 0)


@pytest.mark.parametrize("stack", ["eager", "compiled", "fused"])
@pytest.mark.parametrize("text", ["none", "mb2", "dp2", "dp2 zero3 | mb2", "pp2 1f1b mb2 | dp2 zero2", "tp2 sp"])
def test_the_reference_agrees(stack: str, text: str) -> None:
    made = applied(on_stack(graph_of(), stack), TWO, Strategy.parse(text))
    graph = made.problem.graph
    reference = simulate_reference(graph, made.problem.cluster, made.plan)
    assert reference.peak_bytes == tuple(Simulator(made.problem).score(made.plan).peak_bytes.tolist())
