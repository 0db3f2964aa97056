"""The race before the makespan search: plans that fit, the same for a seed, and better than where they began."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import allowed_placements, problems

import baselines.local_search.makespan_race as race_module
from baselines.budget import Budget
from baselines.list_schedulers.heft import heft
from baselines.local_search.makespan_race import Race
from baselines.local_search.makespan_search import makespan_search
from baselines.local_search.makespan_state import instance_of
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.generators import layered
from graphs.opgraph import Op, OpGraph, Tensor
from placement.optimization import optimize


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of small graphs, and short ones."""
    monkeypatch.setattr(race_module, "LEAST_OPS", 2)
    monkeypatch.setattr(race_module, "LEAST_EVALUATIONS", 1)
    monkeypatch.setattr(race_module, "FEWEST_GROUPS", 2)
    monkeypatch.setattr(race_module, "MOST_SIMULATED", 15_000)


def raced(problem: Problem, seed: int, starts: list[Plan], evaluations: int = 4000) -> list[Plan]:
    return Race(problem, instance_of(problem), seed, starts, 2).run(0, starts[0], Budget(evaluations=evaluations))


@settings(max_examples=40)
@given(st.data())
def test_what_wins_fits_and_is_allowed(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    start, scorer = Plan(data.draw(allowed_placements(problem))), Scorer(problem)
    if problem.cluster.n_devices == 1 or scorer.value(start) == math.inf:
        return
    values = []
    for plan in raced(problem, data.draw(st.integers(0, 9)), [start], 40_000):
        assert problem.allowed[range(problem.graph.n_ops), plan.device].all()
        assert all(len(set(plan.device[members].tolist())) == 1 for members in problem.units)
        values.append(scorer.value(plan))
    assert values == sorted(values)
    assert all(value < math.inf for value in values)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(layered(600, seed=3), Cluster.preset("8xV100-nvlink"))


def test_the_answer_depends_on_the_seed_alone(problem: Problem) -> None:
    starts = [heft(problem, 0)]
    first, again, other = (raced(problem, seed, starts) for seed in (1, 1, 2))
    assert [plan.device.tolist() for plan in first] == [plan.device.tolist() for plan in again]
    assert [plan.device.tolist() for plan in first] != [plan.device.tolist() for plan in other]


def test_a_race_is_won_by_something_better_and_counts_its_evaluations(problem: Problem) -> None:
    start, scorer, budget = Plan(heft(problem, 0).device), Scorer(problem), Budget(evaluations=4000)
    best = Race(problem, instance_of(problem), 0, [start], 2).run(0, start, budget)[0]
    assert scorer.value(best) < scorer.value(start)
    assert 0 < budget.spent <= 4000


def test_each_race_has_other_runs_and_twice_as_many(problem: Problem) -> None:
    start, budgets = heft(problem, 0), [Budget(), Budget()]
    race = Race(problem, instance_of(problem), 0, [start], 2)
    first, second = (race.run(number, start, budget) for number, budget in enumerate(budgets))
    assert budgets[1].spent == pytest.approx(2 * budgets[0].spent, rel=0.2)
    assert first[0].device.tolist() != second[0].device.tolist()


@settings(max_examples=4)
@given(st.integers(0, 9))
def test_more_evaluations_find_nothing_worse(seed: int) -> None:
    """What is done next does not depend on how much is left, but for races that the budget cuts short."""
    problem = Problem(layered(200, seed=4), Cluster.preset("4xV100-pcie"))
    scorer, starts = Scorer(problem), [heft(problem, 0)]
    found = [makespan_search(problem, seed, starts, Budget(evaluations=20_000 * k)) for k in (1, 2, 3)]
    values = [scorer.value(one.plan) for one in found]
    assert values == sorted(values, reverse=True)


def test_too_little_or_too_small_for_a_race(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(problem, instance_of(problem), 0, [heft(problem, 0)], 2)
    assert race.is_worth(0, Budget(evaluations=4000))
    assert not race.is_worth(5, Budget(evaluations=4000))
    assert not race.is_worth(0, Budget(evaluations=40))
    assert race.is_worth(0, Budget(seconds=1000))
    assert not race.is_worth(0, Budget(seconds=1e-6))
    monkeypatch.setattr(race_module, "LEAST_OPS", 601)
    assert not Race(problem, instance_of(problem), 0, [heft(problem, 0)], 2).is_worth(0, Budget())


def test_groups_find_what_single_ops_do_not() -> None:
    """Two chains that send each other a lot are each worth moving only as a whole."""
    ops, tensors = [], []
    for chain in "ab":
        names = [f"{chain}{k}" for k in range(60)]
        ops += [Op(name, time_s={"*": 1.0}, module=chain) for name in names]
        tensors += [Tensor(name, 1, (after,), 20.0) for name, after in itertools.pairwise(names)]
    devices = tuple(Device(f"d{i}", "gpu", 2**30, {"float32": 1.0}, 1.0) for i in range(2))
    problem = Problem(OpGraph.build(ops, tensors, "two"), Cluster("pair", devices, both_ways("d0", "d1", 1.0, 0.0)))
    start = Plan(np.zeros(120, dtype=np.int64))
    assert Scorer(problem).value(raced(problem, 0, [start])[0]) == 60.0


def test_auto_is_the_same_whatever_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = layered(400, seed=5), Cluster.preset("4xV100-pcie")
    found = []
    for cores in (1, 16):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found.append(optimize(graph, cluster, "auto", strategy="none", seed=3, budget_s=0.3))
    assert found[0].placement == found[1].placement
    assert found[0].order == found[1].order
    assert found[0].evaluations == found[1].evaluations
