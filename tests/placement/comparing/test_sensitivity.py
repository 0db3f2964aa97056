"""What would help most: the figures of a cluster, a little better and a little worse."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import nn, zeros

from baselines.strategies import folding
from baselines.strategies.searching import scoring
from env.cluster import Cluster, Device, Link, both_ways
from env.communication.as_used import AsUsed
from graphs.capture import capture
from graphs.errors import InfeasibleError
from graphs.opgraph import Op, OpGraph, Tensor
from placement.comparing.figures import Sensitivities, link_kind, memories, rates, scored_on, what_helps


def gpus(count: int, bytes_per_s: float = 1e9, memory_bytes: int = 2**30) -> Cluster:
    devices = [Device(f"gpu{i}", "gpu", memory_bytes, {"float32": 1e11}, 1e11, 1e-6) for i in range(count)]
    links = [link for d in devices for link in both_ways(d.name, "switch", bytes_per_s, 1e-6)]
    return Cluster("box", tuple(devices), tuple(links))


@cache
def perceptron(batch: int = 256, width: int = 256) -> OpGraph:
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
    return capture(nn.Sequential(*layers), (zeros(batch, width),), train=True, name="perceptron")


def row(found: Sensitivities, name: str) -> float:
    return next(r.elasticity for r in found.rows if name in r.figure and r.elasticity is not None)


def test_work_of_one_kind_takes_its_figure_alone() -> None:
    graph = OpGraph.build([Op("a", flops=1e10, bytes_moved=1.0)], [], "a")
    found = what_helps(graph, gpus(1), evaluations=0)
    assert found.step_s == pytest.approx(0.1 + 1e-6)
    assert row(found, "FLOP rate") == pytest.approx(-1, rel=1e-3)
    assert row(found, "memory bandwidth") == 0
    assert row(found, "launch overhead") == pytest.approx(1e-5, rel=1e-2)
    assert found.rows[0].figure == "FLOP rate of gpu"
    assert found.rows[0].sentence(found.step_s) == "10% more FLOP rate of gpu: 9.1% faster"
    assert found.rows[-1].sentence(found.step_s).endswith("no gain")
    assert found.headline().startswith("Most would help 10% more FLOP rate of gpu: 9.1% faster")


def test_a_transfer_takes_links_alone() -> None:
    ops = [Op("a", pins=("gpu0",), time_s={"*": 1e-9}), Op("b", pins=("gpu1",), time_s={"*": 1e-9})]
    found = what_helps(OpGraph.build(ops, [Tensor("a", 10**6, ("b",))], "ab"), gpus(2), evaluations=0)
    assert found.rows[0].figure == "bandwidth of links between gpu and switch"
    latency_s = 2e-6
    assert row(found, "latency") == pytest.approx(latency_s / found.step_s, rel=1e-3)
    assert row(found, "bandwidth of links") == pytest.approx(latency_s / found.step_s - 1, rel=1e-2)


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_elasticities_add_up(count: int) -> None:
    """All rates twice as high and all fixed times halved halve the step, so the elasticities add up to -1 (Euler)."""
    found = what_helps(perceptron(), gpus(count), evaluations=200)
    total = sum((1 if r.more_helps else -1) * r.elasticity for r in found.rows if r.elasticity is not None)
    assert total == pytest.approx(-1, abs=2e-2)  # differences of 1 % go round corners


def test_memory_helps_only_where_more_fits() -> None:
    graph = perceptron(batch=2048, width=64)
    ample = what_helps(graph, gpus(2), evaluations=200)
    memory = next(r for r in ample.rows if r.figure == "memory of gpu")
    assert memory.elasticity is None
    assert memory.better_s == memory.worse_s == pytest.approx(ample.step_s)
    kept = OpGraph.build([Op("a", time_s={"*": 1.0}, kept_bytes=95)], [], "a")
    tight = what_helps(kept, gpus(1, memory_bytes=100), evaluations=0)
    assert next(r for r in tight.rows if r.figure == "memory of gpu").worse_s is None


def test_a_folded_strategy_is_carried_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica stands for all: the step is then as long as that of the whole graph, and so are the derivatives."""
    whole = what_helps(perceptron(batch=2048), gpus(2), evaluations=100)
    assert not whole.result.strategy.is_none
    monkeypatch.setattr(folding, "is_to_be_folded", lambda *_: True)
    monkeypatch.setattr(scoring, "is_to_be_folded", lambda *_: True)
    folded = what_helps(perceptron(batch=2048), gpus(2), evaluations=100)
    assert folded.result.graph.name.endswith("one of 2 places")
    assert folded.result.strategy == whole.result.strategy
    assert folded.step_s == pytest.approx(whole.step_s, rel=0.05)
    for name in ("FLOP rate", "memory bandwidth", "bandwidth of links"):
        assert row(folded, name) == pytest.approx(row(whole, name), abs=0.1)


def test_nothing_that_fits_is_said() -> None:
    graph = OpGraph.build([Op("a", kept_bytes=1000, time_s={"*": 1.0})], [], "a")
    with pytest.raises(InfeasibleError):
        what_helps(graph, gpus(2, memory_bytes=100), evaluations=0)


def test_links_are_told_apart_by_what_they_join() -> None:
    assert link_kind(Link("host0/gpu3", "host0/nvswitch", 1.0)) == "links between gpu and nvswitch"
    assert link_kind(Link("gpu1", "gpu2", 1.0)) == "links among gpus"
    cluster = Cluster.preset("2x8xH100-ib")
    names = [figure.name for figure in rates(cluster)]
    assert "bandwidth of links between gpu and infiniband" in names
    assert [figure.name for figure in memories(cluster)] == ["memory of H100-SXM5-80GB"]
    assert [len(list(rates(Cluster.preset(name)))) for name in ("mixed-gpus", "1xV100")] == [3 * 3 + 2, 3 + 4]


def test_a_figure_changes_alone() -> None:
    cluster = Cluster.preset("2x8xH100-ib")
    for figure in (*rates(cluster), *memories(cluster)):
        twice = figure.scaled(2.0)
        assert twice.hash != cluster.hash
        assert figure.scaled(1.0) == cluster
        assert twice.device_index == cluster.device_index


def test_collectives_as_used_gain_by_the_links_that_carry_them() -> None:
    cluster, size = Cluster.preset("2x8xH100-ib"), 2**30
    inside, across = np.arange(8)[None], np.arange(16).reshape(2, 8).T

    def seconds(target: Cluster, groups: np.ndarray[Any, np.dtype[np.int64]]) -> float:
        found = AsUsed.of(target, groups)
        assert found is not None
        return float(found.seconds("all_gather", size))

    of = {figure.name: figure.scaled(2.0) for figure in rates(cluster)}
    for ends, mine, others in (("gpu and nvswitch", inside, across), ("gpu and infiniband", across, inside)):
        wider = of[f"bandwidth of links between {ends}"]
        assert seconds(wider, mine) == pytest.approx(seconds(cluster, mine) / 2, rel=0.1)
        assert seconds(wider, others) == pytest.approx(seconds(cluster, others), rel=0.05)
        assert seconds(of[f"latency of links between {ends}"], mine) > seconds(cluster, mine)


def test_memory_that_is_too_small_costs_the_better_answer() -> None:
    """Two ops that are quick on the fast device, which holds both only with 10 % more memory."""
    ops = [Op(name, time_s={"fast": 1.0, "slow": 9.0}, kept_bytes=52) for name in "ab"]
    devices = [Device(name, "gpu", 100, {"float32": 1e12}, 1e12, model=name) for name in ("fast", "slow")]
    cluster = Cluster("two", tuple(devices), both_ways("fast", "slow", 1e9, 0.0))
    found = what_helps(OpGraph.build(ops, [], "ab"), cluster, evaluations=0)
    assert found.step_s == pytest.approx(9.0)
    assert (found.rows[0].figure, found.rows[0].better_s) == ("memory of fast", pytest.approx(2.0))


def test_what_would_help_is_told_of_a_step_that_may_run_in_another_order() -> None:
    """A schedule that is held to its order can wait where the better cluster need not."""
    found = what_helps(perceptron(), gpus(2), evaluations=200)
    for figure in rates(found.cluster):
        told = next(row for row in found.rows if row.figure == figure.name)
        free, _ = scored_on(found.graph, found.result, figure.scaled(1.1 if figure.more_helps else 0.9))
        assert told.better_s is not None
        assert told.better_s <= free.step_time_s
