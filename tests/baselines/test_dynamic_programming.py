"""Dynamic programming over linear orders, against every cut there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baselines.pipelines.chains import Memory, arranged
from baselines.pipelines.contraction import contract, linear_order, renumbered, segments, without_idle_ends
from baselines.pipelines.dp_linear import cuts, dp_linear, linear_orders, views
from env.cluster import BLOCKING, OVERLAPPED, UNLIMITED_BYTES, Cluster, Device, both_ways
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.published import neurips_cluster
from env.simulation.scoring import Scorer, loads
from graphs.errors import InfeasibleError
from graphs.generators import fork_join, layered
from graphs.opgraph import IntArray, Op, OpGraph, Phase, Tensor


def star(kinds: Sequence[str], communication: str = BLOCKING, memory_bytes: int = UNLIMITED_BYTES) -> Cluster:
    """Devices of these kinds around a switch, 1 byte/s from end to end and half a second of latency."""
    devices = tuple(Device(f"d{i}", kind, memory_bytes, {"float32": 1.0}, 1.0) for i, kind in enumerate(kinds))
    links = tuple(link for device in devices for link in both_ways(device.name, "switch", 1.0, 0.25))
    return Cluster("star", devices, links, communication=communication)


def row(times: Sequence[float], size_bytes: int = 0) -> OpGraph:
    ops = [Op(f"op{i}", time_s={"*": seconds}) for i, seconds in enumerate(times)]
    return OpGraph.build(ops, [Tensor(f"op{i}", size_bytes, (f"op{i + 1}",)) for i in range(len(times) - 1)], "row")


def value(problem: Problem, device: IntArray) -> float:
    """Largest load, infinite where memory does not suffice."""
    found = loads(problem, Plan(device))
    return found.value_s if found.feasible else math.inf


def least_cut(problem: Problem, order: IntArray) -> float:
    """The best of all ways to cut an order, int64 [n] part of each op, into one run per device."""
    n_devices, least = problem.cluster.n_devices, math.inf
    for devices in itertools.permutations(range(n_devices)):
        for inner in itertools.combinations_with_replacement(range(int(order.max()) + 2), n_devices - 1):
            device = np.array(devices)[np.searchsorted(inner, order, side="right")]
            if problem.allowed[np.arange(len(device)), device].all():
                least = min(least, value(problem, device))
    return least


@st.composite
def small_problems(draw: Any, communication: str, one_reader: bool = False, n_devices: int = 3) -> Problem:
    """A few ops with unlike times on two kinds, tensors, pins, groups and little memory on a star.

    Where memory is short it is all kept, as in the published problems: what lasts for part of a step is not exact.
    """
    memory = draw(st.sampled_from([UNLIMITED_BYTES, 12, 25, 40]))
    lasting = int(memory == UNLIMITED_BYTES)
    n = draw(st.integers(1, 7 if n_devices == 2 else 6))
    numbers = st.integers(0, 6)
    groups = st.sampled_from([None, None, None, "a", "b"])
    pins = st.sampled_from([(), (), (), (), ("cpu",), ("gpu", "cpu")])
    ops = [
        Op(
            f"op{i}",
            kept_bytes=draw(numbers),
            workspace_bytes=lasting * draw(st.integers(0, 2)),
            colocation=draw(groups),
            pins=draw(pins),
            time_s={"gpu": float(draw(numbers)), "cpu": float(draw(numbers))},
        )
        for i in range(n)
    ]
    names = draw(st.permutations([op.name for op in ops]))
    tensors = []
    for _ in range(draw(st.integers(0, 9)) if n > 1 else 0):
        at = draw(st.integers(0, n - 2))
        readers = draw(st.sets(st.integers(at + 1, n - 1), min_size=1, max_size=1 if one_reader else 3))
        measured = draw(st.sampled_from([None, None, 2.0]))
        tensors.append(Tensor(names[at], lasting * draw(numbers), tuple(names[r] for r in readers), measured))
    kinds = ["cpu", *draw(st.lists(st.sampled_from(["gpu", "cpu"]), min_size=n_devices - 1, max_size=n_devices - 1))]
    graph = OpGraph.build(ops, tensors, "small")
    return Problem(graph, star(kinds, communication, memory), THROUGHPUT)


@given(
    st.one_of(
        small_problems(BLOCKING),
        small_problems(OVERLAPPED, n_devices=2),
        small_problems(OVERLAPPED, one_reader=True),
    )
)
def test_linear_cuts_are_the_best_of_their_orders(problem: Problem) -> None:
    best = min(least_cut(problem, quotient.of_op) for quotient in linear_orders(problem))
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            dp_linear(problem, 0)
    else:
        assert value(problem, dp_linear(problem, 0).device) == pytest.approx(best, abs=1e-9)


def test_long_chains_are_cut_into_runs_and_then_exactly() -> None:
    rng = np.random.default_rng(0)
    times = rng.integers(1, 20, size=700).astype(float)
    problem = Problem(row(times.tolist()), star(["gpu"] * 5, OVERLAPPED), THROUGHPUT)
    least = times.sum()
    low, high = times.max(), times.sum()  # the least limit under which five runs hold everything, by bisection
    while high - low > 0.5:
        limit, runs, load = (low + high) // 2, 1, 0.0
        for t in times:
            runs, load = (runs + 1, t) if load + t > limit else (runs, load + t)
        low, high = (low, limit) if runs <= 5 else (limit + 1, high)
        least = min(least, limit) if runs <= 5 else least
    plan = dp_linear(problem, 0)
    assert value(problem, plan.device) == least
    assert plan.note == ""


def test_accelerators_and_cpu_cores_share_the_work_by_speed() -> None:
    ops = [Op(f"op{i}", time_s={"accelerator": 1.0, "cpu": 3.0}) for i in range(7)]
    tensors = [Tensor(f"op{i}", 0, (f"op{i + 1}",), 0.0) for i in range(6)]
    graph = OpGraph.build(ops, tensors, "row")
    problem = Problem(graph, neurips_cluster(2, 1, UNLIMITED_BYTES), THROUGHPUT)
    device = dp_linear(problem, 0).device
    assert value(problem, device) == 3.0
    assert np.bincount(device, minlength=3).tolist() == [3, 3, 1]


def test_cpu_cores_pay_nothing_for_transfers() -> None:
    ops = [Op(name, time_s={"accelerator": 2.0, "cpu": 4.0}) for name in ("first", "last")]
    graph = OpGraph.build(ops, [Tensor("first", 0, ("last",), 1.5)], "pair")
    # On two accelerators each would carry 3.5 s, on one 4 s.
    problem = Problem(graph, neurips_cluster(1, 1, UNLIMITED_BYTES), THROUGHPUT)
    assert value(problem, dp_linear(problem, 0).device) == 4.0
    two = Problem(graph, neurips_cluster(2, 0, UNLIMITED_BYTES), THROUGHPUT)
    assert value(two, dp_linear(two, 0).device) == 3.5


@st.composite
def small_trainings(draw: Any) -> Problem:
    """A few forward ops, each with a backward op that mirrors it, colocated or not, on a star."""
    n = draw(st.integers(1, 6))
    numbers = st.integers(0, 6)
    colocated = draw(st.booleans())
    ops = [
        Op(
            f"{phase.name}{i}",
            kept_bytes=draw(numbers),
            colocation=i if colocated else None,
            phase=phase,
            forward_of=f"FORWARD{i}" if phase == Phase.BACKWARD else None,
            time_s={"gpu": float(draw(numbers)), "cpu": float(draw(numbers))},
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for i in range(n)
    ]
    readers = [sorted(draw(st.sets(st.integers(i + 1, n - 1), max_size=2))) if i + 1 < n else [] for i in range(n)]
    memory = draw(st.sampled_from([UNLIMITED_BYTES, 25, 50]))
    lasting = int(memory == UNLIMITED_BYTES)
    tensors = [
        Tensor(f"FORWARD{i}", lasting * draw(numbers), (*(f"FORWARD{r}" for r in row), f"BACKWARD{i}"))
        for i, row in enumerate(readers)
    ]
    tensors += [
        Tensor(f"BACKWARD{r}", lasting * draw(numbers), (f"BACKWARD{i}",)) for i, row in enumerate(readers) for r in row
    ]
    cluster = star(["gpu", *draw(st.lists(st.sampled_from(["gpu", "cpu"]), max_size=2))], BLOCKING, memory)
    return Problem(OpGraph.build(ops, tensors, "training"), cluster, THROUGHPUT)


@given(small_trainings())
def test_backward_ops_run_with_their_forward_ops(problem: Problem) -> None:
    n, n_devices = problem.graph.n_ops // 2, problem.cluster.n_devices
    producer, consumer, _ = problem.graph.edge_list
    ahead = (producer < n) & (consumer < n)
    best = math.inf  # of contiguous placements
    for devices in itertools.product(range(n_devices), repeat=n):
        device = np.array(devices * 2)
        between = nx.DiGraph(device[[producer[ahead], consumer[ahead]]].T.tolist())
        between.remove_edges_from(list(nx.selfloop_edges(between)))
        if nx.is_directed_acyclic_graph(between):
            best = min(best, value(problem, device))
    try:
        device = dp_linear(problem, 0).device
    except InfeasibleError:
        assume(math.isinf(best))  # memory may suffice for another order only
        return
    assert (device[:n] == device[n:]).all()
    assert value(problem, device) >= best - 1e-9


@given(st.one_of(small_trainings(), small_problems(BLOCKING)))
def test_a_cut_costs_what_it_says(problem: Problem) -> None:
    for quotient in linear_orders(problem):
        for order in views(problem, quotient):
            for atoms, chain in cuts(order, lambda atoms: Memory(*np.zeros((2, atoms.count), dtype=np.int64))):
                cost_s = loads(problem, Plan(chain.device(atoms))).value_s  # of cuts that need not fit
                assert cost_s == pytest.approx(chain.value_s, abs=1e-9)


def test_gradients_that_mirror_no_forward_op_keep_the_order_of_the_backward_pass() -> None:
    ops = [Op(f"f{i}", time_s={"*": 1.0}) for i in range(3)]
    ops += [Op(f"b{i}", phase=Phase.BACKWARD, forward_of=f"f{i}", time_s={"*": 1.0}) for i in range(3)]
    ops.append(Op("sum", phase=Phase.BACKWARD, time_s={"*": 1.0}))
    tensors = [Tensor("f0", 0, ("f1",)), Tensor("f1", 0, ("f2",)), Tensor("f2", 0, ("b2",))]
    tensors += [Tensor("b2", 0, ("sum",)), Tensor("sum", 0, ("b1",)), Tensor("b1", 0, ("b0",))]
    problem = Problem(OpGraph.build(ops, tensors, "training"), star(["gpu"]), THROUGHPUT)
    quotient = contract(problem)
    place = renumbered(quotient, linear_order(problem, quotient, depth_first=True)).of_op
    assert place.tolist() == [0, 1, 3, 0, 1, 3, 2]


def test_tied_layers_do_not_keep_the_network_on_one_device() -> None:
    times = [1.0, 4.0, 4.0, 4.0, 1.0]
    graph = row(times)
    records, tensors = graph.records()
    ops = [replace(op, colocation="tied" if op.name in ("op0", "op4") else None) for op in records]
    problem = Problem(OpGraph.build(ops, tensors, "tied"), star(["gpu"] * 3, OVERLAPPED), THROUGHPUT)
    plan = dp_linear(problem, 0)
    assert plan.device[0] == plan.device[4]
    assert value(problem, plan.device) == 6.0  # 1 + 1 + 4; a contiguous split would take 14
    assert "must share a device" in plan.note


@given(st.integers(1, 30), st.integers(0, 10**6), st.integers(1, 12))
def test_coarse_graphs_have_no_cycles_and_keep_their_order(n: int, seed: int, runs: int) -> None:
    problem = Problem(layered(n, seed), star(["gpu"]), THROUGHPUT)
    quotient = contract(problem)
    quotient = renumbered(quotient, linear_order(problem, quotient, depth_first=True))
    coarse = segments(problem, quotient, runs)
    assert (coarse.edges[0] < coarse.edges[1]).all()
    assert np.unique(coarse.of_op).tolist() == list(range(coarse.count))
    producer, consumer, _ = problem.graph.edge_list
    assert (coarse.of_op[producer] <= coarse.of_op[consumer]).all()
    assert coarse.count <= runs


def test_ops_without_time_join_their_only_neighbour() -> None:
    ops = [Op("input"), Op("work", time_s={"*": 1.0}), Op("more", time_s={"*": 1.0}), Op("output"), Op("unused")]
    tensors = [Tensor("input", 8, ("work",)), Tensor("work", 8, ("more",)), Tensor("more", 8, ("output",))]
    problem = Problem(OpGraph.build(ops, tensors, "row"), star(["gpu"] * 2), THROUGHPUT)
    part = without_idle_ends(problem, contract(problem), memory_binds=False).of_op
    assert part[0] == part[1] != part[2] == part[3]
    assert part[4] in part[:4]
    assert value(problem, dp_linear(problem, 0).device) == 2.0  # the tensor between them would cost 8.5 s


def test_too_many_unlike_devices_leave_the_slowest_out() -> None:
    devices = tuple(Device(f"d{i}", "gpu", UNLIMITED_BYTES, {"float32": 12.0 - i}, 1.0) for i in range(12))
    links = tuple(link for device in devices for link in both_ways(device.name, "switch", math.inf, 0.0))
    ops = [Op(f"op{i}", flops=1.0) for i in range(60)]
    graph = OpGraph.build(ops, [Tensor(f"op{i}", 0, (f"op{i + 1}",)) for i in range(59)], "row")
    problem = Problem(graph, Cluster("unlike", devices, links), THROUGHPUT)
    plan = dp_linear(problem, 0)
    assert "2 slowest devices were left out" in plan.note
    assert set(plan.device.tolist()) <= set(range(10))
    assert value(problem, plan.device) < 1.15 * 60 / sum(range(3, 13))


def test_neighbours_in_the_network_get_neighbouring_parts() -> None:
    names = ("a0", "b0", "a1", "b1")  # two hosts, named in turns
    devices = tuple(Device(name, "gpu", UNLIMITED_BYTES, {"float32": 1.0}, 1.0) for name in names)
    links = [link for name in names for link in both_ways(name, f"host-{name[0]}", 10.0, 0.0)]
    links += both_ways("host-a", "host-b", 0.5, 0.0)
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(4)]
    tensors = [Tensor(f"op{i}", size, (f"op{i + 1}",)) for i, size in enumerate((20, 1, 20))]
    problem = Problem(OpGraph.build(ops, tensors, "row"), Cluster("hosts", devices, tuple(links)), objective=THROUGHPUT)
    moved = arranged(problem, np.arange(4), [np.arange(4)])
    values = [value(problem, np.array(order)) for order in itertools.permutations(range(4))]
    assert value(problem, moved) == min(values) == 2.0
    assert value(problem, np.arange(4)) == 80.0


def test_what_does_not_fit_is_named_with_its_bytes() -> None:
    ops = [Op("small", kept_bytes=10, time_s={"*": 1.0}), Op("large", kept_bytes=100, time_s={"*": 1.0})]
    graph = OpGraph.build(ops, [Tensor("small", 1, ("large",))], "pair")
    problem = Problem(graph, star(["gpu"] * 2, memory_bytes=50), THROUGHPUT)
    with pytest.raises(InfeasibleError, match=r"'large' needs 101 bytes on d1, where 50 bytes are free"):
        dp_linear(problem, 0)


def test_pins_that_no_contiguous_split_respects_are_named() -> None:
    ops = [Op(f"op{i}", pins=("cpu",) if i != 1 else ("gpu",), time_s={"*": 1.0}) for i in range(3)]
    graph = OpGraph.build(ops, [Tensor("op0", 1, ("op1",)), Tensor("op1", 1, ("op2",))], "row")
    problem = Problem(graph, star(["gpu", "cpu"]), THROUGHPUT)
    with pytest.raises(InfeasibleError, match=r"op .* needs .* and no contiguous split fits memory and pins"):
        dp_linear(problem, 0)


def test_steps_get_plans_within_memory_too() -> None:
    graph = layered(60, 0)
    roomy = Problem(graph, star(["gpu"] * 3, OVERLAPPED))
    peak = Scorer(roomy).simulator.score(Plan(np.zeros(60, dtype=np.int64))).peak_bytes[0]
    tight = Problem(graph, star(["gpu"] * 3, OVERLAPPED, memory_bytes=int(0.6 * peak)))
    assert math.isfinite(Scorer(tight).value(dp_linear(tight, 0)))


def test_the_seed_does_not_matter_and_answers_repeat() -> None:
    problem = Problem(fork_join(60, 2), star(["gpu"] * 3), THROUGHPUT)
    first = dp_linear(problem, 0).device
    assert (dp_linear(problem, 1).device == first).all()


def test_runs_that_no_device_suits_are_passed_over_in_silence() -> None:
    """The first half of the ops belongs on one kind, the rest on another: the run across the border suits none."""
    ops = [Op(f"op{i}", pins=("gpu",) if i < 166 else ("cpu",), time_s={"*": 1.0}) for i in range(333)]
    graph = OpGraph.build(ops, [Tensor(f"op{i}", 1, (f"op{i + 1}",)) for i in range(332)], "row")
    problem = Problem(graph, star(["gpu", "cpu"]), THROUGHPUT)
    assert dp_linear(problem, 0).device.tolist() == [0] * 166 + [1] * 167
