"""The compiled simulator against the plain one, the checker, and schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, graphs, orders, placements, problems

from env.checking.checker import check_schedule
from env.checking.reference import ReferenceResult, simulate_reference
from env.cluster import Cluster, Device, Link, both_ways
from env.plan import Plan, Priority
from env.problem import Problem
from env.simulation.simulator import Schedule, Score, Simulator
from env.simulation.timeline import memory_steps
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import Op, OpGraph, Tensor

PRIORITIES = [p.value for p in Priority]


def close(got: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-9, atol=1e-12)


def same(fast: tuple[Score, Schedule], slow: ReferenceResult) -> None:
    score, schedule = fast
    close(score.step_time_s, slow.step_time_s)
    close(score.busy_s, slow.busy_s)
    assert score.peak_bytes.tolist() == list(slow.peak_bytes)
    close(score.link_bytes, slow.link_bytes)
    close(schedule.op_start_s, slow.op_start_s)
    close(schedule.op_end_s, slow.op_end_s)
    assert schedule.transfer_tensor.tolist() == [t.tensor for t in slow.transfers]
    assert schedule.transfer_source.tolist() == [t.source for t in slow.transfers]
    assert schedule.transfer_target.tolist() == [t.target for t in slow.transfers]
    close(schedule.transfer_start_s, [t.start_s for t in slow.transfers])
    close(schedule.transfer_end_s, [t.end_s for t in slow.transfers])


def only_infeasible(complaints: list[str]) -> bool:
    """Random placements ignore pins, groups and memory; nothing else may be wrong with their schedules."""
    harmless = ("may only run on", "only ops pinned to it", "must share a device", "but its memory is")
    return all(any(words in complaint for words in harmless) for complaint in complaints)


# -- three implementations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", PRIORITIES)
@given(st.data())
def test_simulators_and_checker_agree(priority: str, data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placement = data.draw(placements(problem))
    score, schedule = Simulator(problem).schedule(Plan(placement), priority)
    same((score, schedule), simulate_reference(problem.graph, problem.cluster, Plan(placement), priority))
    complaints = check_schedule(problem.graph, problem.cluster, schedule)
    assert only_infeasible(complaints)
    assert score.feasible == (not any("but its memory is" in complaint for complaint in complaints))
    assert score.peak_bytes.tolist() == [size.max() for _, size in memory_steps(problem, schedule)]


@given(st.data())
def test_simulators_and_checker_agree_on_an_explicit_order(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placement, order = data.draw(placements(problem)), data.draw(orders(problem))
    score, schedule = Simulator(problem).schedule(Plan(placement, order))
    same((score, schedule), simulate_reference(problem.graph, problem.cluster, Plan(placement, order)))
    assert only_infeasible(check_schedule(problem.graph, problem.cluster, schedule))


@pytest.mark.parametrize("priority", PRIORITIES)
def test_simulators_agree_on_larger_graphs(priority: str) -> None:
    rng = np.random.default_rng(7)
    for n, preset in ((60, "8xV100-nvlink"), (150, "16xV100-10gbe"), (150, "mixed-gpus")):
        ops = [
            Op(f"op{i}", flops=float(rng.integers(0, 10**9)), workspace_bytes=int(rng.integers(0, 99)), kept_bytes=i)
            for i in range(n)
        ]
        tensors = [
            Tensor(
                f"op{i}", int(rng.integers(0, 10**6)), tuple(f"op{j}" for j in set(rng.integers(i + 1, n, 3).tolist()))
            )
            for i in range(n - 1)
        ]
        problem = Problem(OpGraph.build(ops, tensors), Cluster.preset(preset))
        placement = rng.integers(0, problem.cluster.n_devices, n)
        fast = Simulator(problem).schedule(Plan(placement), priority)
        same(fast, simulate_reference(problem.graph, problem.cluster, Plan(placement), priority))
        assert check_schedule(problem.graph, problem.cluster, fast[1]) == []


# -- laws -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_batch_scores_like_single_placements_and_always_the_same(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    simulator = Simulator(problem)
    rows = np.array(data.draw(st.lists(placements(problem), min_size=1, max_size=5)))
    priority = data.draw(st.sampled_from(PRIORITIES))
    explicit = np.array([data.draw(orders(problem)) for _ in rows]) if data.draw(st.booleans()) else None
    batch = simulator.batch(rows, priority, explicit)
    again = simulator.batch(rows, priority, explicit)
    for k, row in enumerate(rows):
        score = simulator.score(Plan(row, None if explicit is None else explicit[k]), priority)
        for one in (batch, again):
            assert one.step_time_s[k] == score.step_time_s
            assert one.busy_s[k].tolist() == score.busy_s.tolist()
            assert one.peak_bytes[k].tolist() == score.peak_bytes.tolist()
            assert one.link_bytes[k].tolist() == score.link_bytes.tolist()
            assert one.bytes_moved[k] == score.bytes_moved
            assert one.feasible[k] == score.feasible


@given(st.data())
def test_one_device_takes_the_sum_of_its_op_times(data: st.DataObject) -> None:
    problem = data.draw(problems())
    d = data.draw(st.integers(0, problem.cluster.n_devices - 1))
    score = Simulator(problem).score(Plan(np.full(problem.graph.n_ops, d)), data.draw(st.sampled_from(PRIORITIES)))
    close(score.step_time_s, problem.op_s[:, d].sum())
    close(score.busy_s[d], problem.op_s[:, d].sum())
    assert score.bytes_moved == 0
    assert not score.link_bytes.any()


@given(st.data())
def test_running_in_the_order_of_a_schedule_repeats_it(data: st.DataObject) -> None:
    problem = data.draw(problems())
    placement = data.draw(placements(problem))
    score, schedule = Simulator(problem).schedule(Plan(placement), data.draw(st.sampled_from(PRIORITIES)))
    rank = np.empty(problem.graph.n_ops)
    rank[schedule.order] = np.arange(problem.graph.n_ops)
    again, repeated = Simulator(problem).schedule(Plan(placement, rank))
    close(repeated.op_start_s, schedule.op_start_s)
    close(again.step_time_s, score.step_time_s)


@given(st.data())
def test_twice_the_time_of_everything_takes_twice_as_long(data: st.DataObject) -> None:
    cluster = data.draw(clusters(whole=True))
    slow = Cluster(
        "slow",
        tuple(
            replace(
                d,
                peak_flops={key: rate / 2 for key, rate in d.peak_flops.items()},
                memory_bytes_per_s=d.memory_bytes_per_s / 2,
                launch_overhead_s=d.launch_overhead_s * 2,
            )
            for d in cluster.devices
        ),
        tuple(Link(k.src, k.dst, k.bandwidth_bytes_per_s / 2, k.latency_s * 2, k.exclusive) for k in cluster.links),
    )
    graph = data.draw(graphs(whole=True))
    ops, tensors = graph.records()
    plain = OpGraph.build(
        [Op(op.name, flops=op.flops, bytes_moved=op.bytes_moved, kernels=op.kernels) for op in ops],
        [Tensor(t.producer, t.bytes, t.consumers) for t in tensors],
    )
    placement = data.draw(placements(Problem(plain, cluster)))
    fast_s = Simulator(Problem(plain, cluster)).score(Plan(placement)).step_time_s
    assert Simulator(Problem(plain, slow)).score(Plan(placement)).step_time_s == pytest.approx(2 * fast_s, rel=1e-9)


def test_a_placement_of_the_wrong_shape_or_device_is_refused() -> None:
    simulator = Simulator(Problem(OpGraph.build([Op("a"), Op("b")], []), pair()))
    for wrong in ([0], [0, 1, 0], [[0, 1]]):
        with pytest.raises(MismatchError, match="one whole device number for each"):
            simulator.score(Plan(wrong))
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(MismatchError, match="from 0 to 1"):
            simulator.score(Plan(wrong))
    with pytest.raises(MismatchError, match="explicit order"):
        simulator.score(Plan([0, 1], [1.0]))
    with pytest.raises(UnknownNameError, match="did you mean 'fifo'"):
        simulator.score(Plan([0, 1]), "fifi")


# -- by hand ----------------------------------------------------------------------------------------------------


def device(name: str, memory_bytes: int = 1000) -> Device:
    return Device(name, "gpu", memory_bytes, {"float32": 1.0}, 1.0)


def pair(bandwidth: float = 10.0, latency_s: float = 1.0) -> Cluster:
    return Cluster("pair", (device("a"), device("b")), both_ways("a", "b", bandwidth, latency_s))


def op(name: str, seconds: float, kept: int = 0, workspace: int = 0) -> Op:
    return Op(name, time_s={"*": seconds}, kept_bytes=kept, workspace_bytes=workspace)


def test_a_chain_over_two_devices() -> None:
    graph = OpGraph.build([op("x", 2), op("y", 3)], [Tensor("x", 20, ("y",))])
    score, schedule = Simulator(Problem(graph, pair())).schedule(Plan([0, 1]))
    assert schedule.op_start_s.tolist() == [0, 5]  # 2 + (1 + 20 / 10)
    assert score.step_time_s == 8
    assert score.busy_s.tolist() == [2, 3]
    assert score.link_bytes.tolist() == [20, 0]
    assert score.bytes_moved == 20


def test_a_tensor_goes_once_to_each_device_that_needs_it() -> None:
    graph = OpGraph.build([op("x", 1), op("y", 1), op("z", 1)], [Tensor("x", 10, ("y", "z"))])
    score, schedule = Simulator(Problem(graph, pair())).schedule(Plan([0, 1, 1]))
    assert score.bytes_moved == 10
    assert schedule.op_start_s.tolist() == [0, 3, 4]


def test_a_link_serves_first_come_first_served_and_each_direction_for_itself() -> None:
    graph = OpGraph.build(
        [op("x", 1), op("y", 1), op("back", 1), op("p", 1), op("q", 1), op("r", 1)],
        [Tensor("x", 10, ("p",)), Tensor("y", 10, ("q",)), Tensor("back", 10, ("r",))],
    )
    _, schedule = Simulator(Problem(graph, pair())).schedule(Plan([0, 0, 1, 1, 1, 0]))
    assert schedule.transfer_start_s.tolist() == [1, 1, 3]
    assert schedule.transfer_tensor.tolist() == [0, 2, 1]
    assert schedule.transfer_end_s.tolist() == [3, 3, 5]


def test_a_transfer_occupies_every_link_of_its_route_at_once() -> None:
    names = ("a", "b", "c")
    links = tuple(link for name in names for link in both_ways(name, "switch", 10.0, 0.0))
    cluster = Cluster("star", tuple(device(name) for name in names), links)
    graph = OpGraph.build(
        [op("x", 1), op("y", 1), op("p", 1), op("q", 1)], [Tensor("x", 30, ("p",)), Tensor("y", 30, ("q",))]
    )
    # Both go to c, whose port carries one at a time.
    _, schedule = Simulator(Problem(graph, cluster)).schedule(Plan([0, 1, 2, 2]))
    assert schedule.transfer_end_s.tolist() == [4, 7]
    # To different devices they do not meet.
    _, schedule = Simulator(Problem(graph, cluster)).schedule(Plan([0, 1, 1, 2]))
    assert schedule.transfer_end_s.tolist() == [4, 4]


def test_longest_path_runs_the_op_with_the_longest_rest_first() -> None:
    graph = OpGraph.build([op("short", 3), op("long", 1), op("after", 5)], [Tensor("long", 10, ("after",))])
    simulator = Simulator(Problem(graph, pair()))
    assert simulator.schedule(Plan([0, 0, 1]), "longest_path")[1].op_start_s.tolist() == [1, 0, 3]
    assert simulator.schedule(Plan([0, 0, 1]), "fifo")[1].op_start_s.tolist() == [0, 3, 6]
    assert simulator.schedule(Plan([0, 0, 1], [1, 0, 0]))[1].op_start_s.tolist() == [1, 0, 3]


def test_ops_without_duration_keep_their_place_in_the_order() -> None:
    # Both inputs are there at once; the second goes first because it is needed for longer.
    graph = OpGraph.build(
        [op("a", 0), op("b", 0), op("short", 1), op("long", 5)],
        [Tensor("a", 20, ("short",)), Tensor("b", 20, ("long",))],
    )
    simulator = Simulator(Problem(graph, pair()))
    _, schedule = simulator.schedule(Plan([0, 0, 1, 1]))
    assert schedule.transfer_tensor.tolist() == [1, 0]
    rank = np.argsort(schedule.order)
    assert simulator.schedule(Plan([0, 0, 1, 1], rank))[1].op_start_s.tolist() == schedule.op_start_s.tolist()


def test_msr_feeds_an_idle_device_first() -> None:
    # Both have one successor; only feed's is remote and on a device that idles, local's is the longer path.
    graph = OpGraph.build(
        [op("local", 1), op("feed", 1), op("big", 9), op("small", 1)],
        [Tensor("local", 0, ("big",)), Tensor("feed", 0, ("small",))],
    )
    simulator = Simulator(Problem(graph, pair(latency_s=0.0)))
    assert simulator.schedule(Plan([0, 0, 0, 1]), "longest_path")[1].op_start_s.tolist() == [0, 10, 1, 11]
    # msr: local 1 + 1 + 5 (the choosing device counts as idle), feed 1 + 1 + 1 + 5.
    assert simulator.schedule(Plan([0, 0, 0, 1]), "msr")[1].op_start_s.tolist() == [1, 0, 2, 1]


def test_memory_counts_tensors_from_production_or_transfer_to_their_last_use() -> None:
    graph = OpGraph.build(
        [op("x", 2, kept=100, workspace=7), op("y", 3, kept=200), op("z", 1)], [Tensor("x", 20, ("y", "z"))]
    )
    problem = Problem(graph, pair())
    score, schedule = Simulator(problem).schedule(Plan([0, 1, 0]))
    assert score.peak_bytes.tolist() == [127, 220]
    (times_a, bytes_a), (times_b, bytes_b) = memory_steps(problem, schedule)
    assert times_a.tolist() == [0, 2, 5]  # the workspace goes at 2; z ends at 3, the transfer at 5
    assert bytes_a.tolist() == [127, 120, 100]
    assert times_b.tolist() == [0, 2, 8]
    assert bytes_b.tolist() == [200, 220, 200]


def test_what_ends_is_gone_before_what_starts_at_the_same_instant() -> None:
    graph = OpGraph.build([op("x", 1, workspace=60), op("y", 1, workspace=50)], [])
    assert Simulator(Problem(graph, pair())).score(Plan([0, 0])).peak_bytes.tolist() == [60, 0]


def test_measured_transfers_count_the_links_of_the_route() -> None:
    names = ("a", "b")
    links = tuple(link for name in names for link in both_ways(name, "switch", 1e-3, 7.0))
    cluster = Cluster("star", tuple(device(name) for name in names), links)
    graph = OpGraph.build([op("x", 1), op("y", 1)], [Tensor("x", 10**6, ("y",), transfer_s=0.5)])
    assert Simulator(Problem(graph, cluster)).score(Plan([0, 1])).step_time_s == 3.0


def test_an_op_measured_elsewhere_only_is_refused_rather_than_free() -> None:
    graph = OpGraph.build([Op("a", time_s={"tpu": 0.5})], [])
    with pytest.raises(MismatchError, match="op 'a' has measured times for tpu, but none for device"):
        Problem(graph, pair())
    assert Problem(OpGraph.build([Op("a", time_s={"tpu": 0.5}, flops=1.0)], []), pair()).op_s.shape == (1, 2)


def test_numbers_that_are_no_devices_or_places_are_refused() -> None:
    simulator = Simulator(Problem(OpGraph.build([Op("a"), Op("b")], []), pair()))
    for wrong in ([0.9, 1.0], [2**33, 0], [0, -1]):
        with pytest.raises(MismatchError):
            simulator.score(Plan(wrong))
    with pytest.raises(MismatchError, match="NaN"):
        simulator.score(Plan([0, 1], [float("nan"), 1.0]))
