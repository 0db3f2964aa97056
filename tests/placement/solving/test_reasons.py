"""Reasons for an answer: which other way it is told beside."""

from __future__ import annotations

from training_steps import mlp

from baselines.strategies.estimating.estimate import Figures
from env.cluster import Cluster
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import ONE_DEVICE, Alternative
from placement.solving.remarks import reason
from placement.solving.strategy_row import StrategyRow, strategy_row, unrewritten_row

GRAPH, CLUSTER = mlp(batch=8, layers=2), Cluster.preset("8xA100-nvswitch", rates="peak")


def row(text: str) -> StrategyRow:
    return strategy_row(GRAPH, CLUSTER, Strategy.parse(text), bounds={})


def way(name: str, text: str, seconds: float | None) -> Alternative:
    return Alternative(name, Strategy.parse(text), seconds, 10)


def test_the_next_family_is_told_and_what_zero_saves() -> None:
    best = row("dp8 zero3")
    step_s = best.result.answered().step_time_s
    ways = (
        way("zero3", "dp4 zero3", 1.1 * step_s),
        way("tp", "tp4", 1.2 * step_s),
        way("dp", "dp8", 1.3 * step_s),
        way(ONE_DEVICE, "none", 2 * step_s),
        way("pp 1f1b", "pp2 1f1b mb2", None),
    )
    told = reason(GRAPH, CLUSTER, best, ways)
    assert told.startswith("tp4 takes ")
    assert "; without ZeRO it takes " in told


def test_what_can_be_told_from_the_answer_comes_before_what_cannot() -> None:
    best = row("dp8")
    step_s = best.result.answered().step_time_s
    near, far = way("tp", "tp4", 1.001 * step_s), way("hybrid", "dp2 | tp2", 1.5 * step_s)
    assert reason(GRAPH, CLUSTER, best, (near, far)).startswith("dp2 | tp2 takes ")
    assert reason(GRAPH, CLUSTER, best, (near,)).startswith("tp4 takes ")


def test_a_search_without_time_tells_an_estimated_one() -> None:
    best, tensor = row("dp8"), Strategy.parse("tp4")
    large = Figures(Strategy.parse("dp2 | tp2"), 0.5, 10, missing_bytes=1)
    assert reason(GRAPH, CLUSTER, best, (), (large, Figures(tensor, 1.0, 10, 0))).startswith("tp4 takes ")
    assert reason(GRAPH, CLUSTER, best, ()) == ""
    impossible = Figures(Strategy.parse("tp512"), 1.0, 10, 0)
    assert reason(GRAPH, CLUSTER, best, (), (impossible,)) == ""


def test_without_recompute_is_told_in_the_place_of_zero() -> None:
    assert reason(GRAPH, CLUSTER, row("dp4 zero2 | recompute=*"), ()).startswith("without recompute it takes ")


def test_one_device_is_told_beside_several() -> None:
    from placement.optimization import optimize

    alone = optimize(GRAPH, CLUSTER, "single_device")
    told = reason(GRAPH, CLUSTER, unrewritten_row(alone), (way("dp", "dp8", 1.0),))
    assert told.startswith("dp8 takes ")
