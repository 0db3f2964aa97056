"""CPOP, PEFT, ETF, SCT and m-TOPO: the papers' examples, plain references, and instances worked out by hand."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from estimates import check as check_estimate
from estimates import estimated_schedule, mesh, topcuoglu_cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from strategies import problems

from baselines.list_schedulers.cpop import cpop, critical_device
from baselines.list_schedulers.cpop import scheduler as cpop_scheduler
from baselines.list_schedulers.estimate import FinishEstimate, ready_order
from baselines.list_schedulers.m_etf import m_etf
from baselines.list_schedulers.m_etf import scheduler as etf_scheduler
from baselines.list_schedulers.m_sct import arcs, favourite_children, m_sct, relaxation
from baselines.list_schedulers.m_sct import scheduler as sct_scheduler
from baselines.list_schedulers.m_topo import m_topo
from baselines.list_schedulers.peft import optimistic_cost_s, peft
from baselines.list_schedulers.peft import scheduler as peft_scheduler
from baselines.memory import excess_bytes
from baselines.paths import upward_rank
from env.cluster import UNLIMITED_BYTES, Cluster
from env.objectives import OBJECTIVES
from env.plan import Method
from env.problem import Problem
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.generators import topcuoglu
from graphs.opgraph import FloatArray, IntArray, Op, OpGraph, Tensor

METHODS: Mapping[str, Method] = {"cpop": cpop, "peft": peft, "m_etf": m_etf, "m_sct": m_sct, "m_topo": m_topo}
ESTIMATES: Mapping[str, Callable[[Problem], FinishEstimate]] = {
    "cpop": partial(estimated_schedule, scheduler=cpop_scheduler),
    "peft": partial(estimated_schedule, scheduler=peft_scheduler),
    "etf": partial(estimated_schedule, scheduler=etf_scheduler),
    "sct": partial(estimated_schedule, scheduler=sct_scheduler),
}


def gpus(count: int, memory: int = UNLIMITED_BYTES) -> Cluster:
    return mesh(*((f"gpu{i}", "gpu", memory) for i in range(count)))


def ops_of(**seconds: float) -> list[Op]:
    return [Op(name, time_s={"*": s}) for name, s in seconds.items()]


def waits(producer: str, consumer: str, seconds: float) -> Tensor:
    """A tensor that takes so long from any device to any other."""
    return Tensor(producer, 0, (consumer,), transfer_s=seconds)


# -- all of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=40)
@given(problem=problems(max_ops=12, edges=20, shared=True), objective=st.sampled_from(OBJECTIVES))
def test_a_plan_keeps_pins_groups_memory_and_the_order_of_the_graph(
    name: str, problem: Problem, objective: str
) -> None:
    problem = Problem(problem.graph, problem.cluster, objective)
    try:
        plan = METHODS[name](problem, 0)
    except InfeasibleError:
        return
    assert problem.allowed[np.arange(problem.graph.n_ops), plan.device].all()
    assert all(len(set(plan.device[members].tolist())) == 1 for members in problem.units)
    assert excess_bytes(problem, plan).max() <= 0
    if name != "m_topo":
        assert plan.order is not None
        assert sorted(plan.order.tolist()) == list(range(problem.graph.n_ops))
        producer, consumer, _ = problem.graph.edge_list
        assert np.all(plan.order[producer] < plan.order[consumer])


@pytest.mark.parametrize("name", ESTIMATES)
@settings(max_examples=40)
@given(problem=problems(max_ops=12, edges=24))
def test_own_schedule_waits_for_all_inputs_and_never_doubles_a_device(name: str, problem: Problem) -> None:
    try:
        estimate = ESTIMATES[name](problem)
    except InfeasibleError:
        return
    check_estimate(problem, estimate)


@pytest.mark.parametrize("name", METHODS)
def test_ops_without_time_bytes_or_edges_are_fine(name: str) -> None:
    for seconds in (0.0, 1.0):
        graph = OpGraph.build(ops_of(**{f"op{i}": seconds for i in range(6)}), [])
        assert METHODS[name](Problem(graph, gpus(3)), 0).device.shape == (6,)
    chain = OpGraph.build(ops_of(a=0.0, b=0.0, c=0.0), [waits("a", "b", 0.0), waits("b", "c", 0.0)])
    assert METHODS[name](Problem(chain, gpus(3)), 0).device.shape == (3,)


@pytest.mark.parametrize("name", METHODS)
def test_an_op_too_large_for_every_device_is_named(name: str) -> None:
    graph = OpGraph.build([Op("small", kept_bytes=1), Op("large", kept_bytes=60)], [])
    with pytest.raises(InfeasibleError, match=r"'large' .*60 bytes .*gpu\d.* \d+ bytes are free"):
        METHODS[name](Problem(graph, gpus(2, memory=50)), 0)


@pytest.mark.parametrize("name", ESTIMATES)
def test_independent_ops_keep_all_devices_busy(name: str) -> None:
    graph = OpGraph.build(ops_of(**{f"op{i}": 1.0 for i in range(3000)}), [])
    assert ESTIMATES[name](Problem(graph, gpus(3))).makespan_s == 1000.0


@given(problems(max_ops=12, edges=20), st.data())
def test_ready_order_goes_on_with_the_ready_op_of_highest_priority(problem: Problem, data: st.DataObject) -> None:
    graph, n = problem.graph, problem.graph.n_ops
    priority = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), dtype=float)
    position = np.argsort(graph.topological_order)
    missing = np.diff(graph.inputs[0])
    ready = [(-priority[i], position[i], i) for i in range(n) if missing[i] == 0]
    heapq.heapify(ready)
    expected = []
    while ready:
        op = heapq.heappop(ready)[2]
        expected.append(op)
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            for c in graph.consumers_of(tensor).tolist():
                missing[c] -= 1
                if missing[c] == 0:
                    heapq.heappush(ready, (-priority[c], position[c], c))
    assert ready_order(problem, priority).tolist() == expected


# -- CPOP ------------------------------------------------------------------------------------------------------


def test_cpop_takes_86_on_the_example_of_its_paper() -> None:
    problem = Problem(topcuoglu(), topcuoglu_cluster())
    path, device = critical_device(problem)
    assert [problem.graph.op_names[i] for i in path] == ["T1", "T2", "T9", "T10"]
    assert problem.cluster.devices[device].name == "P2"
    estimate = estimated_schedule(problem, cpop_scheduler)
    assert estimate.makespan_s == 86.0
    assert estimate.device[path].tolist() == [device] * 4


def test_an_op_of_the_critical_path_without_room_goes_elsewhere() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, time_s={"fast": 1.0, "slow": 2.0}) for i in range(3)]
    graph = OpGraph.build(ops, [waits(a.name, b.name, 0.0) for a, b in itertools.pairwise(ops)])
    problem = Problem(graph, mesh(("slow", "gpu", 100), ("fast", "gpu", 20)))
    assert cpop(problem, 0).device.tolist() == [1, 1, 0]


def test_the_device_of_the_critical_path_may_run_most_of_it() -> None:
    ops = [Op("a", time_s={"*": 1.0}), Op("b", time_s={"*": 5.0}, pins=("gpu",)), Op("c", time_s={"*": 1.0})]
    graph = OpGraph.build(ops, [waits(a.name, b.name, 0.0) for a, b in itertools.pairwise(ops)])
    problem = Problem(graph, mesh(("cpu0", "cpu", 100), ("gpu0", "gpu", 100)))
    assert critical_device(problem)[1] == 1


# -- PEFT ------------------------------------------------------------------------------------------------------


def arabnejad() -> OpGraph:
    """The example of the PEFT paper, figure 1: 10 tasks on three processors."""
    times = [(22, 21, 36), (22, 18, 18), (32, 27, 43), (7, 10, 4), (29, 27, 35)]
    times += [(26, 17, 24), (14, 25, 30), (29, 23, 36), (15, 21, 8), (13, 16, 33)]
    edges = {(1, 2): 17, (1, 3): 31, (1, 4): 29, (1, 5): 13, (1, 6): 7, (2, 8): 3, (2, 9): 30, (3, 7): 16}
    edges |= {(4, 8): 11, (4, 9): 7, (5, 9): 57, (6, 8): 5, (7, 10): 9, (8, 10): 42, (9, 10): 7}
    ops = [Op(f"T{i}", time_s={f"P{p}": float(s) for p, s in enumerate(row, 1)}) for i, row in enumerate(times, 1)]
    return OpGraph.build(ops, [waits(f"T{u}", f"T{v}", float(s)) for (u, v), s in edges.items()])


def test_peft_takes_122_on_the_example_of_its_paper() -> None:
    problem = Problem(arabnejad(), topcuoglu_cluster())
    expected = [[64, 68, 86], [42, 39, 42], [27, 41, 43], [42, 39, 50], [28, 37, 28]]
    expected += [[42, 39, 44], [13, 16, 22], [13, 16, 33], [13, 16, 20], [0, 0, 0]]
    assert optimistic_cost_s(problem).tolist() == expected
    estimate = estimated_schedule(problem, peft_scheduler)
    assert estimate.makespan_s == 122.0
    assert (estimate.device + 1).tolist() == [1, 1, 1, 1, 3, 2, 1, 2, 3, 2]


@given(problems(max_ops=10, edges=16))
def test_optimistic_cost_is_that_of_the_paper_s_recursion(problem: Problem) -> None:
    graph, n_devices = problem.graph, problem.cluster.n_devices
    expected = np.zeros((graph.n_ops, n_devices))
    for op in reversed(graph.topological_order.tolist()):
        for d, tensor in itertools.product(
            np.flatnonzero(problem.allowed[op]), range(*graph.output_ptr[op : op + 2].tolist())
        ):
            for c in graph.consumers_of(tensor).tolist():
                together = problem.unit_of[c] == problem.unit_of[op]
                least_s = min(
                    expected[c, w] + problem.op_s[c, w] + (0.0 if w == d else problem.mean_transfer_s[tensor])
                    for w in np.flatnonzero(problem.allowed[c])
                    if w == d or not together
                )
                expected[op, d] = max(expected[op, d], least_s)
    np.testing.assert_allclose(optimistic_cost_s(problem), expected, rtol=1e-12)


def test_peft_looks_ahead() -> None:
    # "first" ends sooner on d0, but "second" may only run on d1 and its input takes 9 s to get there.
    graph = OpGraph.build(
        [Op("first", time_s={"d0": 1.0, "d1": 2.0}), Op("second", time_s={"*": 1.0}, pins=("d1",))],
        [waits("first", "second", 9.0)],
    )
    problem = Problem(graph, mesh(("d0", "gpu", 100), ("d1", "gpu", 100)))
    assert peft(problem, 0).device.tolist() == [1, 1]


# -- ETF and SCT -----------------------------------------------------------------------------------------------


def reference(problem: Problem, favourite: IntArray) -> tuple[IntArray, FloatArray]:
    """Devices and starts by looking at every ready op on every device at every step; memory is not looked at."""
    graph, n, n_devices = problem.graph, problem.graph.n_ops, problem.cluster.n_devices
    rank = np.lexsort((np.argsort(graph.topological_order), -upward_rank(problem))).argsort().tolist()
    inputs = [graph.inputs[1][slice(*graph.inputs[0][i : i + 2].tolist())].tolist() for i in range(n)]
    device, start_s, end_s = np.full(n, -1), np.zeros(n), np.zeros(n)
    free_s, last, now_s = [0.0] * n_devices, [-1] * n_devices, 0.0

    def suits(op: int, d: int) -> bool:
        placed = {int(device[i]) for i in problem.units[problem.unit_of[op]]} - {-1}
        return bool(problem.allowed[op, d]) and placed <= {d}

    def arrives_s(op: int, d: int) -> float:
        sources = [int(graph.tensor_producer[t]) for t in inputs[op]]
        moves = [problem.transfer_s(t, device[i], d) for t, i in zip(inputs[op], sources, strict=True)]
        return max([0.0, *(end_s[i] + s for i, s in zip(sources, moves, strict=True))])

    for _ in range(n):
        ready = [i for i in range(n) if device[i] < 0 and all(device[graph.tensor_producer[t]] >= 0 for t in inputs[i])]
        urgent_s = {i: max(arrives_s(i, d) for d in np.flatnonzero(problem.allowed[i])) for i in ready}
        choices = []
        for d in range(n_devices):
            free = max(free_s[d], now_s)
            mine = [i for i in ready if suits(i, d)]
            if not mine:
                continue
            best_s, _, op = best = min((max(free, arrives_s(i, d)), rank[i], i) for i in mine)
            child = int(favourite[last[d]]) if last[d] >= 0 else -1
            if child in mine and max(end_s[graph.tensor_producer[t]] for t in inputs[child]) <= best_s < urgent_s[op]:
                starts = {q: max(free_s[q], now_s, arrives_s(child, q)) for q in range(n_devices) if suits(child, q)}
                if best_s <= starts[d] == min(starts.values()):
                    urgent = [(max(free, urgent_s[i]), rank[i], i) for i in mine]
                    best_s, _, op = min([*urgent, (starts[d], rank[child], child)])
            held_back = op != child and (best_s, rank[op], op) != best
            choices.append((best_s, rank[op], held_back, problem.op_s[op, d], d, op))
        now_s, _, _, op_s, d, op = min(choices)
        device[op], start_s[op], end_s[op], last[d], free_s[d] = d, now_s, now_s + op_s, op, now_s + op_s
    return device, start_s


def unlimited(problem: Problem) -> Problem:
    devices = tuple(replace(device, memory_bytes=UNLIMITED_BYTES) for device in problem.cluster.devices)
    return Problem(problem.graph, replace(problem.cluster, devices=devices))


@given(problems(max_ops=12, edges=20))
def test_etf_starts_what_can_start_first(problem: Problem) -> None:
    problem = unlimited(problem)
    device, start_s = reference(problem, np.full(problem.graph.n_ops, -1))
    estimate = estimated_schedule(problem, etf_scheduler)
    assert estimate.start_s.tolist() == start_s.tolist()
    assert estimate.device.tolist() == device.tolist()


@given(problems(max_ops=12, edges=20))
def test_sct_awaits_favourite_children(problem: Problem) -> None:
    problem = unlimited(problem)
    device, start_s = reference(problem, favourite_children(problem))
    estimate = estimated_schedule(problem, sct_scheduler)
    assert estimate.start_s.tolist() == start_s.tolist()
    assert estimate.device.tolist() == device.tolist()


def test_waiting_for_the_favourite_child_pays() -> None:
    # At 1 s d0 could start "now", whose input comes from "a" too. "b" needs 2 s to get its input from "a" elsewhere,
    # and 1 s to get that of "z" to d0.
    graph = OpGraph.build(
        ops_of(a=1.0, z=1.0, b=5.0, now=5.0), [waits("a", "b", 2.0), waits("z", "b", 1.0), waits("a", "now", 0.5)]
    )
    problem = Problem(graph, gpus(2))
    assert favourite_children(problem).tolist() == [2, -1, -1, -1]
    assert estimated_schedule(problem, etf_scheduler).start_s.tolist() == [0.0, 0.0, 3.0, 1.0]
    assert estimated_schedule(problem, sct_scheduler).start_s.tolist() == [0.0, 0.0, 2.0, 1.5]
    assert estimated_schedule(problem, sct_scheduler).device.tolist() == [0, 1, 0, 1]


def test_etf_passes_over_a_full_device() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, time_s={"*": 1.0}) for i in range(5)]
    problem = Problem(OpGraph.build(ops, []), mesh(("large", "gpu", 40), ("small", "gpu", 10)))
    assert sorted(m_etf(problem, 0).device.tolist()) == [0, 0, 0, 0, 1]


def check_favourites(problem: Problem) -> None:
    """Consumers, each named once, where a transfer can be saved."""
    favourite, found = favourite_children(problem), arcs(problem)
    useful = set(zip(found.producer[found.costly].tolist(), found.consumer[found.costly].tolist(), strict=True))
    named = favourite[favourite >= 0].tolist()
    assert len(set(named)) == len(named)
    assert all((i, child) in useful for i, child in enumerate(favourite.tolist()) if child >= 0)


@given(problems(max_ops=12, edges=20))
def test_a_favourite_child_has_one_parent_whoever_names_it(problem: Problem) -> None:
    check_favourites(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["baselines.list_schedulers.m_sct"], "MOST_ARCS", -1)
        check_favourites(problem)


def test_without_the_programme_the_longest_paths_come_first() -> None:
    graph = OpGraph.build(
        ops_of(a=1.0, short=1.0, long=9.0, end=1.0),
        [waits("a", "short", 3.0), waits("a", "long", 2.0), waits("short", "end", 2.0), waits("long", "end", 1.0)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["baselines.list_schedulers.m_sct"], "MOST_ARCS", 3)
        assert favourite_children(Problem(graph, gpus(2))).tolist() == [2, -1, 3, -1]


@pytest.mark.parametrize(
    ("tensors", "step_s", "favourite"),
    [
        ([waits("a", "b", 1.0)], 2.0, [1, -1, -1]),  # nothing is waited for
        ([waits("a", "b", 1.0), waits("a", "c", 1.0)], 2.5, [-1, -1, -1]),  # half of both, and neither is preferred
        ([waits("a", "b", 1.0), waits("a", "c", 3.0)], 2.75, [2, -1, -1]),  # 3/4 of the one, 1/4 of the other
        ([waits("a", "c", 1.0), waits("b", "c", 3.0)], 2.75, [-1, 2, -1]),
    ],
)
def test_relaxation_by_hand(tensors: list[Tensor], step_s: float, favourite: list[int]) -> None:
    problem = Problem(OpGraph.build(ops_of(a=1.0, b=1.0, c=1.0), tensors), gpus(2))
    assert relaxation(problem, arcs(problem))[1] == pytest.approx(step_s, rel=1e-6)
    assert favourite_children(problem).tolist() == favourite


@given(problems(max_ops=8, edges=14))
def test_relaxation_is_the_optimum_of_the_plain_programme(problem: Problem) -> None:
    found, n, op_s = arcs(problem), problem.graph.n_ops, problem.mean_op_s
    a = len(found.producer)
    rows, most = [], []
    for k, (i, j, transfer_s) in enumerate(zip(found.producer, found.consumer, found.transfer_s, strict=True)):
        row = np.zeros(a + n + 1)  # x, s, w
        row[k], row[a + i], row[a + j] = transfer_s, 1.0, -1.0
        rows.append(row)
        most.append(-op_s[i])
    for i in range(n):
        row = np.zeros(a + n + 1)
        row[a + i], row[-1] = 1.0, -1.0
        rows.append(row)
        most.append(-op_s[i])
        for side in (found.producer, found.consumer):
            costly = (side == i) & (found.transfer_s > 0) & ~found.apart
            if costly.any():
                rows.append(np.concatenate([-1.0 * costly, np.zeros(n + 1)]))
                most.append(1.0 - costly.sum())
    bounds = [(1.0 if apart else 0.0, 1.0) for apart in found.apart] + [(0.0, None)] * (n + 1)
    best = linprog(np.eye(a + n + 1)[-1], np.array(rows), np.array(most), bounds=bounds)
    share, step_s = relaxation(problem, found)
    assert best.fun * (1 - 1e-6) - 1e-6 <= step_s <= best.fun * (1 + 1.1e-3) + 1e-6  # waiting counts for a thousandth
    assert np.all((share > -1e-6) & (share < 1 + 1e-6))


# -- m-TOPO ----------------------------------------------------------------------------------------------------


def sized(count: int, size: int) -> OpGraph:
    return OpGraph.build([Op(f"op{i}", kept_bytes=size, time_s={"*": 1.0}) for i in range(count)], [])


def test_m_topo_gives_every_device_its_share() -> None:
    # A share is 90 / 3 bytes and one op's.
    assert m_topo(Problem(sized(9, 10), gpus(3)), 0).device.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert m_topo(Problem(sized(9, 0), gpus(3)), 0).device.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_m_topo_goes_on_where_there_is_room() -> None:
    cluster = mesh(("small", "gpu", 20), ("large", "gpu", 70), ("other", "gpu", 40))
    assert m_topo(Problem(sized(9, 10), cluster), 0).device.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    cluster = mesh(("small", "gpu", 20), ("other", "gpu", 10), ("large", "gpu", 70))
    assert m_topo(Problem(sized(9, 10), cluster), 0).device.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]


def test_m_topo_stays_in_its_turn_after_a_pinned_op() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, time_s={"*": 1.0}, pins=("d2",) if i == 1 else ()) for i in range(9)]
    problem = Problem(OpGraph.build(ops, []), mesh(*((f"d{i}", "gpu", 99) for i in range(3))))
    assert m_topo(problem, 0).device.tolist() == [0, 2, 0, 0, 0, 1, 1, 1, 1]


def test_m_topo_counts_a_group_as_one() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, colocation="tied" if i in (0, 3) else None) for i in range(4)]
    problem = Problem(OpGraph.build(ops, []), gpus(2))
    assert Units.of(problem).n_units == 3
    assert m_topo(problem, 0).device.tolist() == [0, 0, 0, 0]  # a share is 40 / 2 bytes and the 20 of the group
