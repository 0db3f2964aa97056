"""Bounds where memory forces work off the fast devices: none above the optimum, all as good as a linear programme."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog
from strategies import problems, with_memory

from env.bounds import memory_prices
from env.bounds.bounds import lower_bound
from env.bounds.memory_prices import Programme
from env.cluster import Cluster, Device, both_ways
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.simulation.simulator import Simulator
from graphs.opgraph import FloatArray, Op, OpGraph, Tensor


def devices(*memory: tuple[str, int]) -> Cluster:
    """Devices of these kinds and bytes behind a switch so fast that transfers hardly count."""
    named = [Device(f"d{i}", kind, size, {"float32": 1.0}, 1.0) for i, (kind, size) in enumerate(memory)]
    links = tuple(link for d in named for link in both_ways(d.name, "switch", 1e12, 0.0))
    return Cluster("test", tuple(named), links)


def layers(count: int, joined: bool, objective: str, *memory: tuple[str, int]) -> Problem:
    """Ops of 1 byte that take 1 s on ``fast``, 5 s on ``slow``, in a chain or side by side."""
    ops = [Op(f"op{i}", time_s={"fast": 1.0, "slow": 5.0}, kept_bytes=1) for i in range(count)]
    tensors = [Tensor(f"op{i}", 0, (f"op{i + 1}",)) for i in range(count - 1)] if joined else []
    return Problem(OpGraph.build(ops, tensors), devices(*memory), objective)


# -- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [LATENCY, THROUGHPUT])
def test_what_the_fast_device_cannot_keep_runs_on_the_slow_one(objective: str) -> None:
    """Twelve layers of 1 s, or 5 s; the fast device holds six, so the slow one works for at least 30 s."""
    tight = layers(12, False, objective, ("fast", 6), ("slow", 20))
    assert lower_bound(tight).area_s == pytest.approx(30)
    roomy = layers(12, False, objective, ("fast", 12), ("slow", 20))
    assert lower_bound(roomy).area_s == pytest.approx(10)  # ten on the fast one, two on the slow one


def test_a_chain_pays_for_each_op_that_leaves_the_fast_device() -> None:
    tight = lower_bound(layers(12, True, LATENCY, ("fast", 6), ("slow", 20)))
    assert tight.communication_s == pytest.approx(6 * 1 + 6 * 5)
    assert tight.critical_path_s == pytest.approx(12)
    assert lower_bound(layers(12, True, LATENCY, ("fast", 12), ("slow", 20))).value_s == pytest.approx(12)


def test_an_op_runs_no_faster_than_where_it_fits() -> None:
    """Kept, workspace and output take 7 bytes."""
    ops = [Op("large", time_s={"fast": 1.0, "slow": 5.0}, kept_bytes=3, workspace_bytes=2), Op("b", flops=0.0)]
    graph = OpGraph.build(ops, [Tensor("large", 2, ("b",))])
    for memory, expected_s in ((6, 5.0), (7, 1.0)):
        problem = Problem(graph, devices(("fast", memory), ("slow", 7)))
        assert lower_bound(problem).critical_path_s == pytest.approx(expected_s)
        assert lower_bound(replace(problem, objective=THROUGHPUT)).interval_s == pytest.approx(expected_s)


def test_memory_counts_between_head_and_tail() -> None:
    """The twelve of the first test between an op of 3 s and one of 4 s that keep nothing."""
    middle = layers(12, False, LATENCY, ("fast", 6), ("slow", 20))
    ends = [Op("first", time_s={"*": 3.0}), Op("last", time_s={"*": 4.0})]
    names = middle.graph.op_names
    ops = [Op(name, time_s={"fast": 1.0, "slow": 5.0}, kept_bytes=1) for name in names] + ends
    tensors = [Tensor("first", 0, tuple(names)), *(Tensor(name, 0, ("last",)) for name in names)]
    found = lower_bound(Problem(OpGraph.build(ops, tensors), middle.cluster))
    assert found.interval_s == pytest.approx(3 + 30 + 4)


# -- never above the optimum --------------------------------------------------------------------------------------


@st.composite
def small_problems(draw: st.DrawFn, objective: str) -> Problem:
    """Up to five ops that hardly fit on two or three unlike devices."""
    drawn = draw(problems(max_ops=5, max_devices=3, edges=5, shared=True))
    graph = drawn.graph
    total = int(graph.kept_bytes.sum() + graph.tensor_bytes.sum())
    shares = st.sampled_from([0.2, 0.4, 0.6, 1.0])
    return Problem(graph, with_memory(drawn.cluster, lambda _: math.ceil(total * draw(shares))), objective)


def every_placement(problem: Problem) -> list[list[int]]:
    choices = [np.flatnonzero(problem.allowed[members[0]]).tolist() for members in problem.units]
    return [[row[g] for g in problem.unit_of] for row in itertools.product(*choices)]


@given(st.data())
def test_no_step_that_fits_is_faster(data: st.DataObject) -> None:
    problem = data.draw(small_problems(LATENCY))
    placements = np.array(every_placement(problem))
    orders = np.array(list(itertools.permutations(range(problem.graph.n_ops))), dtype=np.float64)
    scores = Simulator(problem).batch(
        np.repeat(placements, len(orders), axis=0), orders=np.tile(orders, (len(placements), 1))
    )
    best_s = scores.step_time_s.min(where=scores.feasible, initial=math.inf)
    assert lower_bound(problem).value_s <= best_s


@given(st.data())
def test_no_load_that_fits_is_smaller(data: st.DataObject) -> None:
    problem = data.draw(small_problems(THROUGHPUT))
    found = [loads(problem, Plan(placed)) for placed in every_placement(problem)]
    assert lower_bound(problem).value_s <= min((one.value_s for one in found if one.feasible), default=math.inf)


# -- the linear programme -----------------------------------------------------------------------------------------


def least_s(programme: Programme) -> float:
    """Its value by another model of it; infinite if nothing fits."""
    seconds, (g, k) = programme.seconds, programme.seconds.shape
    loads, bytes_, whole = np.zeros((k, g * k + 1)), np.zeros((k, g * k + 1)), np.zeros((g, g * k + 1))
    for u, d in itertools.product(range(g), range(k)):
        loads[d, u * k + d] = seconds[u, d] if np.isfinite(seconds[u, d]) else 0.0
        bytes_[d, u * k + d] = programme.kept[u]
        whole[u, u * k + d] = 1.0
    loads[:, -1] = -programme.size
    if programme.one_by_one:
        loads = np.append(loads[:, :-1].sum(axis=0), -1.0)[None, :]
    limits = [(0.0, 1.0 if ok else 0.0) for ok in np.isfinite(seconds).ravel()] + [(0.0, None)]
    right = np.concatenate([np.zeros(len(loads)), programme.capacity * programme.size])
    solved = linprog(np.append(np.zeros(g * k), 1.0), np.vstack([loads, bytes_]), right, whole, np.ones(g), limits)
    return float(solved.fun) if solved.success else math.inf


def random_programme(seed: int, units: int, classes: int, one_by_one: bool) -> Programme:
    """Fast devices have little memory; some classes are not allowed to some units, but the last is to all."""
    rng = np.random.default_rng(seed)
    flops, moved = rng.lognormal(0.0, 1.5, (2, units, 1))
    speed = np.sort(rng.uniform(1.0, 9.0, classes))[::-1]
    seconds: FloatArray = np.maximum(flops / speed, moved / rng.uniform(1.0, 3.0, classes))
    seconds[:, :-1][rng.random((units, classes - 1)) < 0.1] = np.inf
    kept = rng.lognormal(0.0, 1.0, units) * (rng.random(units) < 0.7)
    size = rng.integers(1, 3, classes).astype(np.float64)
    capacity = kept.sum() * rng.uniform(0.3, 1.3) / speed / (size / speed).sum()
    capacity[-1] += rng.uniform(0.2, 0.8) * kept.sum()
    return Programme(seconds, kept, size, capacity, one_by_one)


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(2, 5), st.booleans())
def test_prices_of_few_units_are_the_best(seed: int, units: int, classes: int, one_by_one: bool) -> None:
    programme = random_programme(seed, units, classes, one_by_one)
    expected_s = least_s(programme)
    assume(math.isfinite(expected_s))
    assert expected_s * (1 - 1e-6) <= programme.best().value_s <= expected_s * (1 + 1e-9)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_prices_of_many_units_are_close_below_the_best(one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    programme = random_programme(3, 600, 4, one_by_one)
    programme = replace(programme, capacity=programme.capacity * [0.5, 0.5, 0.5, 1.0])
    exact_s = programme.best().value_s
    without_s = replace(programme, capacity=np.full(4, programme.kept.sum())).best().value_s
    assert without_s < 0.9 * exact_s  # memory matters here
    monkeypatch.setattr(memory_prices, "MOST_COLUMNS", 800)
    assert exact_s * (1 - 1e-3) <= programme.best().value_s <= exact_s * (1 + 1e-9)


@given(small_problems(LATENCY), st.sampled_from([LATENCY, THROUGHPUT]))
def test_the_area_is_that_of_units_where_they_fit(problem: Problem, objective: str) -> None:
    """The classes of devices, the shortcuts where memory cannot matter, and the sums of groups change nothing."""
    graph = problem.graph
    tensors = graph.records()[1]
    takes = graph.workspace_bytes + [
        sum(t.bytes for t in tensors if (name == t.producer or name in t.consumers) and not t.in_place)
        for name in graph.op_names
    ]
    takes = np.where(np.where(problem.allowed, problem.op_s, math.inf).min(axis=1) > 0, takes, 0)
    seconds = np.array([problem.op_s[members].sum(axis=0) for members in problem.units])
    kept = np.array([graph.kept_bytes[members].sum() for members in problem.units])
    needed = kept + [takes[members].max() for members in problem.units]
    allowed = np.array([problem.allowed[members[0]] for members in problem.units])
    fits = allowed & (needed[:, None] <= problem.capacity_bytes)
    assume(fits.any(axis=1).all())
    own = np.ones(problem.cluster.n_devices)
    capacity = problem.capacity_bytes.astype(np.float64)
    expected_s = least_s(Programme(np.where(fits, seconds, math.inf), kept.astype(np.float64), own, capacity, False))
    assume(math.isfinite(expected_s))
    found_s = lower_bound(replace(problem, objective=objective)).area_s
    assert found_s <= expected_s * (1 + 1e-9) + 1e-12
    assert found_s == pytest.approx(expected_s, rel=1e-4)
