"""Local search for the largest load: right loads after every move, honest answers, optima that can be counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import allowed_placements, problems, with_memory

import baselines.local_search.load_search as search_module
from baselines.budget import Budget
from baselines.local_search.load_kernel import anneal
from baselines.local_search.load_search import load_search, place
from baselines.local_search.load_state import LoadState, instance_of, new_state
from baselines.local_search.local_search import local_search
from env.cluster import COMMUNICATIONS, Cluster, Device, both_ways
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.published import neurips_cluster
from env.simulation.scoring import loads
from env.units import Units
from graphs.generators import REFERENCE_BYTES_PER_S, fork_join, layered
from graphs.opgraph import Op, OpGraph, Tensor


def star(n: int, memory_bytes: int = 2**40, communication: str = "overlapped") -> Cluster:
    """Equal devices behind one switch."""
    devices = tuple(Device(f"d{i}", "gpu", memory_bytes, {"float32": 1.0}, 1e9) for i in range(n))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", REFERENCE_BYTES_PER_S, 0.0))
    return Cluster("star", devices, links, communication=communication)


@st.composite
def throughput_problems(draw: Any, max_ops: int = 9, max_devices: int = 5, shared: bool = False) -> Problem:
    """Both communication models; the memory of a step in steady state may be much or little."""
    problem = draw(problems(max_ops, max_devices, shared=shared))
    cluster = with_memory(problem.cluster, lambda device: device.memory_bytes * draw(st.integers(1, 4)))
    cluster = replace(cluster, communication=draw(st.sampled_from(COMMUNICATIONS)))
    return Problem(problem.graph, cluster, THROUGHPUT)


def every_placement(problem: Problem) -> list[NDArray[np.int64]]:
    """All placements that respect pins and groups."""
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    return [np.array(chosen)[problem.unit_of] for chosen in itertools.product(*choices)]


def search(problem: Problem, *starts: NDArray[np.int64], seed: int = 0, evaluations: float = 4000) -> Plan:
    return load_search(problem, seed, [Plan(start) for start in starts], Budget(evaluations=evaluations)).plan


def value_s(problem: Problem, plan: Plan) -> float:
    return loads(problem, plan).value_s


def charged_bytes(problem: Problem, device: NDArray[np.int64]) -> list[int]:
    """What the search charges each memory: kept bytes, tensors, the largest workspace of each device's timed ops."""
    owner = problem.memory_owner.tolist()
    ops, tensors = problem.graph.records()
    place = dict(zip(problem.graph.op_names, device.tolist(), strict=True))
    charged = [0] * problem.cluster.n_devices
    workspace = [0] * problem.cluster.n_devices
    for op, seconds, allowed in zip(ops, problem.op_s, problem.allowed, strict=True):
        charged[owner[place[op.name]]] += op.kept_bytes
        if seconds[allowed].min() > 0:
            workspace[place[op.name]] = max(workspace[place[op.name]], op.workspace_bytes)
    for tensor in tensors:
        home = owner[place[tensor.producer]]
        charged[home] += 0 if tensor.in_place else tensor.bytes
        for d in {place[name] for name in tensor.consumers}:
            charged[owner[d]] += tensor.bytes if owner[d] != home else 0
    for d, size in enumerate(workspace):
        charged[owner[d]] += size
    return charged


def check_state(problem: Problem, state: LoadState) -> None:
    """The state says the same as `env.simulation.scoring` of its placement."""
    expected = loads(problem, Plan(state.unit["device"][problem.unit_of]))
    n_devices = problem.cluster.n_devices
    instance = instance_of(Units.of(problem))
    used = {int(k) for k in problem.route[1] if problem.cluster.links[k].exclusive}
    links = [] if instance.blocking else sorted(used)
    close = {"rtol": 1e-9, "atol": 1e-9 * max(1.0, expected.value_s)}
    np.testing.assert_allclose(state.load_s[:n_devices], expected.device_s, **close)
    np.testing.assert_allclose(state.load_s[n_devices:], expected.link_s[links], **close)
    assert expected.link_s.sum() == pytest.approx(expected.link_s[links].sum())
    workspace_bytes = instance.workspace_bytes[state.device["largest"]]
    charged = state.device["bytes"].copy()
    np.add.at(charged, problem.memory_owner, workspace_bytes)
    np.testing.assert_array_equal(charged, charged_bytes(problem, expected.plan.device))
    for d in range(n_devices):
        here = state.member[d, : state.device["units"][d]]
        assert sorted(here.tolist()) == np.flatnonzero(state.unit["device"] == d).tolist()


@given(throughput_problems(shared=True), st.data())
def test_loads_and_memory_are_right_after_every_move(problem: Problem, data: st.DataObject) -> None:
    units = Units.of(problem)
    assume(problem.cluster.n_devices > 1)
    state = new_state(instance_of(units), data.draw(st.integers(0, 2**32)))
    place(state, data.draw(allowed_placements(problem))[units.first_op])
    for temperature in (1e6, 1e-6):  # nearly every change is kept, then nearly every one taken back
        anneal(instance_of(units), state, data.draw(st.integers(1, 60)), temperature, temperature)
        check_state(problem, state)
        assert units.allowed[np.arange(units.n_units), state.unit["device"]].all()


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_loads_are_right_after_many_moves_on_a_larger_problem(communication: str) -> None:
    problem = Problem(layered(300, 1), star(5, communication=communication), THROUGHPUT)
    instance = instance_of(Units.of(problem))
    state = new_state(instance, 7)
    place(state, np.arange(300) % 5)
    anneal(instance, state, 20_000, 1.0, 1e-4)
    check_state(problem, state)
    best = loads(problem, Plan(state.unit["best"]))
    assert best.value_s == pytest.approx(state.search["best_s"][0])


@given(throughput_problems(shared=True), st.data())
def test_the_answer_fits_and_is_no_worse_than_any_start(problem: Problem, data: st.DataObject) -> None:
    starts = data.draw(st.lists(allowed_placements(problem), min_size=1, max_size=3))
    starts = [start for start in starts if loads(problem, Plan(start)).feasible]
    assume(starts)
    plan = search(problem, *starts, evaluations=1000)
    assert loads(problem, plan).feasible
    assert problem.allowed[np.arange(problem.graph.n_ops), plan.device].all()
    for members in problem.units:
        assert len(set(plan.device[members].tolist())) == 1
    assert value_s(problem, plan) <= min(loads(problem, Plan(start)).value_s for start in starts)


@given(throughput_problems(max_ops=6, max_devices=3))
def test_it_finds_the_optimum_of_tiny_problems_where_memory_suffices(problem: Problem) -> None:
    devices = tuple(replace(device, memory_bytes=2**40) for device in problem.cluster.devices)
    problem = Problem(problem.graph, replace(problem.cluster, devices=devices), THROUGHPUT)
    scored = [(loads(problem, Plan(device)).value_s, device) for device in every_placement(problem)]
    worst = max(scored, key=lambda pair: pair[0])[1]
    best_s = min(scored, key=lambda pair: pair[0])[0]
    assert value_s(problem, search(problem, worst)) == pytest.approx(best_s)


@given(throughput_problems(max_ops=6, max_devices=3))
def test_tiny_problems_are_solved_where_memory_is_tight(problem: Problem) -> None:
    """What tensors are charged with is one share for all, too much for some placements: all of so few are scored."""
    feasible = [one.value_s for device in every_placement(problem) if (one := loads(problem, Plan(device))).feasible]
    assume(feasible)
    found = local_search(problem, 0, [], Budget(evaluations=4000))
    assert value_s(problem, found.plan) == pytest.approx(min(feasible))


@pytest.mark.parametrize("communication", COMMUNICATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_optimum_of_small_graphs(communication: str, seed: int) -> None:
    cluster = star(3, communication=communication)
    for graph in (layered(8, seed, ccr=0.5), fork_join(8, seed, ccr=2.0)):
        problem = Problem(graph, cluster, THROUGHPUT)
        best_s = min(loads(problem, Plan(device)).value_s for device in every_placement(problem))
        together = np.zeros(8, int)
        assert best_s < loads(problem, Plan(together)).value_s
        assert value_s(problem, search(problem, together, evaluations=20_000)) == pytest.approx(best_s)


def test_it_keeps_heavy_clusters_together() -> None:
    """Four cliques of six ops on four devices: one op across costs more than all the work."""
    ops = [Op(name=f"{k}{i}", time_s={"*": 1.0}) for k in "abcd" for i in range(6)]
    tensors = [Tensor(f"{k}{i}", 0, tuple(f"{k}{j}" for j in range(i + 1, 6)), 50.0) for k in "abcd" for i in range(5)]
    for communication in COMMUNICATIONS:
        problem = Problem(OpGraph.build(ops, tensors, "cliques"), star(4, communication=communication), THROUGHPUT)
        assert value_s(problem, search(problem, np.zeros(24, int), evaluations=20_000)) == pytest.approx(6.0)


def test_published_devices_share_the_work_with_the_host() -> None:
    """Ten equal ops, the host ten times slower: nine for the three accelerators and one for the host is best."""
    ops = [Op(name=f"op{i}", time_s={"accelerator": 1.0, "cpu": 3.0}) for i in range(10)]
    problem = Problem(OpGraph.build(ops, [], "parallel"), neurips_cluster(3, 1, 1e9), THROUGHPUT)
    plan = search(problem, np.zeros(10, int))
    assert value_s(problem, plan) == pytest.approx(3.0)
    assert np.bincount(plan.device).tolist() == [3, 3, 3, 1]


def test_memory_that_is_nearly_full_is_respected() -> None:
    """Two devices of 12 bytes for ops of 6, 5, 4, 3, 3, 2 and 1 bytes: only exact halves fit."""
    sizes = (6, 5, 4, 3, 3, 2, 1)
    ops = [Op(name=f"op{i}", kept_bytes=size, time_s={"*": float(7 - i)}) for i, size in enumerate(sizes)]
    problem = Problem(OpGraph.build(ops, [], "full"), star(2, memory_bytes=12), THROUGHPUT)
    found = loads(problem, search(problem, np.array([0, 1, 1, 0, 0, 1, 1])))
    assert found.held_bytes.tolist() == [12, 12]
    feasible = [one for one in (loads(problem, Plan(d)) for d in every_placement(problem)) if one.feasible]
    assert found.value_s == min(one.value_s for one in feasible)


def test_it_leaves_a_start_that_does_not_fit() -> None:
    ops = [Op(name=f"op{i}", kept_bytes=2, workspace_bytes=i, time_s={"*": 1.0}) for i in range(6)]
    problem = Problem(OpGraph.build(ops, [], "full"), star(3, memory_bytes=9), THROUGHPUT)
    found = loads(problem, search(problem, np.zeros(6, int)))
    assert found.feasible
    assert found.value_s == 2.0


def test_the_answer_depends_on_seed_and_evaluations_only() -> None:
    problem = Problem(layered(60, 0), star(4), THROUGHPUT)
    start = np.zeros(60, int)
    once, again, other = (search(problem, start, seed=seed, evaluations=30_000) for seed in (5, 5, 6))
    np.testing.assert_array_equal(once.device, again.device)
    assert not np.array_equal(once.device, other.device)
    budget = Budget(seconds=1e6, evaluations=30_000)
    found = load_search(problem, 5, [Plan(start)], budget)
    np.testing.assert_array_equal(once.device, found.plan.device)
    assert found.evaluations == budget.spent == 30_000


def test_starts_are_left_as_they_were() -> None:
    problem = Problem(layered(30, 0), star(3), THROUGHPUT)
    start = Plan(np.zeros(30, int))
    load_search(problem, 0, [start], Budget(evaluations=2000))
    assert not start.device.any()


def test_it_stops_at_the_target_and_when_there_is_no_time() -> None:
    ops = [Op(name=f"op{i}", time_s={"*": 1.0}) for i in range(8)]
    problem = Problem(OpGraph.build(ops, [], "parallel"), star(4), THROUGHPUT)
    start, best = Plan(np.zeros(8, int)), Plan(np.arange(8) % 4)
    budget = Budget(evaluations=1e9, target_s=2.0)
    assert value_s(problem, load_search(problem, 0, [start], budget).plan) == 2.0
    assert budget.spent < 1e6
    for spent in (Budget(seconds=0.0), Budget(evaluations=0), Budget(target_s=2.0)):
        found = load_search(problem, 0, [start, best], spent)
        assert found.plan is best
        assert found.evaluations == 0


def test_one_device_and_pinned_ops_leave_nothing_to_search() -> None:
    graph = layered(5, 0)
    alone = Problem(graph, star(1), THROUGHPUT)
    assert search(alone, np.zeros(5, int), evaluations=1e9).device.tolist() == [0] * 5
    ops = [Op(name=f"op{i}", pins=(f"d{i % 2}",), time_s={"*": 1.0}) for i in range(4)]
    pinned = Problem(OpGraph.build(ops, [], "pinned"), star(2), THROUGHPUT)
    assert search(pinned, np.arange(4) % 2, evaluations=1e9).device.tolist() == [0, 1, 0, 1]


def test_an_interrupted_search_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Budget):
        def spend(self, evaluations: int, seconds: float = 0.0) -> None:
            super().spend(evaluations)
            if self.spent >= 3 * evaluations:
                raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "ROUND", 1000)
    problem = Problem(layered(40, 0), star(4), THROUGHPUT)
    start, budget = Plan(np.zeros(40, int)), Impatient()
    found = load_search(problem, 0, [start], budget)
    assert budget.interrupted
    assert found.evaluations == 6000
    assert value_s(problem, found.plan) < value_s(problem, start)
