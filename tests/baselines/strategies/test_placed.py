"""Strategies whose parts are placed op by op: one placement for all of them, scored exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from baselines.budget import Budget
from baselines.strategies import placed
from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.families import family_of
from baselines.strategies.searching.records import Pool, Rival
from baselines.strategies.searching.replicas import placed_replicas
from baselines.strategies.searching.scoring import scored, tried
from baselines.strategies.searching.search import search_strategies
from baselines.strategies.searching.space import Space
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import PLACED, MeshRule, Strategy

STEPS, WIDTH = 3, 16


class Towers(nn.Module):
    """Two LSTM cells over a short sequence, and a few linear layers over its mean."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.side = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros_like(x[:, 0])
        states = [(nothing, nothing) for _ in self.cells]
        for t in range(STEPS):
            given = x[:, t]
            for number, cell in enumerate(self.cells):
                states[number] = cell(given, states[number])
                given = states[number][0]
        result: torch.Tensor = self.head(states[-1][0] + self.side(x.mean(1)))
        return result


def towers(width: int = WIDTH, batch: int = 8) -> tuple[Towers, tuple[torch.Tensor]]:
    """The model and a batch for it."""
    torch.manual_seed(0)
    return Towers(width), (torch.randn(batch, STEPS, width),)


CLUSTER = Cluster.preset("8xV100-nvlink")
TEXTS = (
    *("dp2 | placed2", "placed2 | tp2", "dp2 zero3 | placed3 | updates=fused"),
    *("dp2 | placed2 | tp2 | recompute=cells.*", "dp4 | placed2 | bucket=0 | reduce=ring"),
)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model, args = towers(width=64)
    del model.side[2]  # whose statistics of the batch have tests of their own
    return capture(model, args, train=True)


@pytest.mark.parametrize("text", TEXTS)
def test_parts_are_placed_alike_and_scored_as_by_the_reference(graph: OpGraph, text: str) -> None:
    strategy = Strategy.parse(text)
    what = applied(graph, CLUSTER, strategy)
    assert what.rewrite is not None
    computing = np.flatnonzero(what.problem.graph.kernels > 0)
    computing = computing[[what.problem.graph.pins[op] == () for op in computing]]  # the others are on lanes
    row = what.rewrite.row[what.unordered.origin[computing]]
    at = what.rewrite.devices[row, what.derived.part[computing]]
    assert at.tolist() == what.plan.device[computing].tolist()
    assert len(np.unique(what.plan.device[computing])) == strategy.devices
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert check_schedule(what.problem.graph, what.problem.cluster, schedule, what.plan) == []
    reference = simulate_reference(what.problem.graph, what.problem.cluster, what.plan)
    assert reference.step_time_s == pytest.approx(score.step_time_s, rel=1e-12)
    bounds = strategy_bounds(graph, CLUSTER)
    assert bounds[ALL] <= bounds[PLACED] <= score.step_time_s


def test_a_strategy_always_means_the_same_placement(graph: OpGraph) -> None:
    rows = []
    for text in ("dp2 | placed2", "dp2 | placed2 | reduce=ring"):
        placed._placed.cache_clear()
        rewrite = applied(graph, CLUSTER, Strategy.parse(text)).rewrite
        assert rewrite is not None
        rows.append(rewrite.row.tolist())
    assert rows[0] == rows[1]


def test_texts_and_files_hold_it() -> None:
    strategy = Strategy((MeshRule("tp", 2),), 4, PLACED)
    assert strategy.text == "placed4 | tp2"
    assert Strategy.parse("placed4 | tp2") == Strategy.parse("tp2 | placed4") == strategy
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert family_of(strategy) == PLACED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "placed4",
            "'placed4' places no parts of a mesh; .* or 'none' for a placement of the graph as it is",
        ),
        (
            "dp2 | placed1",
            "has one device for each part, and not two or more; write for example 'dp2 | placed4'",
        ),
        ("dp2 | placed2 | mb4", "leaves no stages to cut or to run micro-batches through; leave out 'mb'"),
        ("dp2 | placed2 | cuts=a", "leave out 'mb', 'v' and 'cuts='"),
        ("dp2 | placed2 | pp2", "gives stages twice, the second time at 'pp2'"),
        ("dp2 | placed2 mb4", "cannot be read at 'mb4'"),
        ("dp2 | placd2", "did you mean 'placed2'"),
    ],
)
def test_bad_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        Strategy.parse(text)


def test_no_part_stands_for_the_others(graph: OpGraph) -> None:
    with pytest.raises(StrategyError, match=r"places ops one by one, .* do not fold it"):
        applied(graph, CLUSTER, Strategy.parse("dp2 | placed2"), folded=True)


def test_what_fits_nowhere_says_so(graph: OpGraph) -> None:
    small = CLUSTER.with_memory_fraction(1e-7)
    made = tried(graph, small, Strategy.parse("dp2 | placed2"))
    assert made.scored is None
    assert "no other device has more room for it" in made.reason


def test_a_search_places_parts_where_a_placement_is_near(graph: OpGraph) -> None:
    four = Cluster.preset("4xV100-pcie")
    alone = search_strategies(graph, four, Budget(0.5))
    assert PLACED not in alone.best_of  # no placement is known
    assert alone.best is not None
    near = Rival(alone.best.step_time_s)
    found = search_strategies(graph, four, Budget(2.0), rival=near)
    assert replace(found.best_of[PLACED].strategy, fused_updates=False).text == "dp2 | placed2"


def test_parts_promise_as_much_as_the_mesh_and_the_placement(graph: OpGraph) -> None:
    four, pool = Cluster.preset("4xV100-pcie"), Pool()
    space, estimator = Space(graph, four), Estimator(graph, four)
    one_s = scored(graph, four, Strategy()).step_time_s

    def estimate(strategy: Strategy) -> Estimate:
        return pool.estimates.setdefault(strategy, estimator.estimate(strategy))

    def promising(known_s: float, best_s: float) -> list[str]:
        found = placed_replicas(space, pool, estimate, Rival(known_s), best_s)
        return [replace(one, fused_updates=False).text for one in found]

    assert promising(one_s / 2, one_s / 2) == ["dp2 | placed2"]
    assert promising(one_s, one_s / 3) == []  # a placement gains nothing
    assert promising(one_s / 3, one_s / 9) == []
    assert promising(math.inf, one_s / 3) == []


def test_replicas_in_groups_are_no_mesh_to_place_parts_of(graph: OpGraph) -> None:
    eight, pool = Cluster.preset("8xV100-nvlink"), Pool()
    space, estimator = Space(graph, eight), Estimator(graph, eight)

    def estimate(strategy: Strategy) -> Estimate:
        return pool.estimates.setdefault(strategy, estimator.estimate(strategy))

    grouped = estimate(Strategy.parse("dp2 | dp2 zero3"))
    one_s = scored(graph, eight, Strategy()).step_time_s
    pool.estimates[grouped.strategy] = replace(grouped, step_time_s=1e-9)  # the best mesh of its size by far
    found = placed_replicas(space, pool, estimate, Rival(one_s / 4), one_s)
    assert found
    assert all(one.zero == 0 for one in found)
