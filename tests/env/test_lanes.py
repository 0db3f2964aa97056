"""Devices on one memory, and lanes: what a cluster says of them, where ops may run, and one account of memory."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from environment_cases import SEQUENTIAL
from hypothesis import given
from hypothesis import strategies as st
from small_problems import cluster_of, device
from strategies import clusters, graphs, placements

from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.checking.reference_loads import reference_loads
from env.cluster import LANE, Cluster, Link, both_ways
from env.gym.task_kernel import DEVICE_STATE
from env.lanes import with_lanes_of, without_lanes
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.simulation.simulator import Score, Simulator
from env.simulation.timeline import memory_steps
from graphs.codec import plain
from graphs.errors import ClusterError, InfeasibleError
from graphs.opgraph import Op, OpGraph, Tensor

PAIR = cluster_of(device("gpu0", 1000), device("gpu1", 1000))
LANES = PAIR.with_lanes()
GPU0, GPU1, LANE0, LANE1 = range(4)
FREE = {"bandwidth_bytes_per_s": math.inf, "latency_s": 0.0}


# -- clusters -------------------------------------------------------------------------------------------------


def test_every_device_has_a_lane_behind_the_devices() -> None:
    assert [d.name for d in LANES.devices] == ["gpu0", "gpu1", "gpu0.lane", "gpu1.lane"]
    assert LANES.lane_of.tolist() == [2, 3, -1, -1]
    assert LANES.memory_owner.tolist() == [0, 1, 0, 1]
    assert LANES.compute_devices.tolist() == [0, 1]
    lane = LANES.devices[LANE1]
    assert (lane.kind, lane.memory_of, lane.peak_flops) == (LANE, "gpu1", PAIR.devices[1].peak_flops)
    assert LANES.name == PAIR.name
    assert LANES.with_lanes() == LANES


def test_outer_lanes_come_behind_the_others() -> None:
    outer = PAIR.with_lanes(outer=True)
    assert [d.name for d in outer.devices[4:]] == ["gpu0.outer_lane", "gpu1.outer_lane"]
    assert outer.devices[:4] == LANES.devices
    assert outer.lane_of.tolist() == [2, 3, -1, -1, -1, -1]
    assert outer.outer_lane_of.tolist() == [4, 5, -1, -1, -1, -1]
    assert LANES.outer_lane_of.max() == -1
    assert LANES.with_lanes(outer=True) == outer == outer.with_lanes()
    assert without_lanes(outer) == PAIR
    for like in (PAIR, LANES, outer):
        assert with_lanes_of(PAIR, like) == like


def test_a_cluster_without_lanes_says_and_hashes_what_it_always_did() -> None:
    said = plain(PAIR.devices[0])
    assert "memory_of" not in said
    assert "memory_of" not in PAIR.to_toml()
    content: dict[str, Any] = {"devices": [plain(d) for d in PAIR.devices]}
    links = [{k: v for k, v in asdict(link).items() if k != "nominal_bytes_per_s"} for link in PAIR.links]
    content |= {"links": links, "communication": "overlapped"}
    assert set(said) == {
        *("name", "kind", "memory_bytes", "peak_flops", "memory_bytes_per_s", "launch_overhead_s", "model"),
    }
    assert PAIR.hash == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert PAIR.lane_of.tolist() == [-1, -1]
    assert PAIR.memory_owner.tolist() == [0, 1]
    assert PAIR.hash != LANES.hash


@given(clusters())
def test_a_lane_has_exactly_the_routes_of_its_device(cluster: Cluster) -> None:
    laned = cluster.with_lanes()
    n = cluster.n_devices
    for a in range(laned.n_devices):
        for b in range(laned.n_devices):
            if a == b:
                continue
            own = [int(laned.memory_owner[d]) for d in (a, b)]
            expected = () if own[0] == own[1] else cluster.routes[own[0], own[1]].links
            assert laned.routes[a, b].links == expected
            if a < n and b < n:
                assert laned.routes[a, b] == cluster.routes[a, b]


def test_lanes_pass_nothing_on_where_devices_do() -> None:
    links = [*both_ways("gpu0", "gpu1", 1e9, 1e-6), *both_ways("gpu1", "gpu2", 1e9, 1e-6)]
    chain = Cluster("chain", tuple(device(f"gpu{i}") for i in range(3)), tuple(links)).with_lanes()
    assert chain.routes[3, 5].links == (0, 2)  # lane of gpu0 to lane of gpu2, through gpu1
    assert chain.routes[3, 0].links == ()


def test_a_file_says_what_devices_share(tmp_path: Path) -> None:
    path = tmp_path / "lanes.toml"
    path.write_text(LANES.to_toml())
    assert Cluster.from_toml(path) == LANES
    assert Cluster.from_toml(path).hash == LANES.hash


def test_a_part_of_memory_is_a_part_for_all_on_it() -> None:
    half = LANES.with_memory_fraction(0.5)
    assert {d.usable_bytes for d in half.devices} == {500}


LANE_DEVICE = LANES.devices[LANE0]
BOTH = both_ways("gpu0.lane", "gpu0", **FREE)


@pytest.mark.parametrize(
    ("lane", "links", "message"),
    [
        ({"memory_of": ""}, BOTH, "device 'gpu0.lane' is a lane, and has no memory_of; name the device"),
        ({"memory_of": "gpu7"}, BOTH, "has memory_of = 'gpu7', which is no device of cluster 'pair'"),
        ({"memory_of": "gpu0.lane"}, BOTH, "memory_of = 'gpu0.lane', itself; name a device that has"),
        ({"memory_bytes": 7}, BOTH, "but memory_bytes = 7; expected that device's 1000"),
        ({"reserved_bytes": 7}, BOTH, "but reserved_bytes = 7; expected that device's 0"),
        ({}, (), "expected one link each way between the two"),
        ({}, BOTH[:1], "expected one link each way between the two"),
        ({}, both_ways("gpu0.lane", "gpu0", 1e9, 0.0), "expected one link each way between the two"),
        ({}, (*BOTH, Link("gpu0.lane", "switch", 1e9)), "expected one link each way between the two"),
        ({"memory_of": 3}, BOTH, "memory_of = 3; expected a name in quotes"),
    ],
)
def test_a_memory_that_is_not_as_said_is_refused(
    lane: dict[str, object], links: tuple[Link, ...], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster("pair", (*PAIR.devices, replace(LANE_DEVICE, **lane)), (*PAIR.links, *links))


def test_nobody_works_in_the_memory_of_a_lane() -> None:
    third = replace(LANE_DEVICE, name="third", memory_of="gpu0.lane")
    with pytest.raises(ClusterError, match=r"'gpu0.lane', which works in the memory of 'gpu0'; name a device"):
        Cluster("pair", (*PAIR.devices, LANE_DEVICE, third), (*PAIR.links, *BOTH))


# -- where ops may run ----------------------------------------------------------------------------------------


def test_a_lane_takes_only_what_is_pinned_to_it() -> None:
    pins = [(), (LANE,), ("gpu1.lane",), ("gpu",), ("gpu0", "gpu1.lane")]
    graph = OpGraph.build([Op(f"op{k}", time_s={"*": 1.0}, pins=p) for k, p in enumerate(pins)], [])
    assert Problem(graph, LANES).allowed.tolist() == [
        [True, True, False, False],
        [False, False, True, True],
        [False, False, False, True],
        [True, True, False, False],
        [True, False, False, True],
    ]


def test_an_op_for_a_lane_needs_one() -> None:
    graph = OpGraph.build([Op("send", time_s={"*": 1.0}, pins=(LANE,))], [])
    with pytest.raises(InfeasibleError, match="op 'send' may only run on lane, but cluster 'pair' has no such device"):
        Problem(graph, PAIR)


def test_the_checker_refuses_unpinned_ops_on_a_lane() -> None:
    problem = Problem(OpGraph.build([Op("a", time_s={"*": 1.0})], []), LANES)
    _, schedule = Simulator(problem).schedule(Plan(np.array([LANE0])))
    assert check_schedule(problem.graph, LANES, schedule) == [
        "op 'a' runs on gpu0.lane, a lane, which takes only ops pinned to it."
    ]


# -- one account ----------------------------------------------------------------------------------------------


def scored(ops: list[Op], tensors: list[Tensor], placement: list[int]) -> Score:
    """The score, which the reference gives too."""
    problem = Problem(OpGraph.build(ops, tensors), LANES)
    plan = Plan(np.array(placement))
    score = Simulator(problem).score(plan)
    assert score.peak_bytes.tolist() == list(simulate_reference(problem.graph, LANES, plan).peak_bytes)
    return score


def op(name: str, seconds: float = 1.0, **fields: Any) -> Op:
    return Op(name, time_s={"*": seconds}, **fields)


def test_a_tensor_handed_over_is_held_once_until_its_last_use() -> None:
    ops = [op("make"), op("send", 3.0), op("other", workspace_bytes=1000)]
    # `other` runs on the device while the lane still reads the tensor: both are in one memory, for 2 s.
    score = scored(ops, [Tensor("make", 100, ("send",)), Tensor("make", 0, ("other",))], [GPU0, LANE0, GPU0])
    assert score.peak_bytes.tolist() == [1100, 0, 0, 0]
    assert not score.feasible
    assert score.step_time_s == 4.0


def test_kept_bytes_and_workspaces_add_up_on_one_account() -> None:
    ops = [op("a", kept_bytes=300, workspace_bytes=50), op("b", kept_bytes=200, workspace_bytes=70)]
    assert scored(ops, [], [GPU0, LANE0]).peak_bytes.tolist() == [620, 0, 0, 0]
    assert scored(ops, [], [GPU0, GPU1]).peak_bytes.tolist() == [350, 270, 0, 0]


def test_what_comes_from_elsewhere_is_a_copy_for_each_device_that_receives_it() -> None:
    tensors = [Tensor("make", 100, ("x", "y"))]
    assert scored([op("make"), op("x"), op("y")], tensors, [GPU0, GPU1, LANE1]).peak_bytes[GPU1] == 200
    assert scored([op("make"), op("x"), op("y")], tensors, [GPU0, LANE1, LANE1]).peak_bytes[GPU1] == 100


def test_what_a_lane_receives_and_hands_on_in_no_time_is_counted_once() -> None:
    ops = [op("make"), op("receive", 0.0), op("use")]
    tensors = [Tensor("make", 100, ("receive",)), Tensor("receive", 100, ("use",))]
    assert scored(ops, tensors, [GPU0, LANE1, GPU1]).peak_bytes.tolist() == [100, 100, 0, 0]


@st.composite
def laned_problems(draw: st.DrawFn) -> Problem:
    """Any graph on any cluster with a lane for each device."""
    cluster = draw(clusters(1, 3)).with_lanes()
    return Problem(draw(graphs(kinds=(cluster.devices[0].kind, LANE))), cluster)


@given(st.data())
def test_every_implementation_has_the_same_account(data: st.DataObject) -> None:
    problem = data.draw(laned_problems())
    plan = Plan(data.draw(placements(problem)))
    score, schedule = Simulator(problem).schedule(plan)
    step = simulate_reference(problem.graph, problem.cluster, plan)
    assert score.peak_bytes.tolist() == list(step.peak_bytes)
    assert score.peak_bytes.tolist() == [size.max() for _, size in memory_steps(problem, schedule)]
    assert not score.peak_bytes[problem.memory_owner != np.arange(problem.cluster.n_devices)].any()
    said = [text for text in check_schedule(problem.graph, problem.cluster, schedule) if "but its memory is" in text]
    assert bool(said) != score.feasible
    many = Problem(problem.graph, problem.cluster, THROUGHPUT)
    found, expected = loads(many, plan), reference_loads(problem.graph, problem.cluster, plan, step)
    assert found.held_bytes.tolist() == list(expected.held_bytes)
    assert found.feasible == expected.feasible
    assert (found.held_bytes >= score.peak_bytes).all()


@given(st.data())
def test_lanes_that_nothing_uses_change_no_score(data: st.DataObject) -> None:
    cluster = data.draw(clusters(1, 4))
    graph = data.draw(graphs())
    plain, laned = Problem(graph, cluster), Problem(graph, cluster.with_lanes())
    placement = data.draw(placements(plain))
    few, many = Simulator(plain).score(Plan(placement)), Simulator(laned).score(Plan(placement))
    n, links = cluster.n_devices, len(cluster.links)
    assert many.step_time_s == few.step_time_s
    assert many.peak_bytes[:n].tolist() == few.peak_bytes.tolist()
    assert many.link_bytes[:links].tolist() == few.link_bytes.tolist()
    assert not many.link_bytes[links:].any()


def test_turns_of_two_devices_on_one_memory_add_up_in_steady_state() -> None:
    ops = [op("a", workspace_bytes=300), op("b", workspace_bytes=200)]
    graph = OpGraph.build(ops, [Tensor("a", 0, ("b",))])
    found = loads(Problem(graph, LANES, THROUGHPUT), Plan(np.array([GPU0, LANE0])))
    assert found.held_bytes.tolist() == [500, 0, 0, 0]  # in one step they never meet, in steady state they do


def test_an_agent_sees_one_memory_where_devices_share_it() -> None:
    ops = [Op(f"op{k}", kept_bytes=600, time_s={"*": 1.0}, pins=pins) for k, pins in enumerate(((LANE,), ("gpu",)))]
    graph = OpGraph.build(ops, [Tensor("op0", 0, ("op1",))])
    env = gymnasium.make(SEQUENTIAL, graph=graph, cluster=LANES)
    env.reset(seed=0)
    seen, *_ = env.step(LANE0)
    assert seen["device_state"][:, DEVICE_STATE.index("memory")].tolist() == pytest.approx([0.6, 0.0, 0.6, 0.0])
    assert seen["action_mask"].tolist() == [0, 1, 0, 0]  # 600 more bytes would not fit beside what the lane keeps
