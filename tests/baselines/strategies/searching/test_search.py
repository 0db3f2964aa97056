"""The search over strategies: against the whole grid, reproducible, and with an answer whatever happens."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from baselines.budget import Budget
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching import scoring
from baselines.strategies.searching import search as search_module
from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.families import FAMILIES, family_of
from baselines.strategies.searching.grid import hand_grid
from baselines.strategies.searching.records import ANY_TOOL, Rival, Scored
from baselines.strategies.searching.scoring import scored
from baselines.strategies.searching.search import search_strategies
from baselines.strategies.searching.space import Space
from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import InfeasibleError, StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from graphs.zoo.cache import model_graph
from graphs.zoo.decoders import Decoder, DecoderConfig


def best_of_grid(graph: OpGraph, cluster: Cluster) -> Scored:
    found = []
    for strategy in hand_grid(graph, cluster):
        try:
            found.append(scored(graph, cluster, strategy))
        except (StrategyError, InfeasibleError):
            continue
    return min((one for one in found if one.fits), key=lambda one: one.step_time_s)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("bert_base", "2xK40-pcie", 2),
        pytest.param("resnet50", "mixed-gpus", 4, marks=pytest.mark.slow),
    ],
)
def test_the_search_is_no_worse_than_the_whole_grid(model: str, cluster: str, batch: int) -> None:
    graph, target = model_graph(model, train=True, batch_size=batch), Cluster.preset(cluster)
    outcome = search_strategies(graph, target, Budget(evaluations=40))
    assert outcome.best is not None
    assert outcome.best.step_time_s <= best_of_grid(graph, target).step_time_s * (1 + 1e-9)
    assert outcome.best.step_time_s >= strategy_bounds(graph, target)[ALL] * (1 - 1e-9)


def test_parts_of_layers_run_again_where_all_of_them_need_not() -> None:
    """Memory for a step whose norms and inner networks run again, and not for one that keeps everything."""
    config = DecoderConfig(2, 1024, 2, 1024, heads=8, key_value_heads=2, inner_width=8192, vocabulary=256)
    with torch.device("meta"):
        words = torch.zeros(2, 1024, dtype=torch.long)
        graph = capture(Decoder(config), (words, words), train=True)
    roomy = Cluster.preset("2xK40-pcie")
    parts = "layers.*.norm_attention+layers.*.norm_inner+layers.*.inner"
    kept, again = (scored(graph, roomy, Strategy.parse(f"dp2 zero3{more}")) for more in ("", f" | recompute={parts}"))
    limit = int(again.peak_bytes * 1.02)
    assert limit < kept.peak_bytes
    tight = replace(
        roomy, devices=tuple(replace(device, memory_bytes=limit, reserved_bytes=0) for device in roomy.devices)
    )
    best = search_strategies(graph, tight, Budget(evaluations=8)).best
    assert best is not None
    assert best.step_time_s <= again.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["2xK40-pcie", pytest.param("4xV100-pcie", marks=pytest.mark.slow)])
def test_the_same_evaluations_give_the_same_outcome(name: str) -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset(name)
    first, second = (search_strategies(graph, cluster, Budget(evaluations=12)) for _ in range(2))
    assert first == second
    assert first.scored <= 12


def test_the_outcome_has_the_best_of_each_family_and_the_front() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    outcome = search_strategies(graph, cluster, Budget(evaluations=30))
    assert outcome.best is not None
    assert {"dp", "zero3", "tp", "pp 1f1b", "hybrid"} <= set(outcome.best_of) <= set(FAMILIES)
    for name, found in outcome.best_of.items():
        assert family_of(found.strategy) == name
        assert found.step_time_s >= outcome.best.step_time_s
    times = [found.step_time_s for found in outcome.front]
    peaks = [found.peak_bytes for found in outcome.front]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)


def test_no_time_at_all_still_gives_an_answer() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    outcome = search_strategies(graph, cluster, Budget(seconds=0.0))
    assert outcome.best is not None
    assert outcome.scored == 1


def test_an_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    calls = []

    def impatient(*arguments: object) -> Scored:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scored(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "scored", impatient)
    outcome = search_strategies(graph, cluster, Budget(evaluations=30))
    assert outcome.interrupted
    assert outcome.scored == 2
    assert outcome.best is not None


def test_what_the_simulator_refuses_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the list of the best of each family and that of all estimates may hold it."""
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    tried: list[Strategy] = []

    def one_device_only(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Scored:
        tried.append(strategy)
        if strategy.devices > 1:
            raise StrategyError("one device only")
        return scored(graph, cluster, strategy)

    monkeypatch.setattr(scoring, "scored", one_device_only)
    outcome = search_strategies(graph, cluster, Budget(evaluations=60))
    assert outcome.best is not None
    assert len(tried) == len(set(tried))
    assert any(strategy.devices > 1 for strategy in tried)


def test_strategies_to_begin_with_are_considered() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    odd = Strategy.parse("dp2 | bucket=123456 | pp2 1f1b mb3")
    found = search_strategies(graph, cluster, Budget(seconds=0.0), starts=[odd])
    assert found.estimated >= 1


def test_the_user_s_own_is_scored_first_whatever_the_budget() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    odd = Strategy.parse("dp2 | bucket=123456 | pp2 1f1b mb3")
    found = search_strategies(graph, cluster, Budget(evaluations=1), rival=Rival(own=(odd,)))
    assert [one.strategy for one in found.best_of.values()] == [odd]


def test_the_best_of_the_hand_grid_is_scored_and_one_hybrid_of_each_near_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is estimated best may have many neighbours that are all estimated better than the best of another mesh."""
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("8xH100-nvswitch")
    tried: list[Strategy] = []

    def noted(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Scored:
        tried.append(strategy)
        return scored(graph, cluster, strategy)

    monkeypatch.setattr(scoring, "scored", noted)
    search_strategies(graph, cluster, Budget(evaluations=14))
    estimator = Estimator(graph, cluster)
    estimates = []
    for strategy in hand_grid(graph, cluster):
        with contextlib.suppress(StrategyError):
            estimates.append(estimator.estimate(strategy))
    fitting = sorted((e for e in estimates if e.fits), key=lambda e: (e.step_time_s, len(e.strategy.text)))
    assert fitting[0].strategy in tried[:3]
    near = {mesh_of(e.strategy) for e in fitting if e.step_time_s < 1.2 * fitting[0].step_time_s}
    assert len(near) > 2
    assert near <= {mesh_of(strategy) for strategy in tried}


def mesh_of(strategy: Strategy) -> tuple[tuple[tuple[str, int], ...], int]:
    return tuple((rule.name, rule.size) for rule in strategy.mesh), strategy.stages


def test_a_loss_of_the_whole_batch_wastes_no_evaluations_on_orders_that_cannot_wait_for_it() -> None:
    graph, cluster = model_graph("two_tower", train=True, batch_size=4), Cluster.preset("2xK40-pcie")
    outcome = search_strategies(graph, cluster, Budget(evaluations=10))
    assert outcome.scored >= 9


@pytest.mark.parametrize(
    ("rival", "is_whole", "share"),
    [
        (2.0, True, 1.0),
        (0.5, True, 0.35 / 2),
        (0.001, True, 0.35 / 4),
        (0.95, False, 1.0),
        (0.9, False, 0.35 * 0.9),
        (0.5, False, 0.35 / 2),
    ],
)
def test_the_further_ahead_a_rival_is_the_less_time_there_is(rival: float, is_whole: bool, share: float) -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    strategy = Strategy.parse("dp4")
    step_s = Estimator(graph, cluster).estimate(strategy).step_time_s
    search = search_module._Search(graph, cluster, Budget(), None, None, Rival(rival * step_s), ANY_TOOL)
    search.is_whole = is_whole
    assert search.share == 1.0
    search._estimate(strategy)
    search._look_at_rival()
    assert search.share == pytest.approx(share)


def test_nothing_is_scored_without_time_where_all_is_far_behind() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("8xH100-nvswitch")
    found = search_strategies(graph, cluster, Budget(seconds=0.0), rival=Rival(1e-9))
    assert (found.scored, found.best) == (0, None)
    assert found.nearest is not None
    near_s = found.nearest.step_time_s
    near = search_strategies(graph, cluster, Budget(seconds=0.0), rival=Rival(near_s))
    assert near.scored == 1


def test_updates_are_fused_where_that_saves_launches() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    assert Space(graph, cluster).strategy({"dp": 4}).fused_updates
    assert not Space(graph, cluster).strategy({"tp": 4}).fused_updates
    assert not Space(graph, cluster).strategy({"dp": 2}, 2).fused_updates
    measured = replace(graph, time_keys=("gpu",), time_s=np.ones((graph.n_ops, 1)), fixed_s=np.zeros((graph.n_ops, 1)))
    assert not Space(measured, cluster).strategy({"dp": 4}).fused_updates
    inference = model_graph("gpt2", batch_size=8)
    assert not Space(inference, cluster).strategy({"dp": 4}).fused_updates


class NormedWords(nn.Module):
    """A batch norm of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layer(x).transpose(1, 2))
        return found.square()


def test_statistics_of_words_are_put_together_where_words_are_cut() -> None:
    graph = capture(NormedWords(), torch.zeros(4, 6, 8), train=True)
    space = Space(graph, Cluster.preset("4xV100-pcie"))
    for axis, is_sequence in (("dp", False), ("cp", False), ("tp", True)):
        assert space.strategy({axis: 2}, sequence=is_sequence).statistics == "sync"
    assert space.strategy({"tp": 2}).statistics == "exact"
