"""Results of strategies stand beside the bound over all strategies, not that of the graph they made."""

from __future__ import annotations

import dataclasses
import json

import pytest
from parallel.every_strategy import quick_network
from training_steps import mlp

from baselines.strategies.searching.bound import strategy_bounds
from graphs.capture import capture
from graphs.errors import BoundError
from graphs.zoo import build
from placement import compare_strategies, optimize, verify
from placement.results.result import ALL, THIS_GRAPH, Result

GRAPH, CLUSTER = mlp(batch=8, width=12, layers=3), quick_network((1e3,) * 4, 1e-2)


def test_the_gap_of_a_strategy_is_to_the_best_of_all() -> None:
    """One stage after the other with one micro-batch: nothing better can be done with that graph, but with others."""
    result = optimize(GRAPH, CLUSTER, strategy="pp4 gpipe mb1")
    assert result.lower_bound_s == result.bounds[ALL] == strategy_bounds(GRAPH, CLUSTER)[ALL]
    assert result.bounds[ALL] < result.bounds[THIS_GRAPH] <= result.answered().step_time_s
    assert result.answered().gap == pytest.approx(1 - result.lower_bound_s / result.answered().step_time_s)
    assert result.answered().gap > 0.5
    assert result.scope.startswith("among all strategies")


def test_all_rows_of_a_comparison_have_one_bound() -> None:
    found = compare_strategies(GRAPH, CLUSTER, ["none", "dp4", "tp2"], evaluations=50)
    assert len({row.result.lower_bound_s for row in found.rows}) == 1
    assert all(row.result.bounds[ALL] == row.result.lower_bound_s for row in found.rows)


def test_bounds_are_kept_and_verified() -> None:
    result = optimize(GRAPH, CLUSTER, strategy="dp4")
    assert Result.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["bounds"] == dict(result.bounds)
    assert verify(result, GRAPH).holds
    assert verify(result, GRAPH).lower_bound_s == pytest.approx(result.lower_bound_s)
    step_s = result.answered().step_time_s
    for bounds in ({**result.bounds, THIS_GRAPH: step_s}, {**result.bounds, ALL: 0.0}):
        assert not verify(dataclasses.replace(result, bounds=bounds)).holds
    assert verify(dataclasses.replace(result, bounds={**result.bounds, THIS_GRAPH: 0.0}), GRAPH).holds


def test_statistics_of_parts_have_bounds_of_their_own() -> None:
    """A pipeline of micro-batches is faster than any strategy that keeps statistics of the whole batch."""
    made = build("resnet50", small=True, batch_size=4)
    graph, cluster = capture(made.model, made.train_args, train=True), quick_network((1e9,) * 2, 1e-7)
    local = optimize(graph, cluster, strategy="pp2 1f1b mb4 | statistics=local")
    assert local.bounds[ALL] == strategy_bounds(graph, cluster, keeps_statistics=False)[ALL]
    assert verify(local, graph).holds
    whole, parts = compare_strategies(graph, cluster, ["dp2 | statistics=sync", "dp2 | statistics=local"]).rows
    assert {whole.result.bounds[ALL], parts.result.bounds[ALL]} == {
        strategy_bounds(graph, cluster, keeps)[ALL] for keeps in (True, False)
    }


def test_a_bound_that_is_too_low_is_found() -> None:
    result = optimize(GRAPH, CLUSTER, strategy="dp4")
    lower_s = result.lower_bound_s / 2
    lying = dataclasses.replace(result, lower_bound_s=lower_s, bounds={**result.bounds, ALL: lower_s})
    assert any("lower_bound_s is" in problem for problem in verify(lying, GRAPH).problems)


def test_a_bound_that_a_result_beats_is_refused() -> None:
    result = optimize(GRAPH, CLUSTER, strategy="dp4")
    with pytest.raises(BoundError, match="the bound over all strategies gave a lower bound"):
        result.among_strategies({ALL: 2 * result.answered().step_time_s})
    assert result.among_strategies({ALL: float("inf")}) == result


def test_a_placement_alone_has_no_bounds_of_strategies() -> None:
    assert optimize(GRAPH, CLUSTER, "heft").bounds == {}
