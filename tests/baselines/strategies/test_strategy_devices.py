"""Strategies on devices that are unlike each other: which ones, stages and batch shares by their times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.devices import device_subsets, natural_groups, proportional_shares
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.folding import grid_of
from baselines.strategies.stage_cuts import pipeline_stages, stage_cuts
from env.cluster import Cluster, Device, Link
from env.simulation.simulator import Simulator
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.strategy import Strategy
from placement.optimization import optimize


def uneven(*speeds: float, memory_bytes: int = 2**40) -> Cluster:
    """Devices of these speeds around a switch; times are those of FLOPs alone."""
    devices = tuple(
        Device(f"d{i}", "gpu", memory_bytes, {"float32": 1e9 * speed}, 1e30) for i, speed in enumerate(speeds)
    )
    links = [Link(*ends, 1e12, 1e-9) for d in devices for ends in ((d.name, "switch"), ("switch", d.name))]
    return Cluster("uneven", devices, tuple(links))


def loads(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> np.ndarray:
    """Seconds that each device computes."""
    what = applied(graph, cluster, strategy)
    seconds = what.problem.op_s[np.arange(what.problem.graph.n_ops), what.plan.device]
    return np.bincount(what.plan.device, seconds, cluster.n_devices)[: cluster.n_devices]


def step_s(graph: OpGraph, cluster: Cluster, text: str) -> float:
    what = applied(graph, cluster, Strategy.parse(text))
    return Simulator(what.problem).score(what.plan).step_time_s


def two_hosts(slow: int) -> Cluster:
    """Two fast devices at a switch, some slow ones at another, and a slow link between the switches."""
    names = ["fast0", "fast1", *(f"slow{i}" for i in range(slow))]
    devices = tuple(Device(n, "gpu", 2**40, {"float32": 4e9 if n < "g" else 1e9}, 1e30, model=n[:4]) for n in names)
    pairs = [(n, f"switch of {n[:4]}", 1e12) for n in names] + [("switch of fast", "switch of slow", 1e8)]
    links = [Link(*ends, rate, 1e-9) for a, b, rate in pairs for ends in ((a, b), (b, a))]
    return Cluster("two hosts", devices, tuple(links))


def test_natural_groups_are_all_each_host_and_each_kind() -> None:
    assert list(natural_groups(two_hosts(3))) == [(5, ()), (2, ()), (3, ("slow0", "slow1", "slow2"))]
    assert list(natural_groups(Cluster.preset("2x8xH100-ib"))) == [(16, ()), (8, ())]
    assert list(natural_groups(uneven(1))) == []


def test_a_search_looks_at_the_fast_host_alone() -> None:
    graph, cluster = mlp(batch=64, width=256), two_hosts(6)
    fixed = min(optimize(graph, cluster, strategy=text).answered().step_time_s for text in ("dp2", "tp2"))
    found = optimize(graph, cluster, evaluations=2_000)
    assert found.answered().step_time_s <= fixed * 1.01  # a plainer strategy may take a hundredth longer


def test_named_devices_take_the_parts_in_order() -> None:
    graph, cluster = mlp(layers=4), uneven(1, 1, 1, 1)
    what = applied(graph, cluster, Strategy.parse("dp2 | devices=d3+d1"))
    computing = what.derived.graph.kernels > 0
    part, device = what.derived.part[computing], what.plan.device[computing]
    lanes = what.problem.cluster.n_devices - cluster.n_devices
    assert lanes
    own = device < cluster.n_devices
    assert {(int(p), int(d)) for p, d in zip(part[own], device[own], strict=True)} == {(0, 3), (1, 1)}


def test_one_device_may_be_named() -> None:
    graph, cluster = mlp(layers=2), uneven(1, 4)
    assert step_s(graph, cluster, "devices=d0") == pytest.approx(4 * step_s(graph, cluster, "devices=d1"))


def test_devices_that_are_left_out_are_said() -> None:
    graph = mlp(layers=2)
    assert applied(graph, uneven(1, 4, 4), Strategy.parse("dp2 | devices=d1+d2")).note == "Not used: d0."
    assert applied(graph, uneven(4, 4, 4), Strategy.parse("dp2 | devices=d1+d2")).note == ""


def test_unknown_devices_and_lanes_are_refused() -> None:
    cluster = uneven(1, 1)
    for given, name in ((cluster, "d7"), (cluster.with_lanes(), "d0.lane")):
        with pytest.raises(StrategyError, match=f"names device '{name}', and cluster '.*' has no such device that"):
            applied(mlp(), given, Strategy.parse(f"dp2 | devices=d0+{name}"))


def test_a_cpu_takes_part_where_it_is_named() -> None:
    cluster = Cluster.preset("cpu-gpu")
    what = applied(mlp(layers=4), cluster, Strategy.parse("pp2 1f1b mb2 | devices=gpu0+cpu0"))
    assert set(what.plan.device.tolist()) == {0, 1}


def test_named_cuts_begin_stages() -> None:
    graph, cluster = mlp(layers=6), uneven(1, 1)
    forward = [name for name, phase in zip(graph.op_names, graph.phase, strict=True) if phase == Phase.FORWARD]
    chosen = stage_cuts(graph, cluster, Strategy.parse("pp2 1f1b mb2"))
    computing = [name for name in forward if graph.kernels[graph.op_names.index(name)]]
    other = computing[1]
    assert chosen != (other,)
    strategy = replace(Strategy.parse("pp2 1f1b mb2"), cuts=(other,))
    assert stage_cuts(graph, cluster, strategy) == (other,)
    what = applied(graph, cluster, strategy)
    stage = {graph.op_names[o]: int(s) for o, s in zip(what.derived.origin, what.stage, strict=True)}
    assert [stage[name] for name in computing] == [0] + [1] * (len(computing) - 1)


@pytest.mark.parametrize("text", ["pp3 1f1b mb3", "pp2 zbv mb4", "pp3 gpipe mb3 | recompute=*", "pp2 interleaved mb4"])
def test_the_cuts_that_are_chosen_can_be_named(text: str) -> None:
    graph, cluster, strategy = mlp(layers=9), uneven(1, 2, 3), Strategy.parse(text)
    cuts = stage_cuts(graph, cluster, strategy)
    named = applied(graph, cluster, replace(strategy, cuts=cuts))
    assert len(cuts) == strategy.virtual_stages - 1
    assert named.stage.tolist() == applied(graph, cluster, strategy).stage.tolist()


def test_cuts_that_are_none_are_refused() -> None:
    graph, cluster = mlp(layers=4), uneven(1, 1, 1)
    computing = [
        name
        for name, phase, kernels in zip(graph.op_names, graph.phase, graph.kernels, strict=True)
        if phase == Phase.FORWARD and kernels
    ]
    for cuts, sentence in (
        (("banana", computing[1]), "cuts at 'banana', which is no forward op of graph"),
        ((computing[2], computing[1]), f"and then at '{computing[1]}', which comes before it; name them in the order"),
        ((computing[0], computing[1]), "leaves stage 1 of 3 no op that computes; cut elsewhere"),
    ):
        with pytest.raises(StrategyError, match=sentence):
            applied(graph, cluster, replace(Strategy.parse("pp3 1f1b mb3"), cuts=cuts))


def test_a_slow_device_has_a_short_stage() -> None:
    graph, cluster = mlp(layers=20), uneven(1, 4)
    slow, fast = loads(graph, cluster, Strategy.parse("pp2 1f1b mb2"))
    assert slow == pytest.approx(fast, rel=0.3)  # one layer takes a fifth of that
    slow, fast = loads(graph, cluster, Strategy.parse("pp2 1f1b mb2 | devices=d1+d0"))
    assert slow == pytest.approx(fast, rel=0.3)


def test_a_device_with_little_memory_has_a_short_stage() -> None:
    """Equal stages would not fit."""
    graph, text = mlp(layers=20, batch=8), "pp2 1f1b mb2"

    def peaks(*memory_bytes: int) -> np.ndarray:
        alike = uneven(1, 1)
        devices = tuple(replace(d, memory_bytes=m) for d, m in zip(alike.devices, memory_bytes, strict=True))
        what = applied(graph, replace(alike, devices=devices), Strategy.parse(text))
        return Simulator(what.problem).score(what.plan).peak_bytes

    large, small = 2**40, int(0.7 * peaks(2**40, 2**40)[1])
    assert peaks(large, small)[1] <= small
    assert peaks(small, large)[0] <= small
    lacking = peaks(large, small // 100)[1]  # nothing fits
    assert lacking < 0.5 * small


def test_estimates_have_the_stages_that_strategies_have() -> None:
    """One estimator for all, on devices that hold some of them only with other stages."""
    graph, alike = mlp(layers=20, batch=8), uneven(1, 1, 2, 2)
    memories = (2**40, 7000, 9000, 2**40)
    devices = tuple(replace(d, memory_bytes=m) for d, m in zip(alike.devices, memories, strict=True))
    cluster = replace(alike, devices=devices)
    estimator, seen = Estimator(graph, cluster), set()
    for text in ("pp2 1f1b mb2", "pp2 1f1b mb4", "pp2 gpipe mb4", "dp2 | pp2 1f1b mb2", "dp2 zero3 | pp2 1f1b mb2"):
        for more in ("", " | devices=d3+d2", " | devices=d2+d0"):
            if "dp2" in text and more:
                continue
            strategy = Strategy.parse(text + more)
            grid = grid_of(cluster, strategy)
            stage, _ = pipeline_stages(graph, cluster, strategy, grid.reshape(-1))
            assert estimator.staged(strategy, grid)[1].tolist() == stage.tolist()
            seen.add(tuple(stage.tolist()))
    assert len(seen) > 3


@pytest.mark.parametrize("order", ["zbv", "v-half", "interleaved"])
def test_several_stages_of_a_device_are_even_together(order: str) -> None:
    graph, cluster = mlp(layers=33), uneven(1, 2, 1)
    found = loads(graph, cluster, Strategy.parse(f"pp3 {order} mb3"))
    assert found.max() <= found.mean() * 1.15


def test_shares_by_speed_are_faster_than_even_ones() -> None:
    graph, cluster = mlp(layers=4, batch=12), uneven(1, 2)
    assert proportional_shares(graph, cluster, np.array([0, 1])) == (1, 2)
    assert proportional_shares(graph, cluster, np.array([[0, 1], [1, 0]])) == ()
    assert step_s(graph, cluster, "dp2 shares=1:2") < 0.75 * step_s(graph, cluster, "dp2")
    note = applied(graph, cluster, Strategy.parse("dp2 shares=1:2")).note
    assert note.startswith("Replicas have 4, 8 of 12 samples; their losses count by their samples")


def test_slow_devices_are_left_out_first() -> None:
    assert next(device_subsets(uneven(1, 1, 1, 1), 2)) == ()
    assert next(device_subsets(uneven(1, 4, 2, 4), 2)) == ("d1", "d3")
    assert list(device_subsets(uneven(4, 4, 2, 1), 3)) == [()]
    assert list(device_subsets(uneven(1, 1), 3)) == []
    assert next(device_subsets(Cluster.preset("16xV100-10gbe"), 4)) == ()


def test_devices_that_lie_together_are_taken_together() -> None:
    """Two hosts whose devices are listed in turns."""
    cluster = Cluster.preset("2x8xH100-ib")
    order = [d for pair in zip(range(8), range(8, 16), strict=True) for d in pair]
    turns = Cluster("turns", tuple(cluster.devices[d] for d in order), cluster.links)
    (names,) = device_subsets(turns, 8)
    assert {name.split("/")[0] for name in names} == {"host0"}
