"""Budgets are work: heuristics stop when it is done, `auto` and `local_search` begin alike, proofs end a search."""

from __future__ import annotations

import contextlib
import math
import threading

import numpy as np
import pytest
from small_problems import tight_graph

import baselines
from baselines.budget import Budget, Found, Limits
from baselines.exact.cp_sat import cp_sat
from baselines.meter import Meter, OutOfTimeError, charge, stopped_in_time, work_left_s
from baselines.portfolio import ALWAYS, candidates, stages, starts
from baselines.registry import STARTS
from env.cluster import Cluster, Device, both_ways
from env.objectives import LATENCY, OBJECTIVES
from env.plan import Method, Plan
from env.problem import Problem
from graphs.errors import BoundError
from graphs.generators import fork_join, layered
from placement.results.answer import agreed_bound_s
from placement.solving.methods import heuristics_for
from placement.solving.solver import Solver

MANY_CALLS = 1_000_000


def unlike(n: int) -> Cluster:
    """So many devices around a switch, no two of one speed."""
    devices = tuple(Device(f"d{i}", f"kind{i}", 2**40, {"float32": 1e12 * (i + 1)}, 1e12) for i in range(n))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1e10, 1e-6))
    return Cluster("unlike", devices, links)


def endless(problem: Problem, seed: int) -> Plan:
    """A method that counts its work and never ends by itself."""
    for _ in range(MANY_CALLS):
        charge(1e-3)
    raise AssertionError("it was never stopped")


# -- meters -----------------------------------------------------------------------------------------------------------


def test_without_a_meter_nothing_is_stopped() -> None:
    charge(1e9)
    with stopped_in_time(lambda: pytest.fail("stopped")):
        charge(1e9)


def test_a_meter_counts_inside_only() -> None:
    meter = Meter(1.0)
    with meter.kept():
        charge(0.5)
        assert work_left_s() == 0.5
        with pytest.raises(OutOfTimeError):
            charge(0.5)
    charge(1.0)
    assert meter.used_s == 1.0
    assert work_left_s() == math.inf


def test_a_compiled_loop_is_stopped_from_outside() -> None:
    meter, stopped = Meter(), threading.Event()
    with meter.kept(), stopped_in_time(stopped.set):
        meter.stop()
        assert stopped.wait(60)


@pytest.mark.parametrize("name", ["dp_linear", "pipedream", "pipedream_hierarchical", "m_sct"])
def test_slow_heuristics_stop(name: str) -> None:
    problem = Problem(layered(40, seed=0), unlike(4))
    with Meter(0.0).kept(), pytest.raises(OutOfTimeError):
        baselines.METHODS[name](problem, 0)
    meter = Meter()
    with meter.kept():
        baselines.METHODS[name](problem, 0)
    assert 0 < meter.used_s < 10


@pytest.mark.parametrize("name", ["dp_linear", "pipedream", "pipedream_hierarchical", "m_sct"])
def test_slow_heuristics_stop_wherever_their_work_ends(name: str) -> None:
    """However little is left, they find a plan or run out of it."""
    problem, meter = Problem(layered(40, seed=0), unlike(4)), Meter()
    with meter.kept():
        baselines.METHODS[name](problem, 0)
    for share in np.linspace(0.01, 0.99, 12).tolist():
        with contextlib.suppress(OutOfTimeError), Meter(share * meter.used_s).kept():
            assert len(baselines.METHODS[name](problem, 0).device) == problem.graph.n_ops


def test_a_dynamic_programme_stops_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty unlike devices: seconds for a few hundred ops. It is stopped inside its compiled loop."""
    from baselines.pipelines import chains as slices

    problem, meter = Problem(layered(400, seed=0), unlike(50)), Meter()
    baselines.METHODS["dp_linear"](Problem(layered(40, seed=0), unlike(2)), 0)  # compiles
    monkeypatch.setattr(slices, "stopped_in_time", lambda stop: (meter.stop(), stopped_in_time(stop))[1])
    with meter.kept(), pytest.raises(OutOfTimeError):
        baselines.METHODS["dp_linear"](problem, 0)


def test_a_method_that_goes_on_for_ever_does_not_hold_up_the_others() -> None:
    problem = Problem(layered(40, seed=0), unlike(3))
    methods: dict[str, Method] = {"endless": endless, "heft": baselines.METHODS["heft"]}
    found = candidates(problem, 0, methods, Budget(seconds=0.2), always=["heft"])
    assert [candidate.method for candidate in found] == ["heft"]


# -- what searches begin with -----------------------------------------------------------------------------------------


def test_starts_are_methods_and_those_that_always_run_come_first() -> None:
    for objective in OBJECTIVES:
        assert set(STARTS[objective]) <= set(baselines.METHODS)
        assert STARTS[objective][: len(ALWAYS[objective])] == ALWAYS[objective]


def test_what_auto_leaves_out_is_meant() -> None:
    """A quick heuristic that is not in `STARTS` would run in no `auto` with a budget."""
    slow_or_for_pipelines = {"m_sct", "pipedream", "pipedream_hierarchical", "dp_linear"}
    assert set(baselines.METHODS) - set(STARTS[LATENCY]) == slow_or_for_pipelines


def test_no_time_still_gives_an_answer() -> None:
    problem = Problem(layered(60, seed=0), unlike(3))
    found = starts(problem, 0, heuristics_for(problem), Budget(seconds=0))
    assert set(ALWAYS[LATENCY]) <= {candidate.method for candidate in found}


def test_auto_begins_with_what_local_search_begins_with_and_wastes_no_time_on_pipelines() -> None:
    problem = Problem(layered(60, seed=0), unlike(3))
    methods = dict(heuristics_for(problem))
    methods["dp_linear"] = lambda *_: pytest.fail("a planner of pipelines ran within the time of a search")
    alone, auto = (starts(problem, 0, methods, Budget(seconds=1e4), every=every) for every in (False, True))
    assert [(c.method, c.value_s) for c in auto] == [(c.method, c.value_s) for c in alone]


def test_without_a_time_limit_every_heuristic_runs() -> None:
    problem = Problem(layered(30, seed=0), unlike(3))
    methods, budget = heuristics_for(problem), Budget(evaluations=1000)
    assert {c.method for c in starts(problem, 0, methods, budget, every=True)} == set(methods)
    assert budget.spent == len(methods)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("tractable", [True, False])
def test_local_search_gets_at_least_half_of_the_budget(objective: str, tractable: bool) -> None:
    problem, left, local = Problem(layered(20, seed=0), unlike(2), objective), 1.0, 0.0
    for name, _, fraction in stages(problem, baselines.SEARCHES, tractable):
        local += fraction * left * (name == "local_search")
        left *= 1 - fraction
    assert local >= 0.5
    assert left == 0


def test_auto_is_local_search_where_nothing_can_be_proved() -> None:
    """The same starts, the same seed and the same number of placements: the same answer."""
    problem = Solver(fork_join(400, seed=1, ccr=0.3), unlike(4), 0, LATENCY, "longest_path")
    assert not baselines.exact_is_tractable(problem.problem)
    alone = problem.solve("local_search", Limits(evaluations=2000 + len(STARTS[LATENCY])))
    slow = len(heuristics_for(problem.problem)) - len(STARTS[LATENCY])
    auto = problem.solve("auto", Limits(evaluations=2000 + len(STARTS[LATENCY]) + slow))
    assert auto.objective_s is not None
    assert alone.objective_s is not None
    assert auto.objective_s <= alone.objective_s * (1 + 1e-12)


# -- proofs -----------------------------------------------------------------------------------------------------------


def test_a_search_that_proves_nothing_more_ends() -> None:
    """Memory that is freed just in time: in fine units of time the solver's bound would creep for minutes."""
    problem = Problem(*tight_graph(23))
    budget = Budget(evaluations=20_000)
    found = cp_sat(problem, 0, [], budget)
    assert found.lower_bound_s > 0
    assert budget.spent < 10_000


def test_a_bound_above_the_value_is_an_error_that_names_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def liar(problem: Problem, seed: int, plans: list[Plan], budget: Budget) -> Found:
        return Found(plans[0], lower_bound_s=1e9)

    solver = Solver(layered(20, seed=0), unlike(2), 0, LATENCY, "longest_path")
    monkeypatch.setattr(baselines, "SEARCHES", {**baselines.SEARCHES, "exact": liar})
    for method in ("exact", "auto"):
        with pytest.raises(BoundError, match=r"method 'exact' gave a lower bound of 1e\+09 s"):
            solver.solve(method, Limits(evaluations=200))


def test_rounding_is_no_error() -> None:
    assert agreed_bound_s(1 + 1e-7, 1.0, "x") == 1.0
    assert agreed_bound_s(0.5, 1.0, "x") == 0.5
    with pytest.raises(BoundError, match=r"^x gave"):
        agreed_bound_s(1 + 1e-5, 1.0, "x")
    assert agreed_bound_s(0.0, 0.0, "x") == 0.0
    assert np.isfinite(agreed_bound_s(0.0, 1.0, "x"))


# -- work and the clock ----------------------------------------------------------------------------------------------


def test_parts_of_a_budget_end_with_the_clock() -> None:
    budget = Limits(3600.0, limit_s=1e-9).budget(1.0)
    part, timed = budget.part(0.5), budget.part_s(60.0)
    assert budget.over()
    assert part.over()
    assert timed.over()
    assert budget.limit.has_ended


def test_work_ends_a_budget_and_the_clock_does_not() -> None:
    budget = Limits(2.0).budget(1.0)
    budget.spend(3, 1.5)
    part = budget.part(1.0)
    assert part.left_s() == 0.5
    part.spend(1, 0.5)
    budget.absorb(part)
    assert budget.spent == 4
    assert budget.over()
    assert not budget.limit.has_ended


def test_neither_limit_given_is_the_default_and_one_leaves_the_other_open() -> None:
    assert Limits().budget(7.0).seconds == 7.0
    assert Limits(evaluations=5).budget(7.0).seconds == math.inf
    assert Limits(3.0).budget(7.0).evaluations == math.inf


@pytest.mark.parametrize("method", ["auto", "local_search", "exact", "pretrained+local_search"])
def test_the_same_seconds_find_the_same(method: str) -> None:
    """Seconds are work, so two runs are equal, however long they take; the second one beside a busy thread."""
    ended, found = threading.Event(), []
    for is_busy in (False, True):
        ended.clear()
        busy = threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)])
        if is_busy:
            busy.start()
        solver = Solver(layered(60, 0), Cluster.preset("4xV100-pcie"), 0, LATENCY, "longest_path")
        result = solver.solve(method, Limits(0.1))
        ended.set()
        found.append((result.placement, result.order, result.evaluations, result.lower_bound_s))
    assert found[0] == found[1]


def test_a_search_that_the_clock_ends_says_so() -> None:
    solver = Solver(layered(400, 0), Cluster.preset("4xV100-pcie"), 0, LATENCY, "longest_path")
    result = solver.solve("auto", Limits(3600.0, limit_s=0.05))
    assert result.interrupted
    assert result.feasible
    assert "its limit of 0.05 s: the best found so far, not the final answer" in result.summary()
