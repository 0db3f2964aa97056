"""Parts of a step: they add up to it, whatever the strategy, and say what is exchanged over which link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from training_steps import mlp

from baselines.strategies.step_parts import FORWARD, HOST, RECOMPUTED, STAGES, TRANSFER, StepParts, union
from env.cluster import Cluster
from graphs.capture import capture
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.solving.strategy_row import figures_of, strategy_row

RATED, PEAK = Cluster.preset("8xA100-nvswitch"), Cluster.preset("8xA100-nvswitch", rates="peak")
HOSTS = Cluster.preset("2x8xH100-ib")


def step() -> OpGraph:
    graph = mlp(batch=16, layers=4)
    return replace(graph, flops=graph.flops * 1e9)


def parts_of(text: str, cluster: Cluster = RATED) -> StepParts:
    return figures_of(step(), cluster, Strategy.parse(text)).parts


@pytest.mark.parametrize(
    "text",
    [
        "dp8",
        "dp4 zero3",
        "tp4 sp",
        "dp2 | tp2",
        "pp4 1f1b mb4",
        "dp2 | pp2 gpipe mb2",
        "pp2 interleaved v2 mb4",
        "dp2 | mb2",
    ],
)
@pytest.mark.parametrize("cluster", [RATED, PEAK], ids=["rates", "peak"])
def test_parts_add_up_to_the_step(text: str, cluster: Cluster) -> None:
    row = strategy_row(step(), cluster, Strategy.parse(text), bounds={})
    assert row.figures is not None
    parts = row.figures.parts
    assert parts.step_s == pytest.approx(row.result.step_time_s, rel=1e-9)
    assert all(0 <= each.exposed_s <= each.busy_s + 1e-12 for each in parts.exchanges)
    assert RECOMPUTED not in parts.computing_s
    assert {each.axis for each in parts.exchanges} == {axis for axis in ("dp", "tp", STAGES) if axis in text}
    assert row.result.spent


def test_what_runs_again_is_told_apart() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    graph = capture(model, (torch.zeros(8, 16),), train=True)
    found = figures_of(graph, PEAK, Strategy.parse("dp2 | recompute=0+1")).parts
    assert 0 < found.computing_s[RECOMPUTED] <= found.computing_s[FORWARD]


def test_bytes_are_those_of_the_weights() -> None:
    (gradients,) = parts_of("dp8").exchanges
    graph = step()
    assert (gradients.kind, gradients.bytes) == ("all_reduce", int(graph.gradient_bytes.sum()))
    assert (gradients.link, gradients.hosts) == ("nvswitch", 1)
    kinds = {each.kind: each for each in parts_of("dp8 zero3").exchanges}
    assert kinds.keys() == {"all_gather", "reduce_scatter"}
    assert kinds["reduce_scatter"].bytes == gradients.bytes


def test_links_are_named_by_what_the_ranks_cross() -> None:
    found = {each.axis: (each.link, each.hosts) for each in parts_of("dp2 | tp8", HOSTS).exchanges}
    assert found == {"dp": ("infiniband", 2), "tp": ("nvswitch", 1)}
    (sent,) = [each for each in parts_of("pp2 1f1b mb4", HOSTS).exchanges if each.axis == STAGES]
    assert (sent.kind, sent.link, sent.hosts) == (TRANSFER, "nvswitch", 1)


def test_what_goes_to_the_host_is_an_axis_of_its_own() -> None:
    found = parts_of("dp2 | offload=optimizer", Cluster.preset("2xA100-nvswitch+host"))
    assert HOST in {each.axis for each in found.exchanges}


def test_of_intervals_that_touch_one_is_left() -> None:
    start, end = union(np.array([3.0, 0.0, 1.0]), np.array([4.0, 1.0, 2.0]))
    assert (start.tolist(), end.tolist()) == ([0.0, 3.0], [2.0, 4.0])
