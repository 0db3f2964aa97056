"""How far off predictions of a kind were, and what they cannot tell apart."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import placement
from env.cluster import Cluster
from env.presets.gpus import COMPARED, NOT_COMPARED
from graphs.formatting import format_seconds
from graphs.opgraph import Op, OpGraph
from graphs.origin import Origin
from graphs.transforms.strategy import Strategy
from placement.cli.comparing.asked import OptimizeOptions
from placement.cli.searching import with_against
from placement.results.advice import advice, advice_lines, tied, ties
from placement.results.alternatives import ONE_DEVICE, Alternative
from placement.results.utilisation import BEST_CASE, basis, uncertainty

H100 = Cluster.preset("2xH100-nvswitch")
RUNS = COMPARED["H100-SXM5-80GB"]


@cache
def step(train: bool = True) -> OpGraph:
    ops = [Op(name, flops=1e12, bytes_moved=1e9, dtype="bfloat16") for name in "ab"]
    return OpGraph.build(ops, [], "step", Origin(train=train))


def test_only_training_by_shipped_rates_was_compared() -> None:
    assert basis(step(), H100) == f"predicted; {RUNS}"
    assert uncertainty(step(), H100) == RUNS.off
    device = H100.devices[0]
    assert device.rates is not None
    other = replace(H100, devices=tuple(replace(d, rates=replace(device.rates, sustained=2.0)) for d in H100.devices))
    for graph, cluster in ((step(train=False), H100), (step(), other), (step(), Cluster.preset("2xL40S-pcie"))):
        assert NOT_COMPARED in basis(graph, cluster)
        assert uncertainty(graph, cluster) is None
    assert basis(step(), H100.at_peak()) == BEST_CASE
    assert uncertainty(step(), H100.at_peak()) is None
    calibrated = replace(H100, source="calibrated on 2026-01-02, GPU, torch 2.13: products")
    assert basis(step(), calibrated) == "calibrated on 2026-01-02, GPU, torch 2.13"
    assert uncertainty(step(), calibrated) is None


def test_what_lies_within_the_error_is_a_tie() -> None:
    result = placement.optimize(step(), H100, strategy="none", seed=0, evaluations=100)
    best_s = result.answered().objective_s
    near, far = best_s * (1 + RUNS.off / 2), best_s * (1 + 2 * RUNS.off)
    others = (
        Alternative("dp", Strategy.parse("dp2"), near, 10),
        Alternative("tp", Strategy.parse("tp2"), far, 10),
        Alternative(ONE_DEVICE, Strategy(), near, 10),
    )
    told = ties(replace(result, alternatives=others))
    assert told.startswith(f"within {RUNS.off:.0%} of the answer: plan 1 (dp2) ")
    assert told.endswith(f"; 5 steps of it and of this tell, {format_seconds(5 * (best_s + near))} in all")
    assert [one.strategy.text for one in tied(replace(result, alternatives=others))] == ["dp2"]
    assert f"± {RUNS.off:.0%}" in advice(replace(result, alternatives=others))
    third = Alternative("zero3", Strategy.parse("dp2 zero3"), near, 10)
    assert "5 steps of it and of the first tell" in ties(replace(result, alternatives=(*others, third)))
    assert ties(replace(result, alternatives=others[1:])) == ""
    given = OptimizeOptions(graph="gpt2", cluster="2xH100-nvswitch", train=True)
    lines = with_against(["moved        1 GB", "ties         two", "note"], given, replace(result, alternatives=others))
    assert lines[2] == "against      placement optimize gpt2 --cluster 2xH100-nvswitch --strategy dp2 --seed 0 --train"
    assert with_against(["note"], given, replace(result, alternatives=others[1:])) == ["note"]
    assert ties(replace(result, cluster=H100.at_peak(), alternatives=others)) == ""


def test_the_time_stands_on_the_first_line_however_long_the_strategy_is() -> None:
    text = "dp2 zero3 | tp2 sp | pp2 interleaved v2 mb8 | recompute=layers.* | offload=optimizer | updates=fused"
    fixed = placement.optimize(step(), H100, strategy="none", seed=0)
    first = advice_lines(replace(fixed, strategy=Strategy.parse(text)))[0]
    assert first.startswith("dp2 zero3 | pp2 interleaved v2 mb8 | tp2 sp | recompute | offload: ")
    short = replace(
        fixed, strategy=Strategy.parse("dp2 zero3 | recompute=layers.* | offload=optimizer | updates=fused")
    )
    assert ", ...: " in advice_lines(short)[0]
    assert format_seconds(fixed.answered().objective_s) in first
