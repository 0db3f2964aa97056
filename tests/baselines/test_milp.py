"""Mixed-integer programming: the optimum of tiny problems, honest bounds on larger ones, and what the budget may do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

import baselines.exact.milp as milp_module
from baselines.budget import Budget
from baselines.exact.milp import milp, tractable
from baselines.exact.symmetry import canonical, interchangeable
from env.bounds.bounds import lower_bound
from env.cluster import BLOCKING, COMMUNICATIONS, Cluster, Device, Link, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.errors import MismatchError
from graphs.generators import layered
from graphs.opgraph import IntArray, Op, OpGraph, Tensor


def device(name: str, memory_bytes: int = 1000, kind: str = "gpu") -> Device:
    return Device(name, kind, memory_bytes, {"float32": 1.0}, 1e9)


def star(n: int, communication: str = BLOCKING, memory_bytes: int = 1000) -> Cluster:
    devices = tuple(device(f"d{i}", memory_bytes) for i in range(n))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1.0, 0.0))
    return Cluster("star", devices, links, communication=communication)


def chain(seconds: list[float], size_bytes: int = 1, **more: object) -> OpGraph:
    ops = [Op(f"op{i}", flops=s, **more) for i, s in enumerate(seconds)]  # type: ignore[arg-type]
    return OpGraph.build(ops, [Tensor(f"op{i}", size_bytes, (f"op{i + 1}",)) for i in range(len(ops) - 1)])


def for_throughput(graph: OpGraph, cluster: Cluster) -> Problem:
    return Problem(graph, cluster, "throughput")


def value_s(problem: Problem, plan: Plan) -> float:
    found = loads(problem, plan)
    assert found.feasible
    return found.value_s


def together(problem: Problem) -> list[Plan]:
    return [Plan(np.zeros(problem.graph.n_ops, dtype=np.int64))]


# -- against every placement there is -------------------------------------------------------------------------------


def all_placements(problem: Problem) -> IntArray:
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    return np.array([[row[g] for g in problem.unit_of] for row in itertools.product(*choices)])


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    problem = draw(problems(max_ops=6, max_devices=3, edges=8, shared=True))
    cluster = replace(problem.cluster, communication=draw(st.sampled_from(COMMUNICATIONS)))
    return Problem(problem.graph, cluster, "throughput")


TOLERANCE = 2e-6  # HiGHS takes a row for satisfied that is off by 1e-6 of the largest time, which tiny ops fall below


@given(small_problems(), st.integers(0, 3))
def test_it_finds_and_proves_the_optimum_of_tiny_problems(problem: Problem, seed: int) -> None:
    scored = [(loads(problem, Plan(placed)), placed) for placed in all_placements(problem)]
    values = [(score.value_s, placed) for score, placed in scored if score.feasible]
    if not values:
        return
    worst = max(values, key=lambda pair: pair[0])[1]
    best_s = min(value for value, _ in values)
    found = milp(problem, seed, [Plan(worst)], Budget())
    assert value_s(problem, found.plan) == pytest.approx(best_s, rel=TOLERANCE, abs=1e-12)
    assert best_s * (1 - TOLERANCE) <= found.lower_bound_s <= best_s


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_where_a_tensor_comes_from_matters(communication: str, seed: int) -> None:
    # Every pair of devices has a rate of its own or shares memory, and tensors have several consumers.
    rng = np.random.default_rng(seed)
    devices = tuple(device(f"d{i}", 40) for i in range(3))
    rates = rng.choice([1.0, 2.0, 8.0, np.inf], (3, 3))
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    links = tuple(Link(f"d{a}", f"d{b}", rates[a, b], 0.0, bool(rng.random() < 0.8)) for a, b in pairs)
    cluster = Cluster("uneven", devices, links, communication=communication)
    ops = [Op(f"op{i}", flops=float(rng.integers(1, 6)), kept_bytes=int(rng.integers(0, 8))) for i in range(6)]
    readers = [rng.choice(np.arange(i + 1, 6), min(3, 5 - i), replace=False).tolist() for i in range(4)]
    tensors = [
        Tensor(f"op{i}", int(rng.integers(1, 6)), tuple(f"op{r}" for r in row), [None, None, 0.5, 2.0][rng.integers(4)])
        for i, row in enumerate(readers)
    ]
    problem = for_throughput(OpGraph.build(ops, tensors), cluster)
    scores = [(loads(problem, Plan(placed)), placed) for placed in all_placements(problem)]
    values = [(score.value_s, placed) for score, placed in scores if score.feasible]
    best_s, worst = min(value for value, _ in values), max(values, key=lambda pair: pair[0])[1]
    found = milp(problem, 0, [Plan(worst)], Budget())
    assert value_s(problem, found.plan) == pytest.approx(best_s, rel=1e-9)
    assert best_s * (1 - 1e-9) <= found.lower_bound_s <= best_s


@given(small_problems())
def test_the_area_and_the_largest_unit_are_bounds_on_the_load(problem: Problem) -> None:
    found = lower_bound(problem)
    scored = [loads(problem, Plan(placed)) for placed in all_placements(problem)]
    assert found.value_s <= min((score.value_s for score in scored if score.feasible), default=np.inf)
    assert (found.critical_path_s, found.communication_s) == (0.0, 0.0)
    assert found.memory_reason is None or not any(score.feasible for score in scored)


# -- by hand ------------------------------------------------------------------------------------------------------


def test_blocking_communication_counts_at_both_ends() -> None:
    # Cut 4 + 4 | 4: the ends of the one cut tensor each pay 1. Cut in the middle is impossible with three ops.
    problem = for_throughput(chain([4.0, 4.0, 4.0]), star(2))
    found = milp(problem, 0, together(problem), Budget())
    assert value_s(problem, found.plan) == pytest.approx(9.0)
    assert found.lower_bound_s == pytest.approx(9.0)


def test_overlapped_communication_costs_devices_nothing() -> None:
    problem = for_throughput(chain([4.0, 4.0, 4.0]), star(3, "overlapped"))
    found = milp(problem, 0, together(problem), Budget())
    assert value_s(problem, found.plan) == pytest.approx(4.0)
    slow = for_throughput(chain([4.0, 4.0, 4.0], size_bytes=9), star(3, "overlapped"))
    assert value_s(slow, milp(slow, 0, together(slow), Budget()).plan) == pytest.approx(9.0)  # 8 + 4, the link 9


def test_memory_can_forbid_the_best_balance() -> None:
    ops = [Op("a", flops=4.0, kept_bytes=600), Op("b", flops=4.0, kept_bytes=600), Op("c", flops=1.0)]
    graph = OpGraph.build(ops, [Tensor("a", 50, ("b",)), Tensor("b", 0, ("c",))])
    problem = for_throughput(graph, star(3))
    found = milp(problem, 0, [Plan(np.array([0, 1, 2]))], Budget())
    assert value_s(problem, found.plan) == pytest.approx(4 + 50)  # a and b do not fit together, so 50 bytes move
    roomy = for_throughput(graph, star(3, memory_bytes=10**6))
    assert value_s(roomy, milp(roomy, 0, [Plan(np.array([0, 1, 2]))], Budget()).plan) == pytest.approx(8.0)


@pytest.mark.parametrize("communication", COMMUNICATIONS)
@pytest.mark.parametrize("readers", [("b",), ("b", "c")])
def test_a_tensor_also_takes_memory_where_it_arrives(communication: str, readers: tuple[str, ...]) -> None:
    # The small device holds neither a nor b beside a's output, so nothing is gained by the other one.
    ops = [Op("a", flops=4.0, kept_bytes=300), Op("b", flops=4.0, kept_bytes=300), Op("c", flops=0.0, pins=("large",))]
    large, small = replace(device("large"), memory_bytes=2000), replace(device("small"), memory_bytes=800)
    cluster = Cluster("uneven", (large, small), both_ways("large", "small", 1e6, 0.0), communication=communication)
    problem = for_throughput(OpGraph.build(ops, [Tensor("a", 600, readers)]), cluster)
    found = milp(problem, 0, together(problem), Budget())
    assert found.plan.device.tolist() == [0, 0, 0]
    assert found.lower_bound_s == pytest.approx(8.0)


def test_colocated_and_pinned_ops_stay_where_they_must() -> None:
    ops = [Op(f"op{i}", flops=2.0, colocation="both" if i < 2 else None) for i in range(4)]
    ops[3] = replace(ops[3], pins=("cpu",))
    cluster = Cluster("two", (device("gpu0"), device("cpu0", kind="cpu")), both_ways("gpu0", "cpu0", 1.0, 0.0))
    problem = for_throughput(OpGraph.build(ops, []), cluster)
    found = milp(problem, 0, [Plan(np.ones(4, dtype=np.int64))], Budget())
    assert found.plan.device[0] == found.plan.device[1] == 0
    assert found.plan.device[3] == 1
    assert value_s(problem, found.plan) == pytest.approx(4.0)


# -- equal devices ------------------------------------------------------------------------------------------------


def test_devices_around_a_switch_can_change_names_and_those_of_a_row_cannot() -> None:
    graph = chain([1.0, 1.0])
    for communication in COMMUNICATIONS:
        assert interchangeable(for_throughput(graph, star(4, communication))) == [[0, 1, 2, 3]]
    devices = tuple(device(f"d{i}") for i in range(3))
    row = tuple(link for i in range(2) for link in both_ways(f"d{i}", f"d{i + 1}", 1.0, 0.0))
    assert interchangeable(for_throughput(graph, Cluster("row", devices, row))) == [[0, 2]]
    pair = Cluster("pair", devices[:2], both_ways("d0", "d1", 1.0, 0.0))
    assert interchangeable(for_throughput(graph, pair)) == [[0, 1]]
    wide = tuple(replace(link, exclusive="d2" not in (link.src, link.dst)) for link in star(3).links)
    for communication, classes in (("overlapped", [[0, 1]]), (BLOCKING, [[0, 1, 2]])):  # no load on such a link
        cluster = Cluster("wide", devices, wide, communication=communication)
        assert interchangeable(for_throughput(graph, cluster)) == classes
    one_way = (Link("d0", "d1", 1.0), Link("d1", "d0", 2.0))
    assert interchangeable(for_throughput(graph, Cluster("unequal", devices[:2], one_way))) == []


@given(st.data())
def test_renaming_equal_devices_changes_no_load(data: st.DataObject) -> None:
    problem = data.draw(small_problems())
    placed = np.array(data.draw(st.sampled_from([tuple(p) for p in all_placements(problem).tolist()])))
    renamed = canonical(Units.of(problem), placed, interchangeable(problem))
    before, after = loads(problem, Plan(placed)), loads(problem, Plan(renamed))
    assert after.value_s == pytest.approx(before.value_s)
    assert after.feasible == before.feasible
    assert sorted(after.device_s) == pytest.approx(sorted(before.device_s))


# -- larger problems, and the budget ------------------------------------------------------------------------------


@pytest.fixture(params=COMMUNICATIONS)
def larger(request: pytest.FixtureRequest) -> Problem:
    graph = layered(24, seed=3)
    devices = tuple(replace(device(f"d{i}", 2**60), peak_flops={"float32": 1e12}) for i in range(3))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1e10, 1e-6))
    return for_throughput(graph, Cluster("three", devices, links, communication=request.param))


def test_with_a_budget_of_nodes_the_answer_is_the_same_each_time_and_honest(larger: Problem) -> None:
    rng = np.random.default_rng(0)
    starts = [Plan(rng.integers(0, 3, larger.graph.n_ops)) for _ in range(3)]
    first, second = (milp(larger, 7, starts, Budget(evaluations=10)) for _ in range(2))
    assert np.array_equal(first.plan.device, second.plan.device)
    assert (first.lower_bound_s, first.evaluations) == (second.lower_bound_s, second.evaluations)
    assert first.evaluations <= 20  # HiGHS finishes what it has begun
    assert 0 < first.lower_bound_s <= value_s(larger, first.plan) <= min(value_s(larger, plan) for plan in starts)
    assert lower_bound(larger).value_s <= first.lower_bound_s * (1 + 1e-6)


def test_it_never_returns_worse_than_the_best_start(larger: Problem) -> None:
    good = milp(larger, 0, together(larger), Budget(evaluations=10)).plan
    again = milp(larger, 1, [*together(larger), good], Budget(evaluations=1))
    assert value_s(larger, again.plan) <= value_s(larger, good)


def test_nothing_is_tried_without_time_or_need(larger: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    (start,) = together(larger)

    def refuse(*_: object) -> None:
        raise AssertionError("the solver was called")

    monkeypatch.setattr(milp_module, "_solver", refuse)
    for budget in (Budget(0.0), Budget(evaluations=0), Budget(target_s=value_s(larger, start))):
        assert milp(larger, 0, [start], budget).plan is start
    monkeypatch.setattr(milp_module, "MOST_TERMS", 100)
    assert not tractable(larger)
    found = milp(larger, 0, [start], Budget())
    assert (found.plan, found.lower_bound_s) == (start, 0.0)


def test_a_proven_target_ends_the_search(larger: Problem) -> None:
    (start,) = together(larger)
    halfway_s = 0.6 * value_s(larger, start)  # anything this good will do
    budget = Budget(target_s=halfway_s)
    found = milp(larger, 0, [start], budget)
    assert value_s(larger, found.plan) <= halfway_s * (1 + 1e-9)


def test_when_interrupted_it_returns_its_best(larger: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(work: Callable[[], object], stop: Callable[[], None], budget: Budget) -> object:
        timer = threading.Timer(0.5, stop)
        timer.start()
        try:
            return work()
        finally:
            budget.interrupted = True
            timer.cancel()

    monkeypatch.setattr(milp_module, "run_interruptible", at_once)
    (start,) = together(larger)
    found = milp(larger, 0, [start], Budget())
    assert value_s(larger, found.plan) <= value_s(larger, start)
    assert found.lower_bound_s <= value_s(larger, found.plan)


def test_it_says_which_objective_it_is_for() -> None:
    problem = Problem(chain([1.0, 1.0]), star(2))
    with pytest.raises(MismatchError, match="'latency'"):
        milp(problem, 0, together(problem), Budget())
