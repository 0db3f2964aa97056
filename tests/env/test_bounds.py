"""No bound may exceed the optimum, and each bites where it should."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from strategies import allowed_placements, problems, with_memory

from baselines import METHODS
from env.bounds import area as area_bounds
from env.bounds.area import WorkByClass
from env.bounds.bounds import Bound, lower_bound
from env.bounds.heads import Pairs
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import ClusterError, MismatchError
from graphs.generators import GENERATORS
from graphs.opgraph import Op, OpGraph, Tensor


def device(name: str, memory_bytes: int = 1000, kind: str = "gpu") -> Device:
    return Device(name, kind, memory_bytes, {"float32": 1.0}, 1.0)


def cluster(*devices: Device) -> Cluster:
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1.0, 0.0))
    return Cluster("test", devices, links)


def equal(n: int) -> Cluster:
    return cluster(*(device(f"d{i}") for i in range(n)))


def op(name: str, seconds: float, **more: object) -> Op:
    return Op(name, time_s={"*": seconds}, **more)  # type: ignore[arg-type]


def bound(ops: list[Op], edges: list[tuple[str, str]], on: Cluster) -> Bound:
    return lower_bound(Problem(OpGraph.build(ops, [Tensor(a, 1, (b,)) for a, b in edges]), on))


def with_room(problem: Problem) -> Problem:
    """The same where any placement fits."""
    devices = tuple(replace(d, memory_bytes=2**60) for d in problem.cluster.devices)
    return Problem(problem.graph, replace(problem.cluster, devices=devices), problem.objective)


# -- never above the optimum --------------------------------------------------------------------------------------


@given(st.data())
def test_no_bound_exceeds_the_optimum_of_a_tiny_problem(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=4, max_devices=3, edges=5, shared=True))
    n = problem.graph.n_ops
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    placements = np.array([[row[g] for g in problem.unit_of] for row in itertools.product(*choices)])
    orders = np.array(list(itertools.permutations(range(n))), dtype=np.float64)
    simulator = Simulator(problem)
    everything, rank = np.repeat(placements, len(orders), axis=0), np.tile(orders, (len(placements), 1))
    scores = simulator.batch(everything, orders=rank)
    best_s = scores.step_time_s.min(where=scores.feasible, initial=math.inf)
    found = lower_bound(problem)
    for value in (found.critical_path_s, found.communication_s, found.area_s, found.interval_s, found.value_s):
        assert value <= best_s
    if found.memory_reason is not None:
        assert not scores.feasible.any()


@given(st.data())
def test_no_placement_beats_the_bound(data: st.DataObject) -> None:
    problem = data.draw(problems())
    found = lower_bound(problem)
    for _ in range(3):
        score = Simulator(problem).score(Plan(data.draw(allowed_placements(problem))))
        assert found.value_s <= score.step_time_s or not score.feasible
        assert 0 <= found.gap(score.step_time_s) <= 1
        assert not (score.feasible and found.memory_reason)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from((0.2, 1.0, 5.0)), st.sampled_from(sorted(GENERATORS)))
def test_no_method_beats_the_bound_of_a_generated_graph(seed: int, ccr: float, shape: str) -> None:
    graph = GENERATORS[shape](30, seed, ccr)
    devices = tuple(replace(device(f"d{i}", 2**60), peak_flops={"float32": 1e12}) for i in range(3))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1e10, 1e-6))
    problem = Problem(graph, Cluster("three", devices, links))
    found, simulator = lower_bound(problem), Simulator(problem)
    for method in METHODS.values():
        try:
            plan = method(problem, seed)
        except MismatchError:  # not for this objective
            continue
        assert found.value_s <= simulator.score(plan).step_time_s
    rng = np.random.default_rng(seed)
    times_s = simulator.batch(rng.integers(0, 3, (20, graph.n_ops))).step_time_s
    assert found.value_s <= times_s.min()
    assert found.critical_path_s <= found.communication_s * (1 + 1e-9)


@given(st.data())
def test_heads_and_tails_hold_for_every_op(data: st.DataObject) -> None:
    problem = with_room(data.draw(problems()))
    pairs = Pairs.of(problem)
    head_s, tail_s = pairs.heads(), pairs.tails()
    score, schedule = Simulator(problem).schedule(Plan(data.draw(allowed_placements(problem))))
    slack_s = 1e-9 * score.step_time_s
    assert (head_s <= schedule.op_start_s + slack_s).all()
    assert (tail_s <= score.step_time_s - schedule.op_end_s + slack_s).all()
    assert (pairs.heads(1) <= head_s + slack_s).all()  # looking further never weakens
    assert (pairs.tails(1) <= tail_s + slack_s).all()


@given(st.data())
def test_area_is_the_linear_program(data: st.DataObject) -> None:
    problem = with_room(data.draw(problems(max_devices=4)))
    expected = fractional_area_s(problem)
    found = lower_bound(problem).area_s
    assert found <= expected * (1 + 1e-9)
    assert found == pytest.approx(expected, rel=1e-4)


def fractional_area_s(problem: Problem) -> float:
    """min T: each unit spread over its devices, no device busy for longer than T."""
    n_groups, n_devices = problem.n_units, problem.cluster.n_devices
    seconds = np.array([problem.op_s[members].sum(axis=0) for members in problem.units])
    allowed = np.array([problem.allowed[members[0]] for members in problem.units])
    load = np.zeros((n_devices, n_groups * n_devices + 1))
    whole = np.zeros((n_groups, n_groups * n_devices + 1))
    for g in range(n_groups):
        for d in range(n_devices):
            load[d, g * n_devices + d] = seconds[g, d]
            whole[g, g * n_devices + d] = 1.0
    load[:, -1] = -1.0
    limits = [(0.0, 1.0 if ok else 0.0) for ok in allowed.ravel()] + [(0.0, None)]
    objective = np.zeros(n_groups * n_devices + 1)
    objective[-1] = 1.0
    solved = linprog(objective, load, np.zeros(n_devices), whole, np.ones(n_groups), limits)
    assert solved.success
    return float(solved.fun)


# -- each by hand -------------------------------------------------------------------------------------------------


def test_the_critical_path_takes_the_fastest_device_and_free_transfers() -> None:
    ops = [Op("a", time_s={"fast": 1.0, "slow": 9.0}), Op("b", time_s={"fast": 8.0, "slow": 2.0})]
    devices = (device("fast"), device("slow"))
    assert bound(ops, [("a", "b")], cluster(*devices)).critical_path_s == pytest.approx(3.0)


def test_a_transfer_is_paid_or_avoided_by_waiting() -> None:
    # Two inputs of 5 s each, one device each: the second arrives 3 s later, or both run on one device, 10 s.
    ops = [op("a", 5.0), op("b", 5.0), op("last", 2.0)]
    for size, expected in ((3, 5 + 3 + 2), (30, 10 + 2)):
        graph = OpGraph.build(ops, [Tensor("a", size, ("last",)), Tensor("b", size, ("last",))])
        found = lower_bound(Problem(graph, equal(2)))
        assert found.critical_path_s == pytest.approx(7.0)
        assert found.communication_s == pytest.approx(expected)
        mirrored = OpGraph.build(ops, [Tensor("last", size, ("a",)), Tensor("last", size, ("b",))])
        assert lower_bound(Problem(mirrored, equal(2))).communication_s == pytest.approx(expected)


def test_what_must_be_local_brings_its_own_inputs_along() -> None:
    # Nothing is worth sending, so all four run on one device, though only two of them wait for each other directly.
    ops = [op(name, 3.0) for name in "abcd"]
    tensors = [Tensor("a", 50, ("c",)), Tensor("b", 50, ("c",)), Tensor("c", 50, ("d",))]
    assert lower_bound(Problem(OpGraph.build(ops, tensors), equal(3))).communication_s == pytest.approx(12.0)


def test_ops_that_share_a_device_never_pay_and_ops_that_cannot_always_do() -> None:
    times = {"gpu": 1.0, "cpu": 1.0}
    devices = (device("gpu0"), device("cpu0", kind="cpu"))
    apart = [Op("a", time_s=times, pins=("gpu",)), Op("b", time_s=times, pins=("cpu",))]
    assert bound(apart, [("a", "b")], cluster(*devices)).communication_s == pytest.approx(3.0)
    shared = [Op(name, time_s=times, colocation="both") for name in "ab"]
    assert bound(shared, [("a", "b")], cluster(*devices)).communication_s == pytest.approx(2.0)
    three = [op(name, 4.0, colocation="all") for name in "abc"]  # sending would save three seconds, but nobody may
    assert bound(three, [("a", "c"), ("b", "c")], equal(2)).communication_s == pytest.approx(12.0)


def test_a_measured_transfer_counts_once_per_link() -> None:
    ops = [op("a", 1.0, pins=("d0",)), op("b", 1.0, pins=("d1",))]
    graph = OpGraph.build(ops, [Tensor("a", 1, ("b",), 4.0)])
    assert lower_bound(Problem(graph, equal(2))).communication_s == pytest.approx(1 + 2 * 4 + 1)


def test_free_links_leave_the_critical_path_alone() -> None:
    links = tuple(link for name in ("d0", "d1") for link in both_ways(name, "host", math.inf, 0.0))
    ops = [op("a", 5.0), op("b", 5.0), op("last", 2.0)]
    graph = OpGraph.build(ops, [Tensor("a", 30, ("last",)), Tensor("b", 30, ("last",))])
    found = lower_bound(Problem(graph, Cluster("host", (device("d0"), device("d1")), links)))
    assert found.communication_s == pytest.approx(7.0)


# -- the largest load ---------------------------------------------------------------------------------------------


def test_a_load_is_at_least_an_even_share_and_the_largest_unit() -> None:
    ops = [op(f"op{i}", 3.0) for i in range(8)]
    found = lower_bound(Problem(OpGraph.build(ops, []), equal(4), "throughput"))
    assert (found.area_s, found.interval_s) == pytest.approx((6.0, 3.0))
    tied = [replace(o, colocation="tied" if i < 3 else None) for i, o in enumerate(ops)]
    found = lower_bound(Problem(OpGraph.build(tied, []), equal(4), "throughput"))
    assert (found.area_s, found.interval_s) == pytest.approx((6.0, 9.0))
    assert (found.critical_path_s, found.communication_s, found.value_s) == pytest.approx((0.0, 0.0, 9.0))


def test_area_of_equal_devices_is_an_even_share() -> None:
    ops = [op(f"op{i}", 3.0) for i in range(8)]
    assert bound(ops, [], equal(4)).area_s == pytest.approx(6.0)


def test_area_uses_unequal_devices_and_respects_pins() -> None:
    devices = (device("gpu0"), device("cpu0", kind="cpu"))
    ops = [Op(f"op{i}", time_s={"gpu": 1.0, "cpu": 3.0}) for i in range(8)]
    assert bound(ops, [], cluster(*devices)).area_s == pytest.approx(6.0)  # six on the GPU, two on the CPU
    pinned = [Op(o.name, time_s=o.time_s, pins=("cpu",)) for o in ops]
    assert bound(pinned, [], cluster(*devices)).area_s == pytest.approx(24.0)


def test_area_keeps_a_colocation_group_whole() -> None:
    times = ({"d0": 1.0, "d1": 9.0}, {"d0": 9.0, "d1": 1.0})
    ops = [Op(f"op{i}", time_s=seconds, colocation="both") for i, seconds in enumerate(times)]
    assert bound(ops, [], equal(2)).area_s == pytest.approx(5.0)  # 10 s wherever it is, spread over two
    assert bound(ops, [], equal(2)).interval_s == pytest.approx(10.0)  # but it is in one place


def test_interval_work_sees_a_bottleneck_between_head_and_tail() -> None:
    # 5 s, then eight ops of 2 s on two devices, then 7 s: 5 + 8 + 7.
    middle = [f"m{i}" for i in range(8)]
    ops = [op("first", 5.0), op("last", 7.0), *(op(name, 2.0) for name in middle)]
    edges = [("first", name) for name in middle] + [(name, "last") for name in middle]
    found = bound(ops, edges, equal(2))
    assert found.critical_path_s == pytest.approx(14.0)
    assert found.area_s == pytest.approx(14.0)
    assert found.interval_s == pytest.approx(20.0)
    assert found.value_s == found.interval_s


def test_ops_that_only_one_device_may_run_follow_each_other() -> None:
    ops = [op("a", 4.0), *(op(f"host{i}", 3.0, pins=("cpu",)) for i in range(3)), op("z", 2.0)]
    edges = [("a", f"host{i}") for i in range(3)] + [(f"host{i}", "z") for i in range(3)]
    devices = (device("gpu0"), device("gpu1"), device("cpu0", kind="cpu"))
    assert bound(ops, edges, cluster(*devices)).interval_s == pytest.approx(4 + 9 + 2)


def test_one_device_leaves_no_gap() -> None:
    ops = [op(f"op{i}", float(i)) for i in range(5)]
    assert bound(ops, [("op1", "op2")], equal(1)).gap(10.0) == pytest.approx(0.0, abs=1e-9)


def test_a_graph_that_takes_no_time_has_bound_and_gap_zero() -> None:
    found = bound([op("a", 0.0)], [], equal(2))
    assert (found.value_s, found.gap(0.0)) == (0.0, 0.0)


def test_a_thousand_unlike_devices_share_work_in_proportion_to_speed() -> None:
    """Where speeds are all that differs, the area is all work by all speed, whatever the number of devices."""
    rng = np.random.default_rng(0)
    work, speed = rng.uniform(1.0, 9.0, 300), rng.uniform(1.0, 4.0, 1000)
    seconds = work[:, None] / speed
    area_s, price = WorkByClass(seconds, np.ones(1000), np.arange(300), 300).area(np.ones(300, dtype=np.bool_))
    assert area_s == pytest.approx(work.sum() / speed.sum(), rel=1e-9)
    assert price.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("classes", [4, 12, 24])
def test_the_area_of_unlike_devices_is_close_below_the_linear_program(classes: int) -> None:
    rng = np.random.default_rng(classes)
    flops, moved = rng.lognormal(0.0, 2.0, (2, 60, 1))
    seconds = np.maximum(flops / rng.lognormal(0.0, 0.5, classes), moved / rng.lognormal(0.0, 0.5, classes))
    seconds[rng.random(seconds.shape) < 0.1] = np.inf
    seconds[:, 0] = np.where(np.isinf(seconds).all(axis=1), 1.0, seconds[:, 0])
    size = rng.integers(1, 4, classes).astype(np.float64)
    allowed, n = np.isfinite(seconds), len(seconds)
    ops, kinds = np.nonzero(allowed)
    loads, whole = np.zeros((classes, len(ops) + 1)), np.zeros((n, len(ops) + 1))
    loads[kinds, np.arange(len(ops))] = seconds[allowed]
    loads[:, -1] = -size
    whole[ops, np.arange(len(ops))] = 1.0
    cost = np.append(np.zeros(len(ops)), 1.0)
    best_s = linprog(cost, loads, np.zeros(classes), whole, np.ones(n)).fun
    everything = np.ones(n, dtype=np.bool_)
    area_s, price = WorkByClass(seconds, size, np.arange(n), n).area(everything)
    slack = 1e-6 if classes <= 10 else 5e-3
    assert best_s * (1 - slack) <= area_s <= best_s * (1 + 1e-9)
    assert WorkByClass(seconds, size, np.arange(n), n).area(everything, price)[0] >= area_s  # good prices are kept


def test_many_ops_are_joined_before_prices_are_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    flops, moved = rng.lognormal(0.0, 2.0, (2, 2000, 1))
    seconds = np.maximum(flops / rng.lognormal(0.0, 0.5, 3), moved / rng.lognormal(0.0, 0.5, 3))
    seconds[::7, 1] = np.inf
    work, everything = WorkByClass(seconds, np.ones(3), np.arange(2000), 2000), np.ones(2000, dtype=np.bool_)
    exact_s = work.area(everything)[0]
    monkeypatch.setattr(area_bounds, "MOST_WORK", 1)
    assert exact_s * (1 - 1e-3) <= work.area(everything)[0] <= exact_s


# -- memory -------------------------------------------------------------------------------------------------------


def test_an_op_too_large_for_every_device_is_named() -> None:
    ops = [op("small", 1.0), op("huge", 1.0, kept_bytes=900, workspace_bytes=200)]
    needed, free = "1.1 kB (1100 bytes)", "1 kB (1000 bytes)"
    assert bound(ops, [], equal(3)).memory_reason == (
        f"op 'huge' needs {needed} on one device, where the largest that suits, d0, has {free} free: "
        "100 bytes too little, however many such devices there are; it would fit with half precision (550 bytes)."
    )


def test_a_group_too_large_for_every_device_is_named() -> None:
    ops = [op(f"op{i}", 1.0, kept_bytes=400, colocation="tied") for i in range(3)]
    reason = bound(ops, [], equal(3)).memory_reason
    assert reason is not None
    assert "'op0' and the ops that must share its device need 1.2 kB (1200 bytes)" in reason


def test_more_kept_than_all_devices_hold_is_said() -> None:
    ops = [op(f"op{i}", 1.0, kept_bytes=600) for i in range(4)]
    reason = bound(ops, [], equal(2)).memory_reason
    assert reason is not None
    assert "keeps 2.4 kB" in reason
    assert "the 2 devices of 'test' have 2 kB (2000 bytes) free together: 400 bytes too little" in reason
    assert "at least 3 such devices or 2 with half precision (1.2 kB kept)" in reason
    assert "only on" not in reason  # no op is restricted
    alone = bound(ops, [], equal(1)).memory_reason
    assert alone is not None
    assert "the one device of 'test' has 1 kB (1000 bytes) free: 1.4 kB too little" in alone


def test_more_pinned_than_its_kind_holds_is_said() -> None:
    ops = [op(f"op{i}", 1.0, kept_bytes=600, pins=("cpu",)) for i in range(2)]
    devices = (device("gpu0", 10**6), device("cpu0", 1000, kind="cpu"))
    reason = bound(ops, [], cluster(*devices)).memory_reason
    assert reason is not None
    assert "only on cpu0" in reason


def test_everything_kept_and_the_largest_working_set_must_fit_together() -> None:
    ops = [op(f"op{i}", 1.0, kept_bytes=500) for i in range(3)] + [op("work", 1.0, workspace_bytes=900)]
    reason = bound(ops, [], equal(2)).memory_reason
    assert reason is not None
    assert "op 'work' needs 900 bytes" in reason
    assert bound(ops[:3], [], equal(2)).memory_reason is None


@given(st.data())
def test_no_bound_exceeds_the_best_step_that_fits_into_little_memory(data: st.DataObject) -> None:
    drawn = data.draw(problems(max_ops=4, max_devices=3, edges=6, shared=True))
    graph = drawn.graph
    share = data.draw(st.sampled_from([0.3, 0.5, 0.8]))
    memory = int(share * (graph.kept_bytes.sum() + graph.tensor_bytes.sum()))
    problem = Problem(graph, with_memory(drawn.cluster, lambda _: memory * data.draw(st.integers(1, 2))))
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    placements = np.array([[row[g] for g in problem.unit_of] for row in itertools.product(*choices)])
    orders = np.array(list(itertools.permutations(range(graph.n_ops))), dtype=np.float64)
    scores = Simulator(problem).batch(
        np.repeat(placements, len(orders), axis=0), orders=np.tile(orders, (len(placements), 1))
    )
    found = lower_bound(problem)
    assert found.value_s <= scores.step_time_s.min(where=scores.feasible, initial=math.inf)
    assert not (found.memory_reason and scores.feasible.any())


@pytest.mark.parametrize(("memory", "cuts"), [(12, 0), (7, 1), (4, 2), (3, 3), (1, 11)])
def test_a_chain_that_no_device_holds_pays_for_every_cut(memory: int, cuts: int) -> None:
    """Twelve layers of 1 byte and 1 s, 3 s from each to the next on another device; tensors of 0 bytes."""
    ops = [op(f"op{i}", 1.0, kept_bytes=1) for i in range(12)]
    tensors = [Tensor(f"op{i}", 0, (f"op{i + 1}",), transfer_s=1.5) for i in range(11)]
    devices = cluster(*(device(f"d{i}", memory) for i in range(12)))
    found = lower_bound(Problem(OpGraph.build(ops, tensors), devices))
    assert found.value_s == pytest.approx(12 + 3 * cuts)  # what the best placement takes
    assert found.critical_path_s == pytest.approx(12)


def test_layers_share_the_memory_that_their_whole_group_keeps() -> None:
    """Two tied layers keep 6 bytes at the first; with the layer between them they do not fit."""
    ops = [op("first", 1.0, kept_bytes=6, colocation=0), op("between", 1.0, kept_bytes=5)]
    ops.append(op("last", 1.0, colocation=0))
    tensors = [Tensor("first", 0, ("between",), transfer_s=1.0), Tensor("between", 0, ("last",), transfer_s=1.0)]
    graph = OpGraph.build(ops, tensors)
    assert lower_bound(Problem(graph, cluster(device("d0", 10), device("d1", 10)))).value_s == pytest.approx(3 + 4)
    assert lower_bound(Problem(graph, cluster(device("d0", 11), device("d1", 11)))).value_s == pytest.approx(3)


# -- transfers ----------------------------------------------------------------------------------------------------


@given(problems(max_ops=6))
def test_the_least_transfer_is_that_over_some_pair_of_devices_where_both_ends_may_run(problem: Problem) -> None:
    pairs = Pairs.of(problem)
    n, graph = problem.cluster.n_devices, problem.graph
    for source, target, remote_s in zip(pairs.source.tolist(), pairs.target.tolist(), pairs.remote_s, strict=True):
        ends = [
            (a, b)
            for a, b in itertools.permutations(range(n), 2)
            if problem.allowed[source, a] and problem.allowed[target, b]
        ]
        tensors = [t for t in range(graph.n_tensors) if graph.tensor_producer[t] == source]
        tensors = [t for t in tensors if target in graph.consumers_of(t)]
        apart = problem.unit_of[source] != problem.unit_of[target]
        least = [min((problem.transfer_s(t, *end) for end in ends), default=math.inf) for t in tensors]
        assert remote_s == (max(least) if apart else math.inf)


# -- times and bytes that no sum can hold -----------------------------------------------------------------------------


def chain(seconds: list[float]) -> OpGraph:
    edges = [Tensor(f"o{i}", 1, (f"o{i + 1}",)) for i in range(len(seconds) - 1)]
    return OpGraph.build([op(f"o{i}", s) for i, s in enumerate(seconds)], edges, "endless")


@pytest.mark.parametrize("seconds", [[1.0, 1e308], [1e308] * 5, [1e307] * 20, [1.0, 1e15]])
def test_ops_that_take_for_ever_together_are_refused_by_name(seconds: list[float]) -> None:
    longest = f"o{seconds.index(max(seconds))}"
    with pytest.raises(MismatchError, match=rf"graph 'endless' .* of which op '{longest}' takes .* on 'd0'; expected"):
        Problem(chain(seconds), equal(2))


def test_an_op_whose_modelled_time_overflows_is_refused_by_name() -> None:
    slow = cluster(replace(device("d0"), peak_flops={"float32": 1e-300}), device("d1"))
    with pytest.raises(MismatchError, match="op 'big' takes inf s on 'd0'"):
        Problem(OpGraph.build([Op("big", flops=1e308)], []), slow)


def test_transfers_that_take_for_ever_are_refused_by_name() -> None:
    slow = Cluster("slow", (device("d0"), device("d1")), both_ways("d0", "d1", 1e-308, 0.0))
    with pytest.raises(ClusterError, match="cluster 'slow' takes inf s for 1048576 bytes from 'd0' to 'd1'"):
        Problem(chain([1.0]), slow)
    graph = OpGraph.build([op("a", 1.0), op("b", 1.0)], [Tensor("a", 1, ("b",), transfer_s=1e300)])
    with pytest.raises(MismatchError, match="sending an output of op 'a' takes 2e\\+300 s"):
        Problem(graph, equal(2))


@pytest.mark.parametrize("seconds", [5e-324, 1e-310, 1e-300])
def test_steps_shorter_than_any_clock_have_a_peak(seconds: float) -> None:
    graph = OpGraph.build([op(f"o{i}", seconds, workspace_bytes=7) for i in range(5)], [])
    score = Simulator(Problem(graph, equal(2))).score(Plan([0, 1, 0, 1, 0]))
    assert score.peak_bytes.tolist() == [7, 7]


def test_sums_of_bytes_beyond_the_digits_of_a_float_are_exact() -> None:
    sizes = [2**58 + 1, 2**55 + 3, 2**54 + 1]
    ops = [op(name, 1.0, kept_bytes=2**54 + 1, colocation="x") for name in "ab"]
    graph = OpGraph.build(ops, [Tensor("a", size) for size in sizes])
    room = sum(sizes) + 2 * (2**54 + 1)
    for short in (0, 1):
        problem = Problem(graph, cluster(device("d0", room - short)))
        assert Simulator(problem).score(Plan([0, 0])).feasible == (short == 0)
        assert (lower_bound(problem).memory_reason is None) == (short == 0)
