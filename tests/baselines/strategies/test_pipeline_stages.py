"""Stages of a pipeline: even, and cut where little is sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.stashing import balanced_stages
from torch import nn
from training_steps import mlp

from baselines.strategies import stages
from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.stage_cuts import stage_cuts
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs import Op, OpGraph, Phase, Tensor
from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.transforms.strategy import Strategy


def chain(seconds: list[float], sizes: list[int]) -> tuple[OpGraph, np.ndarray]:
    """Ops in a row, and their times."""
    ops = [Op(f"op{i}", time_s={"*": s}) for i, s in enumerate(seconds)]
    tensors = [Tensor(f"op{i}", size, (f"op{i + 1}",)) for i, size in enumerate(sizes)]
    return OpGraph.build(ops, tensors), np.array(seconds)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=2, max_size=9), st.integers(2, 4))
def test_against_every_way_to_cut_a_chain(layers: list[tuple[int, int]], n_stages: int) -> None:
    n_stages = min(n_stages, len(layers))
    seconds, sizes = [float(s) for s, _ in layers], [size for _, size in layers[:-1]]
    graph, op_s = chain(seconds, sizes)
    stage, is_apart = balanced_stages(graph, op_s, n_stages)
    ways = []
    for cuts in combinations(range(1, len(layers)), n_stages - 1):
        loads = [sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(layers)))]
        ways.append((max(loads), sum(sizes[c - 1] for c in cuts)))
    shortest = min(longest for longest, _ in ways)
    found = np.bincount(stage, op_s, n_stages)
    sent = sum(sizes[i] for i in np.flatnonzero(np.diff(stage)))
    assert (np.diff(stage) >= 0).all()
    assert found.min() > 0
    assert found.max() <= shortest * 1.1 * (1 + 1e-6)
    assert sent <= min(size for longest, size in ways if longest <= shortest * 1.0999)
    assert not is_apart.any()


def test_a_heavy_last_op_has_a_stage_of_its_own_and_the_others_are_even() -> None:
    graph, op_s = chain([1.0] * 12 + [6.0], [8] * 12)
    stage, _ = balanced_stages(graph, op_s, 4)
    assert np.bincount(stage, op_s).tolist() == [4.0, 4.0, 4.0, 6.0]


def test_more_stages_than_ops_are_refused() -> None:
    graph, op_s = chain([1.0, 1.0], [1])
    with pytest.raises(
        StrategyError, match="has 2 forward ops that take time; a pipeline of 3 stages needs at least one"
    ):
        balanced_stages(graph, op_s, 3)


def test_a_long_graph_is_cut_where_little_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = [5, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    graph, op_s = chain([1.0] * 401, layer * 40)
    short, _ = balanced_stages(graph, op_s, 4)
    monkeypatch.setattr(stages, "LONG", 100)
    long, _ = balanced_stages(graph, op_s, 4)
    assert np.array_equal(short, long)
    cuts = np.flatnonzero(np.diff(long)) % len(layer)
    assert (cuts == 0).all()  # after the op whose tensor has the fewest bytes


@pytest.mark.parametrize("order", ["1f1b mb4", "zb-h1 mb4", "gpipe mb2", "zbv mb6"])
@pytest.mark.parametrize("share", [0.4, 0.45, 0.55])
def test_second_runs_begin_at_what_a_stage_received(order: str, share: float) -> None:
    graph, cluster = mlp(layers=12), Cluster.preset("8xV100-nvlink")
    graph = replace(graph, modules=("m",) * graph.n_ops)  # one segment, which stages cut
    forward = stages.forward_ops(graph)
    n_cuts = 3 if "zbv" in order else 1
    cuts = [graph.op_names[forward[int(len(forward) * (share - 0.1 * (n_cuts - k)))]] for k in range(1, n_cuts + 1)]
    what = applied(graph, cluster, Strategy.parse(f"pp2 {order} | recompute=m | cuts={'+'.join(cuts)}"))
    assert what.rewrite is not None
    again, row = what.rewrite.again, what.rewrite.row
    is_second = (again.graph.phase == Phase.BACKWARD) & (graph.phase[again.origin] == Phase.FORWARD)
    producer, reader, _ = again.graph.edge_list
    assert is_second.any()
    assert (row[producer] == row[reader])[is_second[producer]].all()
    strategy = Strategy.parse(what.strategy.text)
    found = Simulator(what.problem).score(what.plan)
    estimate = Estimator(graph, cluster).estimate(strategy)
    assert estimate.step_time_s == pytest.approx(found.step_time_s, rel=0.1)


class Tied(nn.Module):
    """Tokens [b, s] -> a loss; the table of the tokens is the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(97, 16), nn.Linear(16, 97, bias=False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.table(tokens)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-h2", "zbv", "memory"])
@pytest.mark.parametrize("slow", ["embedding", "mm", "tanh"])
def test_measured_times_decide_the_cuts_alone(order: str, slow: str) -> None:
    """A process that runs a strategy knows where it was cut, but no times."""
    graph = capture(Tied(), (torch.zeros(8, 4, dtype=torch.long),), train=True)
    seconds = np.array([[1e-3 if slow in kind else 1e-4] for kind in graph.kinds])
    timed = replace(graph, time_keys=("*",), time_s=seconds, fixed_s=np.zeros_like(seconds))
    cluster = Cluster.preset("4xV100-pcie")
    strategy = Strategy.parse(f"pp2 {order} mb4")
    strategy = replace(strategy, cuts=stage_cuts(timed, cluster, strategy))
    here, there = (applied(each, cluster, strategy).problem.graph for each in (timed, graph))
    assert here.op_names == there.op_names
    assert here.tensor_producer.tolist() == there.tensor_producer.tolist()
