"""The ladder of a search: which strategies stand on which rung, and that the best of each is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from training_steps import mlp

from baselines.budget import Budget
from baselines.strategies.searching.ladder import RUNGS, rung_of
from baselines.strategies.searching.search import search_strategies
from env.cluster import Cluster
from graphs.transforms.strategy import Strategy

CLUSTER = Cluster.preset("4xV100-pcie", rates="peak")


@pytest.mark.parametrize(
    ("text", "rung"),
    [
        ("dp4", "replicas"),
        ("dp4 | mb2", "replicas"),
        ("dp4 | recompute=*", None),
        ("dp4 zero1", "ZeRO"),
        ("dp4 zero3 | recompute=*", "ZeRO, recompute"),
        ("tp4 sp", "with tensor parallel"),
        ("dp2 zero1 | tp2", "with tensor parallel"),
        ("pp2 1f1b mb2 | dp2", None),
        ("dp2 | cp2", None),
        ("dp4 tp on head", None),
        ("dp4 zero3 | offload=optimizer", "with offload"),
        ("recompute=* | offload=activations", "with offload"),
        ("tp4 | offload=optimizer", None),
        ("none", None),
    ],
)
def test_a_strategy_has_at_most_one_rung(text: str, rung: str | None) -> None:
    assert rung_of(Strategy.parse(text)) == rung


def test_the_best_of_each_rung_is_told_scored_or_estimated() -> None:
    graph = mlp(batch=8, layers=2)
    outcome = search_strategies(graph, CLUSTER, Budget(float("inf"), 40))
    assert tuple(outcome.ladder) == tuple(name for name in RUNGS if name in outcome.ladder)
    assert {"replicas", "ZeRO", "with tensor parallel"} <= outcome.ladder.keys()
    assert all(rung_of(found.strategy) == name for name, found in outcome.ladder.items())
    assert outcome.best is not None
    assert min(found.step_time_s for found in outcome.ladder.values()) >= outcome.best.step_time_s


def test_rungs_that_do_not_fit_say_what_they_need() -> None:
    graph = mlp(batch=8, layers=2)
    kept = int(graph.kept_bytes.sum())
    devices = tuple(replace(device, memory_bytes=kept, reserved_bytes=0) for device in CLUSTER.devices)
    outcome = search_strategies(graph, replace(CLUSTER, devices=devices), Budget(float("inf"), 40))
    replicas = outcome.ladder["replicas"]
    assert not replicas.fits
    assert replicas.peak_bytes - kept == replicas.missing_bytes > 0
