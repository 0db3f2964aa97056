"""Memory so tight that heuristics find nothing: searches find what fits, and `exact` proves where nothing does."""

from __future__ import annotations

import math

import pytest
from small_problems import best_of_all_s, planted, tight_graph

from baselines.budget import Budget, Limits
from baselines.exact.exact import exact
from baselines.fitting import best_of_few, fitting, nearest_to_fitting
from env.objectives import LATENCY, OBJECTIVES, THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import NotFoundError
from placement.solving.solver import Solver

PROVED, OPEN = "an exact search has proved it", "which does not prove that there is none"
# Of 7 ops on 2 devices, which no bound decides: at first what fits and no list scheduler finds, then what does not fit.
SEEDS = {LATENCY: (5, 43, 105, 2, 8), THROUGHPUT: (2, 9, 12, 43)}


@pytest.mark.parametrize(("objective", "seed"), [(name, seed) for name in OBJECTIVES for seed in SEEDS[name]])
@pytest.mark.parametrize("method", ["local_search", "exact", "auto"])
def test_what_fits_is_found_and_what_does_not_is_said(objective: str, seed: int, method: str) -> None:
    graph, cluster = tight_graph(seed)
    best_s = best_of_all_s(Problem(graph, cluster, objective))
    result = Solver(graph, cluster, 0, objective, "longest_path").solve(method, Limits(evaluations=2000))
    assert result.feasible == (best_s < math.inf)
    if result.feasible:
        assert result.reason is None
        assert result.lower_bound_s <= best_s * (1 + 1e-9)
    else:
        assert result.reason is not None
        assert (PROVED in result.reason) == (method != "local_search")
        assert (OPEN in result.reason) == (method == "local_search")


@pytest.mark.parametrize("seed", [317, 1085, 1171, 1230])
@pytest.mark.parametrize("method", ["local_search", "exact", "auto"])
def test_nothing_is_worse_than_the_best_of_few_placements(seed: int, method: str) -> None:
    """Seven ops on two devices: schedules that wait for memory led constraint programming away from these."""
    graph, cluster = tight_graph(seed)
    best_s = best_of_all_s(Problem(graph, cluster))
    result = Solver(graph, cluster, 0, LATENCY, "longest_path").solve(method, Limits(evaluations=2000))
    assert result.objective_s is not None
    assert result.objective_s <= best_s * (1 + 1e-9) < math.inf


def test_many_placements_are_not_enumerated() -> None:
    problem = Problem(*tight_graph(5))
    assert best_of_few(problem, Budget(evaluations=127)) is None
    assert best_of_few(problem, Budget(evaluations=128)) is not None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_exact_solvers_need_no_plan_to_begin_with(objective: str) -> None:
    problem = Problem(*tight_graph(5, 5, 2), objective)
    best_s = best_of_all_s(problem)
    found = exact(problem, 0, [], Budget(evaluations=20_000))
    assert best_s < math.inf
    value_s = Scorer(problem).value(found.plan)
    assert found.lower_bound_s <= value_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize(("n_ops", "n_devices"), [(12, 3), (40, 4)])
def test_a_placement_that_fits_to_the_byte_is_found(n_ops: int, n_devices: int) -> None:
    found = 0
    for seed in range(8):
        problem = planted(seed, n_ops, n_devices)
        nearest = nearest_to_fitting(problem, seed, Budget(evaluations=5000))
        fits = Scorer(problem).value(Plan(nearest.device)) < math.inf
        assert fits == (nearest.excess_bytes == 0)
        found += fits
    assert found == 8


def test_the_same_evaluations_give_the_same_placement() -> None:
    problem = planted(3, 40, 4)
    first, second = (nearest_to_fitting(problem, 7, Budget(evaluations=200)) for _ in range(2))
    assert first.device.tolist() == second.device.tolist()


def test_without_a_budget_it_says_that_it_found_none() -> None:
    problem = planted(3, 40, 4)
    with pytest.raises(NotFoundError, match=OPEN):
        fitting(problem, 0, Budget(evaluations=0))
    assert Scorer(problem).value(fitting(problem, 0, Budget(evaluations=5000))) < math.inf
