"""Local search for the makespan: the same times as the simulator, honest answers, and optima that can be counted."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import allowed_placements, orders, problems

import baselines.local_search.makespan_search as search_module
from baselines.budget import Budget
from baselines.list_schedulers.heft import heft
from baselines.local_search.groups import groupings
from baselines.local_search.makespan_moves import anneal
from baselines.local_search.makespan_search import makespan_search
from baselines.local_search.makespan_state import BEST, BY_TAIL, DECAY, NOW, TEMPERATURE, instance_of, new_state
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Simulator
from env.units import Units
from graphs.generators import fork_join, layered
from graphs.opgraph import Op, OpGraph, Tensor


def star(n: int, memory_bytes: int = 2**40, bytes_per_s: float = 1.0) -> Cluster:
    """Equal devices behind one switch."""
    devices = tuple(Device(f"d{i}", "gpu", memory_bytes, {"float32": 1.0}, 1e9) for i in range(n))
    return Cluster("star", devices, tuple(x for d in devices for x in both_ways(d.name, "switch", bytes_per_s, 0.0)))


def value(problem: Problem, plan: Plan) -> float:
    return Scorer(problem).value(plan)


def plan_of(device: list[int], order: list[int] | None = None, transfer_order: list[list[int]] | None = None) -> Plan:
    in_order = None if order is None else np.array(order, np.float64)
    return Plan(np.array(device), in_order, None if transfer_order is None else np.array(transfer_order))


def start_of(problem: Problem) -> Plan:
    return Plan(problem.allowed.argmax(axis=1))


def found_by(problem: Problem, starts: list[Plan], seed: int = 0, evaluations: int = 2000) -> Plan:
    return makespan_search(problem, seed, starts, Budget(evaluations=evaluations)).plan


def optimum(problem: Problem) -> float:
    """The best of all placements under all orders, infinite if none fits."""
    n, simulator = problem.graph.n_ops, Simulator(problem)
    every_order = np.array(list(itertools.permutations(range(n))), dtype=np.float64)
    best = math.inf
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    for chosen in itertools.product(*choices):
        device = np.array(chosen)[problem.unit_of]
        scores = simulator.batch(np.tile(device, (len(every_order), 1)), orders=every_order)
        best = min(best, float(np.where(scores.feasible, scores.step_time_s, np.inf).min()))
    return best


# -- the compiled loop ------------------------------------------------------------------------------------------------


@given(st.data())
def test_every_accepted_state_is_what_the_simulator_says(data: st.DataObject) -> None:
    """Trials that are given up early change no time and no verdict."""
    problem = data.draw(problems(shared=True))
    simulator = Simulator(problem)
    device = data.draw(allowed_placements(problem))
    order = data.draw(st.none() | orders(problem))
    state = new_state(instance_of(problem), len(problem.cluster.links), data.draw(st.integers(0, 2**32)))
    state.device[:], state.counts[BY_TAIL], state.values[BEST] = device, order is None, np.inf
    if order is not None:
        state.key[:] = -order
    score = simulator.score(Plan(device, order))
    assert anneal(instance_of(problem), state, 0, begin=True) == score.feasible
    if not score.feasible:
        return
    state.values[TEMPERATURE], state.values[DECAY] = 0.3 * score.step_time_s, 1.0
    for _ in range(20):
        assert anneal(instance_of(problem), state, 4)
        score = simulator.score(Plan(state.device, None if state.counts[BY_TAIL] else -state.key))
        assert score.feasible
        assert score.step_time_s == state.values[NOW]
        assert simulator.score(Plan(state.best_device, -state.best_key)).step_time_s == state.values[BEST]
        assert problem.allowed[np.arange(problem.graph.n_ops), state.device].all()


def test_large_graphs_stay_exact() -> None:
    """On links that are waited for."""
    problem = Problem(layered(400, seed=5), star(4, bytes_per_s=12e9))
    simulator, instance = Simulator(problem), instance_of(problem)
    state = new_state(instance, len(problem.cluster.links), 3)
    device = np.arange(400) % 4
    state.device[:], state.values[BEST] = device, np.inf
    state.key[:] = -np.arange(400)
    assert anneal(instance, state, 0, begin=True)
    state.values[TEMPERATURE], state.values[DECAY] = 1e-3, 1.0
    for _ in range(60):
        anneal(instance, state, 20)
        assert simulator.score(Plan(state.device, -state.key)).step_time_s == state.values[NOW]


# -- the search -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_never_worse_than_a_start_and_always_allowed(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    placed = [data.draw(allowed_placements(problem)) for _ in range(2)]
    starts = [plan for device in placed if value(problem, plan := Plan(device)) < math.inf]
    if not starts:
        return
    budget = Budget(evaluations=150)
    found = makespan_search(problem, data.draw(st.integers(0, 9)), starts, budget)
    assert value(problem, found.plan) <= min(value(problem, plan) for plan in starts)
    assert found.evaluations == budget.spent <= 150
    assert problem.allowed[np.arange(problem.graph.n_ops), found.plan.device].all()
    assert all(len(set(found.plan.device[members].tolist())) == 1 for members in problem.units)


@settings(max_examples=25)
@given(problems(max_ops=5, max_devices=3))
def test_it_finds_the_optimum_of_tiny_problems(problem: Problem) -> None:
    best = optimum(problem)
    start = Plan(problem.allowed.argmax(axis=1))
    if value(problem, start) == math.inf:
        return
    assert value(problem, found_by(problem, [start], evaluations=20_000)) == pytest.approx(best, rel=1e-9)


def test_it_improves_heft_where_links_are_shared() -> None:
    """HEFT takes links for idle: it sends eight tensors over one link at once, which then queue."""
    ops = [Op("root", time_s={"*": 1.0}), *(Op(f"leaf{k}", time_s={"*": 6.0}) for k in range(8))]
    tensors = [Tensor("root", 5, (f"leaf{k}",)) for k in range(8)]
    problem = Problem(OpGraph.build(ops, tensors), star(4))
    plan = heft(problem, 0)
    heft_s = min(value(problem, plan), value(problem, Plan(plan.device)))
    assert heft_s > 36
    # Transfers reach the others after 6, 11, 16, ... s: three of them at once run six leaves while root runs five.
    assert value(problem, found_by(problem, [plan])) <= 0.85 * heft_s


def test_order_matters_and_is_found() -> None:
    """Both of a device's ops are ready at once; the default priority starts the wrong one, whatever the placement."""
    ops = [Op("a", time_s={"*": 2.0}, pins=("d0",)), Op("b", time_s={"*": 2.0}, pins=("d0",))]
    ops += [Op("c", time_s={"*": 3.0}, pins=("d1",)), Op("d", time_s={"*": 1.0}, pins=("d1",))]
    ops += [Op("e", time_s={"*": 3.0}, pins=("d0",))]
    tensors = [Tensor("a", 1, ("c",)), Tensor("b", 1, ("d",)), Tensor("d", 1, ("e",))]
    problem = Problem(OpGraph.build(ops, tensors), star(2))
    assert value(problem, found_by(problem, [start_of(problem)])) == pytest.approx(optimum(problem))


def test_what_does_not_fit_is_never_returned() -> None:
    """Two ops fit a device only one at a time, though together they would be faster."""
    ops = [Op(f"op{k}", time_s={"*": 1.0}, kept_bytes=60) for k in range(2)]
    problem = Problem(OpGraph.build(ops, [Tensor("op0", 100, ("op1",))]), star(2, memory_bytes=165))
    start = plan_of([0, 1])
    assert value(problem, start) == pytest.approx(102)
    assert value(problem, plan_of([0, 0])) == math.inf
    found = found_by(problem, [start])
    assert value(problem, found) == pytest.approx(102)
    assert len(set(found.device.tolist())) == 2


@pytest.mark.parametrize("n", [30, 300])
def test_same_seed_and_evaluations_same_answer(n: int) -> None:
    problem = Problem(fork_join(n, seed=1), star(4, bytes_per_s=12e9))
    start = heft(problem, 0)
    runs = [makespan_search(problem, seed, [start], Budget(evaluations=4001)) for seed in (7, 7, 8)]
    assert [run.evaluations for run in runs] == [4001] * 3
    for first, second in ((runs[0], runs[1]),):
        assert (first.plan.device == second.plan.device).all()
        assert first.plan.order is not None
        assert second.plan.order is not None
        assert (first.plan.order == second.plan.order).all()
    assert not np.array_equal(runs[0].plan.device, runs[2].plan.device)


def test_the_answer_does_not_depend_on_the_length_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round only says when the clock is looked at."""
    problem = Problem(fork_join(60, seed=2), star(4, bytes_per_s=12e9))
    start = heft(problem, 0)
    monkeypatch.setattr(search_module, "FIRST_CYCLE", 1000 * 60)
    plans = []
    for length in (60_000, 600_000):
        monkeypatch.setattr(search_module, "ROUND", length)
        plans.append(found_by(problem, [start], evaluations=6000))
    assert (plans[0].device == plans[1].device).all()


def test_more_evaluations_are_never_worse() -> None:
    problem = Problem(layered(80, seed=4), star(4, bytes_per_s=12e9))
    start = heft(problem, 0)
    times = [value(problem, found_by(problem, [start], seed=1, evaluations=e)) for e in (1, 500, 5000, 20_000)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.9 * times[0]


def test_the_order_of_the_plan_repeats_its_schedule() -> None:
    problem = Problem(layered(80, seed=4), star(4, bytes_per_s=12e9))
    plan = found_by(problem, [heft(problem, 0)])
    _, schedule = Simulator(problem).schedule(plan)
    assert plan.order is not None
    assert (np.argsort(plan.order) == schedule.order).all()


# -- budget -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def branches() -> Problem:
    return Problem(fork_join(40, seed=0), star(3, bytes_per_s=12e9))


def test_a_budget_of_nothing_gives_the_best_start(branches: Problem) -> None:
    starts = [Plan(np.arange(40) % 3), heft(branches, 0)]
    budget = Budget(seconds=0.0)
    found = makespan_search(branches, 0, starts, budget)
    assert budget.spent == found.evaluations == 0
    assert value(branches, found.plan) <= min(value(branches, plan) for plan in starts)


def test_a_proven_optimum_ends_the_search(branches: Problem) -> None:
    start = heft(branches, 0)
    start_s = value(branches, start)
    budget = Budget(evaluations=10**9, target_s=0.97 * start_s)
    found = makespan_search(branches, 0, [start], budget)
    assert budget.reached(value(branches, found.plan))
    assert budget.spent < 10**6


def test_interrupted_it_returns_the_best_so_far(branches: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    start, rounds = heft(branches, 0), 0

    def spend(budget: Budget, evaluations: int, seconds: float) -> None:
        nonlocal rounds
        budget.spent += evaluations
        rounds += 1
        if rounds == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Budget, "spend", spend)
    budget = Budget()
    found = makespan_search(branches, 0, [start], budget)
    assert budget.interrupted
    assert value(branches, found.plan) < value(branches, start)


def test_a_better_order_of_transfers_is_kept(branches: Problem) -> None:
    """Fixed sequences are beyond this search; one that is better than all it finds comes back as it is."""
    ops = [Op("p", time_s={"*": 1.0}, pins=("d0",)), Op("q", time_s={"*": 1.0}, pins=("d0",))]
    ops += [Op("x", time_s={"*": 1.0}, pins=("d1",)), Op("y", time_s={"*": 30.0}, pins=("d1",))]
    tensors = [Tensor("p", 10, ("x",)), Tensor("p", 10, ("y",)), Tensor("q", 1, ("x",))]
    problem = Problem(OpGraph.build(ops, tensors), star(2))
    start = plan_of([0, 0, 1, 1], [0, 1, 3, 2], [[1, 1], [0, 1], [2, 1]])
    start_s = value(problem, start)
    assert start_s < optimum(problem)
    found = found_by(problem, [Plan(start.device), start], evaluations=500)
    assert found.transfer_order is not None
    assert value(problem, found) == start_s


# -- groups -----------------------------------------------------------------------------------------------------------


@given(problems(max_ops=12))
def test_groupings_are_partitions_and_no_two_alike(problem: Problem) -> None:
    units = Units.of(problem)
    levels = groupings(units)
    for labels in levels:
        assert labels.shape == (units.n_units,)
        assert 1 < labels.max() + 1 < units.n_units
        assert set(labels.tolist()) == set(range(int(labels.max()) + 1))
    assert len({labels.tobytes() for labels in levels}) == len(levels)


def test_groupings_follow_modules_chains_and_traffic() -> None:
    """Two branches of two ops each, far heavier inside than between: every rule finds them."""
    ops = [Op(f"{b}{k}", time_s={"*": 1.0}, module=f"net.{b}") for b in "ab" for k in range(2)]
    tensors = [Tensor("a0", 100, ("a1",)), Tensor("b0", 100, ("b1",))]
    levels = groupings(Units.of(Problem(OpGraph.build(ops, tensors), star(2))))
    assert [0, 0, 1, 1] in [labels.tolist() for labels in levels]
