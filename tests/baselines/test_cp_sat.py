"""CP-SAT for the makespan: equal to brute force, never below a bound, and honest about what it has proved."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import problems

from baselines import METHODS
from baselines.budget import Budget, Found
from baselines.exact.cp_sat import cp_sat, tractable
from env.bounds.bounds import lower_bound
from env.cluster import Cluster, Device, Link, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs import generators
from graphs.errors import InfeasibleError, MismatchError
from graphs.opgraph import Op, OpGraph, Tensor

ENOUGH = 200_000  # evaluations: some seconds at most, as a rule far less


def cluster(speeds: tuple[float, ...] = (1.0, 1.0), memory_bytes: int = 2**40, star: bool = False) -> Cluster:
    """Devices of these kinds of speed, every pair joined, or all of them by a switch; a byte a second."""
    devices = tuple(
        Device(f"d{i}", f"kind{speed:g}", memory_bytes, {"float32": speed}, 1e30) for i, speed in enumerate(speeds)
    )
    if star:
        return Cluster("star", devices, tuple(link for d in devices for link in both_ways(d.name, "switch", 1.0, 0.0)))
    pairs = itertools.permutations([d.name for d in devices], 2)
    return Cluster("mesh", devices, tuple(Link(a, b, 1.0) for a, b in pairs))


def value_s(problem: Problem, plan: Plan) -> float:
    return Scorer(problem).value(plan)


def single(problem: Problem) -> Plan:
    return METHODS["single_device"](problem, 0)


def solve(problem: Problem, evaluations: float = ENOUGH, start: Plan | None = None) -> tuple[Found, float]:
    found = cp_sat(problem, 0, [single(problem) if start is None else start], Budget(evaluations=evaluations))
    return found, value_s(problem, found.plan)


def brute_force_s(problem: Problem) -> float:
    """Every placement, every sequence of ops and every sequence of transfers."""
    graph, n_devices = problem.graph, problem.cluster.n_devices
    scorer, best = Scorer(problem), math.inf
    for device in itertools.product(range(n_devices), repeat=graph.n_ops):
        if not all(problem.allowed[i, d] for i, d in enumerate(device)):
            continue
        if any(len({device[i] for i in members}) > 1 for members in problem.units):
            continue
        needed = sorted(
            {
                (t, device[c])
                for t in range(graph.n_tensors)
                for c in graph.consumers_of(t).tolist()
                if device[c] != device[graph.tensor_producer[t]]
            }
        )
        for order in itertools.permutations(range(graph.n_ops)):
            for moves in itertools.permutations(needed):
                transfers = np.array(moves, dtype=np.int64).reshape(-1, 2)
                try:
                    best = min(best, scorer.value(Plan(device, order, transfers)))
                except MismatchError:  # sequences that wait for each other
                    continue
    return best


def tiny_graph(data: st.DataObject, most: int) -> OpGraph:
    """Two ops or more, whose times, tensors and memory are small whole numbers."""
    n = data.draw(st.integers(2, most), label="ops")
    numbers = st.integers(0, 5).map(float)
    ops = [
        Op(
            f"o{i}",
            flops=data.draw(numbers),
            kept_bytes=data.draw(st.integers(0, 3)),
            workspace_bytes=data.draw(st.integers(0, 2)),
            colocation=data.draw(st.sampled_from([None, None, "g"])),
        )
        for i in range(n)
    ]
    tensors = []
    for i in range(n):
        readers = data.draw(st.lists(st.integers(i + 1, n - 1), unique=True, max_size=2)) if i < n - 1 else []
        tensors.append(Tensor(f"o{i}", data.draw(st.integers(0, 3)), tuple(f"o{j}" for j in readers)))
    return OpGraph.build(ops, tensors, "tiny")


def check_against_brute_force(problem: Problem) -> None:
    try:
        start = single(problem)
    except InfeasibleError:
        return
    found, reached_s = solve(problem, start=start)
    best_s = brute_force_s(problem)
    assert reached_s == pytest.approx(best_s, rel=1e-6, abs=1e-12)
    assert found.lower_bound_s <= best_s * (1 + 1e-9)
    if best_s > 0 and lower_bound(problem).value_s < best_s:
        assert found.lower_bound_s == pytest.approx(best_s, rel=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_finds_what_brute_force_finds(data: st.DataObject) -> None:
    graph = tiny_graph(data, 4)
    speeds = data.draw(st.sampled_from([(1.0, 1.0), (1.0, 2.0)]))
    memory = data.draw(st.sampled_from([2**40, 12, 7]))
    check_against_brute_force(Problem(graph, cluster(speeds, memory, star=data.draw(st.booleans()))))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_finds_what_brute_force_finds_where_two_devices_share_a_memory(data: st.DataObject) -> None:
    graph, memory = tiny_graph(data, 3), data.draw(st.sampled_from([12, 8, 5]))
    pair = cluster((1.0, 2.0), memory)
    beside = replace(pair.devices[1], name="beside", memory_of="d0")
    links = (*pair.links, *both_ways("d0", "beside", math.inf, 0.0))
    check_against_brute_force(Problem(graph, Cluster("shared", (*pair.devices, beside), links)))


def test_a_device_idles_where_that_is_better() -> None:
    """A long op is ready at once; a short one, ready a little later, feeds a long op elsewhere and should go first."""
    ops = [
        Op("first", time_s={"*": 1.0}, pins=("kind2",)),
        Op("long", time_s={"*": 10.0}, pins=("kind1",)),
        Op("short", time_s={"*": 1.0}, pins=("kind1",)),
        Op("rest", time_s={"*": 10.0}, pins=("kind2",)),
    ]
    tensors = [Tensor("first", 0, ("short",)), Tensor("long", 0), Tensor("short", 0, ("rest",))]
    problem = Problem(OpGraph.build(ops, tensors), cluster((1.0, 2.0)))
    plan = Plan([1, 0, 0, 1])
    assert value_s(problem, plan) == 21.0  # long, then short, then rest
    found, reached_s = solve(problem, start=plan)
    assert reached_s == 12.0
    assert found.plan.transfer_order is not None
    assert found.lower_bound_s == pytest.approx(12.0)


def test_a_link_lets_a_later_tensor_go_first_where_that_is_better() -> None:
    """The big tensor is there first, but the small one is what the long op on the other side waits for."""
    ops = [
        Op("big", time_s={"*": 1.0}, pins=("kind1",)),
        Op("small", time_s={"*": 1.0}, pins=("kind1",)),
        Op("after_big", time_s={"*": 1.0}, pins=("kind2",)),
        Op("after_small", time_s={"*": 20.0}, pins=("kind2",)),
        Op("gate", time_s={"*": 1.0}, pins=("kind1",)),
    ]
    tensors = [
        Tensor("gate", 0, ("big", "small")),
        Tensor("big", 10, ("after_big",)),
        Tensor("small", 1, ("after_small",)),
    ]
    problem = Problem(OpGraph.build([ops[4], *ops[:4]], tensors), cluster((1.0, 2.0)))
    forced = Plan([0, 0, 0, 1, 1], order=np.array([0.0, 1, 2, 3, 4]))
    found, reached_s = solve(problem, start=forced)
    assert value_s(problem, forced) > reached_s == 24.0  # gate, small, 1 s on the link, 20 s, and after_big at the end
    assert found.lower_bound_s == pytest.approx(24.0)


@pytest.mark.parametrize("number", range(12))
def test_the_bound_holds_and_nothing_beats_a_proven_optimum(number: int) -> None:
    """Against every heuristic of the registry, on graphs of all generators."""
    make = list(generators.GENERATORS.values())[number % len(generators.GENERATORS)]
    kinds = ("a", "b") if number % 2 else ("a",)
    graph = make(12, seed=number, ccr=(0.1, 1.0, 3.0)[number % 3], kinds=kinds)
    devices = tuple(Device(f"d{i}", kinds[i % len(kinds)], 2**60, {"float32": 1e12}, 1e12) for i in range(3))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 12e9, 1e-5))
    problem = Problem(graph, Cluster("star", devices, links))
    plans = {name: method(problem, 0) for name, method in METHODS.items()}
    values = {name: value_s(problem, plan) for name, plan in plans.items()}
    start = plans[min(values, key=lambda name: values[name])]
    found, reached_s = solve(problem, 3_000, start)
    assert reached_s <= min(values.values())
    assert found.lower_bound_s <= reached_s
    assert all(found.lower_bound_s <= value * (1 + 1e-9) for value in values.values())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(shared=True))
def test_pins_colocation_and_memory_hold(problem: Problem) -> None:
    try:
        start = single(problem)
    except InfeasibleError:
        return
    found, reached_s = solve(problem, 500, start)
    device = found.plan.device
    assert problem.allowed[np.arange(len(device)), device].all()
    assert all(len(set(device[members].tolist())) == 1 for members in problem.units)
    assert reached_s <= value_s(problem, start)
    assert found.lower_bound_s <= reached_s


def test_units_of_time_are_coarse_enough_for_the_solver() -> None:
    """With units 2**-38 of the step, CP-SAT 9.15 calls 15.22 ms optimal here (or-tools issue 5293)."""
    graph = generators.series_parallel(30, 1042, 0.05, parallel=0.8, kinds=("a", "b"), heterogeneity=0.3)
    devices = tuple(Device(kind, kind, 2**60, {"float32": 1e12}, 1e12) for kind in "ab")
    problem = Problem(graph, Cluster("pair", devices, both_ways("a", "b", 12e9, 1e-5)))
    found, reached_s = solve(problem, 30_000, METHODS["heft"](problem, 0))
    assert reached_s == pytest.approx(15.2006103e-3, rel=1e-6)
    assert found.lower_bound_s == pytest.approx(reached_s, rel=1e-6)


def test_the_same_evaluations_give_the_same_answer() -> None:
    graph = generators.layered(20, seed=3, ccr=1.0)
    devices = tuple(Device(f"d{i}", "a", 2**60, {"float32": 1e12}, 1e12) for i in range(3))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 12e9, 1e-5))
    problem = Problem(graph, Cluster("star", devices, links))
    first, second = solve(problem, 3_000)[0], solve(problem, 3_000)[0]
    assert first.plan.device.tolist() == second.plan.device.tolist()
    assert first.lower_bound_s == second.lower_bound_s


def test_no_time_gives_the_best_start() -> None:
    problem = Problem(generators.layered(20, seed=1), cluster())
    starts = [METHODS["round_robin"](problem, 0), single(problem)]
    found = cp_sat(problem, 0, starts, Budget(seconds=0))
    assert value_s(problem, found.plan) == min(value_s(problem, plan) for plan in starts)
    assert found.lower_bound_s == 0


def test_large_problems_are_not_tried() -> None:
    small, large = (Problem(generators.layered(n, seed=1), cluster()) for n in (30, 20_000))
    assert tractable(small)
    assert not tractable(large)
    start = single(large)
    assert cp_sat(large, 0, [start], Budget(seconds=60)).plan is start
