"""Fixed sequences: devices and links that wait for what is next, in three implementations and by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import orders, placements, problems

from env.checking.checker import audit, check_schedule
from env.checking.naming import plan_of
from env.checking.reference import ReferenceResult, simulate_reference
from env.cluster import Cluster, Device, Link, both_ways
from env.plan import Plan, Priority
from env.problem import Problem
from env.simulation.simulator import Schedule, Simulator
from env.simulation.timeline import memory_steps
from graphs.errors import MismatchError
from graphs.opgraph import Op, OpGraph, Tensor

PRIORITIES = [p.value for p in Priority]


def ranks(sequence: NDArray[np.int64]) -> NDArray[np.float64]:
    rank = np.empty(len(sequence))
    rank[sequence] = np.arange(len(sequence))
    return rank


def needed(problem: Problem, device: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(tensor, receiving device) of every transfer."""
    producer, consumer, tensor = (column.tolist() for column in problem.graph.edge_list)
    return sorted(
        {(t, int(device[c])) for p, c, t in zip(producer, consumer, tensor, strict=True) if device[p] != device[c]}
    )


@st.composite
def sequences(draw: Any, problem: Problem, device: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """A random order in which ops and transfers could happen one by one."""
    producer, consumer, tensor = (column.tolist() for column in problem.graph.edge_list)
    waits: dict[object, set[object]] = {i: set() for i in range(problem.graph.n_ops)}
    for t, d in needed(problem, device):
        waits[t, d] = {int(problem.graph.tensor_producer[t])}
    for p, c, t in zip(producer, consumer, tensor, strict=True):
        waits[c].add(p if device[p] == device[c] else (t, int(device[c])))
    happened: list[Any] = []
    while waits:
        free = [node for node, needs in waits.items() if not needs]
        node = draw(st.sampled_from(free))
        happened.append(node)
        del waits[node]
        for needs in waits.values():
            needs.discard(node)
    ops = [node for node in happened if not isinstance(node, tuple)]
    moves = [node for node in happened if isinstance(node, tuple)]
    return ranks(np.array(ops)), np.array(moves, dtype=np.int64).reshape(-1, 2)


def assert_same_times(got: Schedule, expected: Schedule | ReferenceResult) -> None:
    assert got.op_start_s.tolist() == list(expected.op_start_s)
    assert got.op_end_s.tolist() == list(expected.op_end_s)
    if isinstance(expected, Schedule):
        columns = (
            expected.transfer_tensor,
            expected.transfer_target,
            expected.transfer_start_s,
            expected.transfer_end_s,
        )
        sent = list(zip(*(column.tolist() for column in columns), strict=True))
    else:
        sent = [(s.tensor, s.target, s.start_s, s.end_s) for s in expected.transfers]
    columns = (got.transfer_tensor, got.transfer_target, got.transfer_start_s, got.transfer_end_s)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    if isinstance(expected, Schedule):
        rows, sent = sorted(rows), sorted(sent)
    assert rows == sent


# -- laws -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_any_schedule_is_repeated_by_its_own_sequence(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placement = data.draw(placements(problem))
    explicit = data.draw(orders(problem)) if data.draw(st.booleans()) else None
    simulator = Simulator(problem)
    score, schedule = simulator.schedule(Plan(placement, explicit), data.draw(st.sampled_from(PRIORITIES)))
    order = ranks(schedule.order)
    again, repeated = simulator.schedule(Plan(placement, order, schedule.transfer_order))
    assert_same_times(repeated, schedule)
    assert again.step_time_s == score.step_time_s
    assert again.peak_bytes.tolist() == score.peak_bytes.tolist()
    assert again.link_bytes.tolist() == score.link_bytes.tolist()
    assert (again.bytes_moved, again.feasible) == (score.bytes_moved, score.feasible)
    np.testing.assert_allclose(again.busy_s, score.busy_s, rtol=1e-12)


@given(st.data())
def test_simulators_and_checker_agree_on_any_sequence(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placement = data.draw(placements(problem))
    order, moves = data.draw(sequences(problem, placement))
    graph, cluster = problem.graph, problem.cluster
    plan = Plan(placement, order, moves)
    score, schedule = Simulator(problem).schedule(plan)
    slow = simulate_reference(graph, cluster, plan)
    assert_same_times(schedule, slow)
    assert score.step_time_s == slow.step_time_s
    assert score.peak_bytes.tolist() == list(slow.peak_bytes)
    assert score.peak_bytes.tolist() == [size.max() for _, size in memory_steps(problem, schedule)]
    np.testing.assert_allclose(score.busy_s, slow.busy_s, rtol=1e-12)
    np.testing.assert_allclose(score.link_bytes, slow.link_bytes, rtol=1e-12)
    complaints = check_schedule(graph, cluster, schedule, plan)
    harmless = ("may only run on", "only ops pinned to it", "must share a device", "but its memory is")
    assert all(any(words in complaint for words in harmless) for complaint in complaints)


@given(st.data())
def test_the_schedule_of_a_sequence_is_a_sequence_that_repeats_it(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placement = data.draw(placements(problem))
    order, moves = data.draw(sequences(problem, placement))
    simulator = Simulator(problem)
    _, schedule = simulator.schedule(Plan(placement, order, moves))
    assert np.all(np.diff(schedule.transfer_start_s) >= 0)
    assert np.all(np.diff(schedule.op_start_s[schedule.order]) >= 0)
    again = ranks(schedule.order)
    assert_same_times(simulator.schedule(Plan(placement, again, schedule.transfer_order))[1], schedule)


@given(st.data())
def test_both_simulators_refuse_the_same_deadlocks(data: st.DataObject) -> None:
    problem = data.draw(problems(max_devices=3))
    placement = data.draw(placements(problem))
    order = data.draw(orders(problem))
    moves = data.draw(st.permutations(needed(problem, placement)))
    plan = Plan(placement, order, moves)
    try:
        slow = simulate_reference(problem.graph, problem.cluster, plan)
    except MismatchError:
        with pytest.raises(MismatchError, match=r"can never be carried out: (op|output) .* waits for .*; change one"):
            Simulator(problem).score(plan)
    else:
        assert_same_times(Simulator(problem).schedule(plan)[1], slow)


@pytest.mark.parametrize(("n", "preset"), [(60, "8xV100-nvlink"), (120, "16xV100-10gbe"), (120, "mixed-gpus")])
def test_simulators_agree_on_larger_sequences(n: int, preset: str) -> None:
    rng = np.random.default_rng(n)
    ops = [Op(f"op{i}", flops=float(rng.integers(0, 10**9)), workspace_bytes=int(rng.integers(99))) for i in range(n)]
    readers = [{f"op{j}" for j in rng.integers(i + 1, n, 3).tolist()} for i in range(n - 1)]
    tensors = [Tensor(f"op{i}", int(rng.integers(0, 10**6)), tuple(row)) for i, row in enumerate(readers)]
    problem = Problem(OpGraph.build(ops, tensors), Cluster.preset(preset))
    placement = rng.integers(0, problem.cluster.n_devices, n)
    # Ops are numbered in topological order, and so are tensors: these sequences can be carried out.
    moves = needed(problem, placement)
    order = np.arange(n, dtype=np.float64)
    plan = Plan(placement, order, moves)
    score, schedule = Simulator(problem).schedule(plan)
    slow = simulate_reference(problem.graph, problem.cluster, plan)
    assert_same_times(schedule, slow)
    assert score.peak_bytes.tolist() == list(slow.peak_bytes)
    assert check_schedule(problem.graph, problem.cluster, schedule, plan) == []


def test_a_sequence_of_many_ops_repeats_their_schedule() -> None:
    # Big enough that memory freed too early in compiled code is gone from the process.
    n, rng = 20_000, np.random.default_rng(1)
    readers = [{f"op{j}" for j in rng.integers(i + 1, min(n, i + 200), 2).tolist()} for i in range(n - 1)]
    graph = OpGraph.build(
        [Op(f"op{i}", flops=float(k), workspace_bytes=k) for i, k in enumerate(rng.integers(0, 10**9, n).tolist())],
        [Tensor(f"op{i}", int(rng.integers(10**6)), tuple(row)) for i, row in enumerate(readers)],
    )
    simulator = Simulator(Problem(graph, Cluster.preset("16xV100-10gbe")))
    placement = rng.integers(0, 16, n)
    score, schedule = simulator.schedule(Plan(placement))
    again = simulator.score(Plan(placement, ranks(schedule.order), schedule.transfer_order))
    assert again.step_time_s == score.step_time_s
    assert again.peak_bytes.tolist() == score.peak_bytes.tolist()


# -- by hand ----------------------------------------------------------------------------------------------------


def device(name: str) -> Device:
    return Device(name, "gpu", 1000, {"float32": 1.0}, 1.0)


def pair(exclusive: bool = True) -> Cluster:
    links = tuple(Link(a, b, 10.0, 0.0, exclusive) for a, b in (("a", "b"), ("b", "a")))
    return Cluster("pair", (device("a"), device("b")), links)


def op(name: str, seconds: float) -> Op:
    return Op(name, time_s={"*": seconds})


# x makes much for p, y little for q, and q takes longest.
CONTENDED = OpGraph.build(
    [op("x", 1), op("y", 2), op("p", 1), op("q", 20)],
    [Tensor("x", 0, ("y",)), Tensor("x", 100, ("p",)), Tensor("y", 20, ("q",))],
)
CONTENDED_AT = [0, 0, 1, 1]


def best_s(simulator: Simulator, placement: list[int], moves: list[tuple[int, int]], fixed: bool) -> float:
    """The least step time over all orders of ops and, in fixed sequences, of transfers."""
    found = []
    for order in itertools.permutations(range(len(placement))):
        for sequence in itertools.permutations(moves) if fixed else [None]:
            try:
                found.append(simulator.score(Plan(placement, order, sequence)).step_time_s)
            except MismatchError:
                assert fixed  # a deadlock
    return min(found)


def test_the_optimum_may_need_a_link_that_serves_a_later_transfer_first() -> None:
    simulator = Simulator(Problem(CONTENDED, pair()))
    # First come, first served: 1 for x, 10 for its tensor, 2 for y's, 20 for q.
    assert best_s(simulator, CONTENDED_AT, [(1, 1), (2, 1)], fixed=False) == 33
    # y's first: it exists at 3, q runs from 5 to 25, and p after it.
    score, schedule = simulator.schedule(Plan(CONTENDED_AT, [0, 1, 3, 2], [(2, 1), (1, 1)]))
    assert schedule.transfer_tensor.tolist() == [2, 1]
    assert schedule.transfer_start_s.tolist() == [3, 5]
    assert schedule.op_start_s.tolist() == [0, 1, 25, 5]
    assert score.step_time_s == best_s(simulator, CONTENDED_AT, [(1, 1), (2, 1)], fixed=True) == 26


def test_the_optimum_may_leave_a_device_idle() -> None:
    graph = OpGraph.build(
        [op("x", 1), op("q", 1), op("rest", 10), op("filler", 10)], [Tensor("x", 0, ("q",)), Tensor("q", 0, ("rest",))]
    )
    placement, moves = [0, 1, 0, 1], [(0, 1), (1, 0)]
    simulator = Simulator(Problem(graph, pair()))
    assert best_s(simulator, placement, moves, fixed=False) == 21  # filler is ready at once, and q waits for it
    score, schedule = simulator.schedule(Plan(placement, [0, 1, 2, 3], moves))
    assert schedule.op_start_s.tolist() == [0, 1, 2, 2]
    assert score.step_time_s == best_s(simulator, placement, moves, fixed=True) == 12
    assert score.busy_s.tolist() == [11, 11]


def test_links_that_are_not_exclusive_are_never_waited_for() -> None:
    _, schedule = Simulator(Problem(CONTENDED, pair(exclusive=False))).schedule(
        Plan(CONTENDED_AT, [0, 1, 2, 3], [(2, 1), (1, 1)])
    )
    assert schedule.transfer_tensor.tolist() == [1, 2]
    assert schedule.transfer_start_s.tolist() == [1, 3]


def test_a_transfer_waits_for_every_link_of_its_route() -> None:
    names = ("a", "b", "c")
    links = tuple(link for name in names for link in both_ways(name, "switch", 10.0, 0.0))
    cluster = Cluster("star", tuple(device(name) for name in names), links)
    graph = OpGraph.build(
        [op("x", 1), op("y", 3), op("p", 1), op("q", 1)], [Tensor("x", 30, ("p",)), Tensor("y", 30, ("q",))]
    )
    simulator = Simulator(Problem(graph, cluster))
    # Both go to c; y's, made later, is first over its port.
    _, schedule = simulator.schedule(Plan([0, 1, 2, 2], [0, 1, 3, 2], [(1, 2), (0, 2)]))
    assert schedule.transfer_start_s.tolist() == [3, 6]
    # To different devices they do not meet.
    _, schedule = simulator.schedule(Plan([0, 1, 1, 2], [0, 1, 3, 2], [(1, 2), (0, 1)]))
    assert schedule.transfer_tensor.tolist() == [0, 1]
    assert schedule.transfer_start_s.tolist() == [1, 3]


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "moves", "message"),
    [
        (None, [(1, 1), (2, 1)], "a transfer order needs an order of the ops beside it"),
        ([0, 1, 2, 3], [(1, 1)], "lacks output 0 of op 'y' to b, which the placement needs"),
        ([0, 1, 2, 3], [], "lacks output 1 of op 'x' to b"),
        ([0, 1, 2, 3], [(1, 1), (2, 1), (0, 1)], "lists output 0 of op 'x' to b, which the placement does not need"),
        ([0, 1, 2, 3], [(1, 1), (2, 1), (2, 0)], "lists output 0 of op 'y' to a, which the placement does not need"),
        ([0, 1, 2, 3], [(1, 1), (2, 1), (1, 1)], "lists output 1 of op 'x' to b twice"),
        ([0, 1, 2, 3], [(1, 1), (3, 1)], "tensor numbers of a transfer order go from 0 to 2, got 1 to 3"),
        ([0, 1, 2, 3], [(1, 1), (2, -1)], "device numbers of a transfer order go from 0 to 1, got -1 to 1"),
        ([0, 1, 2, 3], [1, 2], "two whole numbers per transfer"),
        ([0, 1, 2, 3], [(1.0, 1.0), (2.0, 1.0)], "two whole numbers per transfer"),
        (
            [1, 0, 2, 3],
            [(1, 1), (2, 1)],
            ": op 'x' waits for its turn after op 'y', op 'y' waits for an output of op 'x'; change one of them",
        ),
        ([0, 1, 2], [(1, 1), (2, 1)], "one number per op"),
    ],
)
def test_sequences_that_are_none_are_refused(order: Any, moves: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        Simulator(Problem(CONTENDED, pair())).score(Plan(CONTENDED_AT, order, moves))


def test_a_deadlock_over_a_link_names_what_waits_for_what() -> None:
    # b's first answer is to overtake the question that it answers.
    graph = OpGraph.build(
        [op("ask", 1), op("answer", 1), op("ask2", 1), op("end", 1)],
        [Tensor("ask", 1, ("answer",)), Tensor("answer", 1, ("ask2",)), Tensor("ask2", 1, ("end",))],
    )
    simulator = Simulator(Problem(graph, pair()))
    assert simulator.score(Plan([0, 1, 0, 1], [0, 1, 2, 3], [(0, 1), (1, 0), (2, 1)])).step_time_s > 4
    with pytest.raises(MismatchError) as caught:
        simulator.score(Plan([0, 1, 0, 1], [0, 1, 2, 3], [(2, 1), (0, 1), (1, 0)]))
    assert str(caught.value) == (
        "the order and the transfer order can never be carried out: op 'answer' waits for output 0 of op 'ask' to b, "
        "output 0 of op 'ask' to b waits for its turn after output 0 of op 'ask2' to b, "
        "output 0 of op 'ask2' to b waits for op 'ask2', op 'ask2' waits for output 0 of op 'answer' to a, "
        "output 0 of op 'answer' to a waits for op 'answer'; change one of them."
    )


def test_a_placement_without_transfers_has_an_empty_transfer_order() -> None:
    simulator = Simulator(Problem(CONTENDED, pair()))
    for none in ([], np.empty((0, 2), dtype=np.int64)):
        score, schedule = simulator.schedule(Plan([0, 0, 0, 0], [0, 1, 2, 3], none))
        assert score.step_time_s == 24
        assert schedule.transfer_order.shape == (0, 2)


# -- checker ----------------------------------------------------------------------------------------------------

ORDER, MOVES = [0.0, 1.0, 3.0, 2.0], [(2, 1), (1, 1)]


def good() -> Schedule:
    return Simulator(Problem(CONTENDED, pair())).schedule(Plan(CONTENDED_AT, ORDER, MOVES))[1]


def later(schedule: Schedule, i: int) -> Schedule:
    """Op ``i`` one second later."""
    shift = np.eye(len(schedule.device))[i]
    return dataclasses.replace(schedule, op_start_s=schedule.op_start_s + shift, op_end_s=schedule.op_end_s + shift)


@pytest.mark.parametrize(
    ("schedule", "order", "moves", "complaint"),
    [
        (good, [0.0, 1.0, 2.0, 3.0], MOVES, "op 'q' is out of turn on device b, where op 'p' goes first"),
        (
            good,
            ORDER,
            MOVES[::-1],
            "the output of op 'y' to b is out of turn on link a -> b, where the output of op 'x'",
        ),
        (
            lambda: later(good(), 2),
            ORDER,
            MOVES,
            "op 'p' starts at 26.0 s, though nothing keeps it from starting at 25.0 s",
        ),
        (good, ORDER, MOVES[:1], "the transfer order and the schedule differ in tensor 1 to device 1"),
        (good, ORDER, [*MOVES, (0, 1)], "the transfer order and the schedule differ in tensor 0 to device 1"),
    ],
)
def test_a_violated_sequence_is_found(schedule: Any, order: list[float], moves: Any, complaint: str) -> None:
    assert check_schedule(CONTENDED, pair(), schedule()) == []
    assert check_schedule(CONTENDED, pair(), good(), Plan(CONTENDED_AT, ORDER, MOVES)) == []
    found = check_schedule(CONTENDED, pair(), schedule(), Plan(CONTENDED_AT, order, moves))
    assert any(complaint in sentence for sentence in found), found
    assert all(sentence.endswith(".") for sentence in found)


def test_a_schedule_of_another_plan_is_found() -> None:
    assert check_schedule(CONTENDED, pair(), good(), Plan(CONTENDED_AT, ORDER)) == []
    found = check_schedule(CONTENDED, pair(), good(), Plan([0, 0, 1, 0]))
    assert found == ["op 'q' runs on b, but the plan has it on device 0."]
    with pytest.raises(MismatchError, match="a device for each of 4 ops, got 3"):
        check_schedule(CONTENDED, pair(), good(), Plan([0, 0, 1]))


PLACEMENT = {"x": "a", "y": "a", "p": "b", "q": "b"}


def test_an_audit_repeats_a_saved_sequence() -> None:
    order, moves = ["x", "y", "q", "p"], [("y", 0, "b"), ("x", 1, "b")]
    found = audit(CONTENDED, pair(), plan_of(CONTENDED, pair(), PLACEMENT, order, moves))
    assert found.step_time_s == 26
    assert found.bytes_moved == 120
    assert found.problems == ()
    score = Simulator(Problem(CONTENDED, pair())).score(Plan(CONTENDED_AT, ORDER, MOVES))
    assert list(found.peak_bytes.values()) == score.peak_bytes.tolist()


@pytest.mark.parametrize(
    ("order", "moves", "message"),
    [
        ("xyqp", [("y", 0, "b"), ("z", 1, "b")], "names op 'z'"),
        ("xyqp", [("y", 0, "b"), ("x", 2, "b")], "output 2 of op 'x', which has 2 outputs"),
        ("xyqp", [("y", 0, "b"), ("x", -1, "b")], "output -1 of op 'x'"),
        ("xyqp", [("y", 0, "b"), ("x", 1, "c")], "sends to 'c', but cluster 'pair' has a, b"),
        ("xyqp", [("y", 0, "b")], "lacks tensor 1 to device 1"),
        ("xyqp", [("y", 0, "b"), ("x", 1, "b"), ("x", 0, "b")], "has tensor 0 to device 1"),
        ("xyqp", [("y", 0, "b"), ("x", 1, "b"), ("x", 1, "b")], "has 3 transfers, expected 2"),
        ("yxqp", [("y", 0, "b"), ("x", 1, "b")], "can never be carried out: op 'y' waits without end"),
        (None, [("y", 0, "b"), ("x", 1, "b")], "needs an order of the ops beside it"),
    ],
)
def test_an_audit_refuses_sequences_that_are_none(order: str | None, moves: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        audit(CONTENDED, pair(), plan_of(CONTENDED, pair(), PLACEMENT, None if order is None else list(order), moves))
