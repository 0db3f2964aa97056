"""The race before the makespan search: plans that fit, the same for a seed, and better than where they began."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import allowed_placements, problems

import baselines.local_search.makespan_race as race_module
from baselines.budget import Budget
from baselines.list_schedulers.heft import heft
from baselines.local_search.makespan_race import race
from baselines.local_search.makespan_search import makespan_search
from baselines.local_search.makespan_state import instance_of
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.generators import layered


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of small graphs, and short ones."""
    monkeypatch.setattr(race_module, "_LEAST_OPS", 2)
    monkeypatch.setattr(race_module, "_LEAST", 1)
    monkeypatch.setattr(race_module, "_RUN", 30_000)


def raced(problem: Problem, seed: int, starts: list[Plan], evaluations: int = 4000) -> list[Plan]:
    return race(problem, instance_of(problem), seed, starts, Budget(evaluations=evaluations), 2)


@settings(max_examples=40, deadline=None, derandomize=True)
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
    best = race(problem, instance_of(problem), 0, [start], budget, 2)[0]
    assert scorer.value(best) < scorer.value(start)
    assert 0 < budget.spent <= 4000


def test_the_search_begins_where_the_race_has_ended(problem: Problem) -> None:
    scorer, start = Scorer(problem), heft(problem, 0)
    raced_s = scorer.value(raced(problem, 5, [start], 7000)[0])
    found = makespan_search(problem, 5, [start], Budget(evaluations=20_000))
    assert scorer.value(found.plan) <= raced_s
    assert found.evaluations == 20_000


def test_too_little_for_a_race_is_none(problem: Problem) -> None:
    assert raced(problem, 0, [heft(problem, 0)], 40) == []
