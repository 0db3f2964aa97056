"""optimize, compare, verify and Result: what they promise, and what they refuse."""

from __future__ import annotations

import itertools
import json
import math
import re
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from small_problems import MIB, PAIR, cluster_of, device, two_branches
from strategies import problems

from baselines import portfolio
from baselines.registry import STARTS
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import GraphFileError, InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import Op, OpGraph, Tensor
from placement.comparing.methods import compare, ranked, ties
from placement.optimization import optimize
from placement.results.result import Result
from placement.solving.methods import (
    AUTO,
    HEURISTICS,
    METHODS,
    PRETRAINED,
    SEARCHES,
    default_methods,
    is_learned,
    supports,
)
from placement.verification import verify

# -- optimize -------------------------------------------------------------------------------------------------


FEW = 300  # evaluations: enough for graphs of a few ops


@pytest.mark.parametrize("method", [name for name in METHODS if supports(name, "latency")])
def test_every_method_fills_every_field(method: str) -> None:
    result = optimize(two_branches(), PAIR, method, evaluations=FEW)
    assert isinstance(result, Result)
    assert result.feasible
    assert (result.method, result.seed, result.objective) == (method, 0, "latency")
    assert result.chosen in METHODS
    assert (result.evaluations is not None) == (method not in (*HEURISTICS, PRETRAINED))
    assert not result.interrupted
    assert result.lower_bound_s == pytest.approx(3.0, rel=1e-3)
    assert result.objective_s == result.step_time_s
    assert 3.0 <= result.step_time_s <= 4.1
    assert result.throughput == 1 / result.step_time_s
    assert result.gap == pytest.approx(1 - 3 / result.step_time_s, abs=1e-3)
    assert set(result.peak_bytes) == {"gpu0", "gpu1"}
    assert sum(len(ops) for ops in result.order.values()) == 4
    assert result.versions["numpy"] == np.__version__
    assert verify(result).holds


def test_auto_finds_the_two_branches_and_says_who_did() -> None:
    result = optimize(two_branches(), PAIR, evaluations=FEW)
    assert result.method == "auto"
    assert result.step_time_s == pytest.approx(3.0, rel=1e-4)
    assert result.placement["b"] != result.placement["c"]
    assert f"auto (chose {result.chosen})" in result.summary()


def test_auto_stays_on_one_device_where_transfers_cost_more_than_they_gain() -> None:
    slow = Cluster("slow", PAIR.devices, tuple(both_ways("gpu0", "gpu1", 100.0, 0.0)))
    result = optimize(two_branches(), slow, evaluations=FEW)
    assert result.step_time_s == 4.0
    assert len(set(result.placement.values())) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    problem=problems(),
    method=st.sampled_from([name for name in METHODS if not is_learned(name)]),  # those: test_learned_methods
    priority=st.sampled_from(("longest_path", "fifo", "msr")),
    objective=st.sampled_from(("latency", "throughput")),
)
def test_laws(problem: Problem, method: str, priority: str, objective: str) -> None:
    """Every feasible answer verifies, replays, survives JSON, and is deterministic; `auto` is never the worst."""
    asked: dict[str, Any] = {"seed": 3, "priority": priority, "objective": objective, "evaluations": FEW}
    assume(supports(method, objective))
    try:
        result = optimize(problem.graph, problem.cluster, method, **asked)
    except InfeasibleError:
        assume(False)
    assert result == optimize(problem.graph, problem.cluster, method, **asked)
    assert Result.from_json(result.to_json()) == result
    if not result.feasible:
        assert result.reason
        return
    checked = verify(result)
    assert checked.problems == ()
    score = Simulator(problem).score(result.plan())
    assert score.step_time_s == result.step_time_s
    assert result.objective_s >= result.lower_bound_s * (1 - 1e-9)
    single = optimize(problem.graph, problem.cluster, "single_device", **asked)
    if method not in HEURISTICS and single.feasible:
        assert result.objective_s <= single.objective_s * (1 + 1e-9)


@given(problem=problems(), data=st.data())
def test_the_recorded_order_can_be_run_as_it_stands(problem: Problem, data: st.DataObject) -> None:
    """Strictly in order, on every device, no op waits for one that comes later: nothing can deadlock."""
    graph, n_devices = problem.graph, problem.cluster.n_devices
    where = data.draw(st.lists(st.integers(0, n_devices - 1), min_size=graph.n_ops, max_size=graph.n_ops))
    _, schedule = Simulator(problem).schedule(Plan(where))
    position = np.argsort(schedule.order)
    producer, consumer, _ = graph.edge_list
    assert (position[producer] < position[consumer]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "heff"}, "unknown method 'heff', did you mean 'heft'"),
        ({"objective": "latensy"}, "unknown objective 'latensy', did you mean 'latency'"),
        ({"priority": "lifo"}, "unknown priority 'lifo', did you mean 'fifo'"),
        ({"seed": -1}, "0 or more, got -1"),
        ({"budget_s": -1.0}, "0 or more, got -1.0"),
        ({"budget_s": math.nan}, "a finite number of seconds"),
        ({"evaluations": -1}, "a number of evaluations is a whole number, 0 or more"),
        ({"method": "heft", "objective": "throughput"}, "heft: not for objective throughput; methods that are: single"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize(two_branches(), PAIR, **options)


# -- infeasible -----------------------------------------------------------------------------------------------


def test_a_graph_that_fits_nowhere_names_op_device_and_bytes() -> None:
    with pytest.raises(InfeasibleError) as caught:
        optimize(two_branches(kept_bytes=101 * MIB), PAIR)
    sentence = str(caught.value)
    assert re.match(r"op '[abcd]' needs .*1059\d{5} bytes.* gpu0, has .*104857600 bytes.* free", sentence)
    assert "\n" not in sentence


def test_a_pin_without_a_device_is_infeasible() -> None:
    graph = OpGraph.build([Op("a", pins=("tpu",))], [])
    with pytest.raises(InfeasibleError, match="'a' may only run on tpu"):
        optimize(graph, PAIR)


def test_a_method_that_finds_nothing_says_why() -> None:
    graph = two_branches(kept_bytes=40 * MIB)  # two fit on a device, four do not
    single = optimize(graph, PAIR, "single_device")
    assert (single.feasible, single.placement, single.objective_s, single.step_time_s) == (False, None, None, None)
    assert "gpu" in single.reason
    assert f"infeasible: {single.reason}" in single.summary()
    with pytest.raises(MismatchError, match="no feasible placement"):
        single.device_numbers()
    with pytest.raises(MismatchError, match="nothing to verify"):
        verify(single)
    assert optimize(graph, PAIR, "auto", evaluations=FEW).feasible


# -- budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("method", [*SEARCHES, AUTO])
def test_no_budget_gives_the_best_quick_answer(method: str, objective: str) -> None:
    if not supports(method, objective):
        pytest.skip("not for this objective")
    quick = [optimize(two_branches(), PAIR, name, objective=objective) for name in STARTS[objective]]
    result = optimize(two_branches(), PAIR, method, objective=objective, budget_s=0)
    assert result.budget_s == 0
    assert result.objective_s <= min(r.objective_s for r in quick if r.feasible)


@pytest.mark.parametrize("method", [*SEARCHES, AUTO])
def test_an_interrupted_search_returns_its_best(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while candidates are computed: what is quick still counts, and the answer says so."""
    objective = "latency" if supports(method, "latency") else "throughput"
    waits = itertools.count()

    def interrupted_once(*args: Any, **kwargs: Any) -> Any:
        if next(waits) == 0:
            raise KeyboardInterrupt
        return wait(*args, **kwargs)

    monkeypatch.setattr(portfolio, "wait", interrupted_once)
    result = optimize(two_branches(), PAIR, method, objective=objective, budget_s=60)
    assert result.interrupted
    assert result.feasible
    assert "interrupted" in result.summary()
    assert result.solve_time_s < 60  # the budget was not used up
    assert verify(result).holds


def test_an_interrupted_comparison_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    calls = itertools.count()
    monkeypatch.setattr(portfolio, "wait", lambda *a, **k: interrupt() if next(calls) == 0 else wait(*a, **k))
    found = compare(two_branches(), PAIR, ["heft", "auto", "dfs"], budget_s=60)
    assert {r.method for r in found.results} == {"heft", "auto"}
    assert [r.interrupted for r in found.results if r.method == "auto"] == [True]


def test_a_proof_ends_the_search_long_before_the_budget() -> None:
    result = optimize(two_branches(), PAIR, "auto", budget_s=600)
    assert result.gap == 0
    assert result.solve_time_s < 300


# -- compare --------------------------------------------------------------------------------------------------


def test_comparison_is_ranked_and_says_ties() -> None:
    found = compare(two_branches(), PAIR, evaluations=FEW)
    assert {r.method for r in found.results} == set(default_methods("latency")) == {*HEURISTICS, AUTO}
    times = [r.step_time_s for r in found.results]
    assert times == sorted(times) or all(
        math.isclose(a, b, rel_tol=1e-9) or a < b for a, b in itertools.pairwise(times)
    )
    assert found.best is found.results[0]
    assert found.single_device_s == 4.0
    for result in found.results:
        assert found.speedup(result) == pytest.approx(4.0 / result.step_time_s)
    for method, other in found.ties.items():
        by_name = {r.method: r for r in found.results}
        assert by_name[method].step_time_s == pytest.approx(by_name[other].step_time_s, rel=1e-9)
        assert other not in found.ties


def test_infeasible_rows_come_last_and_speedups_need_a_single_device() -> None:
    found = compare(two_branches(kept_bytes=40 * MIB), PAIR, ["single_device", "heft"])
    assert [r.method for r in found.results] == ["heft", "single_device"]
    assert found.single_device_s is None
    assert found.speedup(found.results[0]) is None


def test_speedups_refer_to_one_device_even_where_it_is_not_compared() -> None:
    found = compare(two_branches(), PAIR, ["heft"])
    assert [r.method for r in found.results] == ["heft"]
    assert found.speedup(found.results[0]) == pytest.approx(4 / 3, rel=1e-4)


def test_progress_is_told_once_per_method_and_at_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    compare(two_branches(), PAIR, ["heft", "dfs", "heft"], progress=lambda *now: told.append(now))
    assert told == [("heft", 0, 2), ("dfs", 1, 2), ("", 2, 2)]


def test_comparison_json_has_exactly_the_agreed_keys() -> None:
    document = json.loads(compare(two_branches(kept_bytes=40 * MIB), PAIR, seed=5, evaluations=FEW).to_json())
    agreed = ["graph", "cluster", "objective", "lower_bound_s", "seed", "results"]
    assert set(document) - set(agreed) == {
        *("graph_hash", "cluster_hash", "versions", "command", "basis", "unsupported", "stack", "compiled_s"),
        *("strategy", "strategy_bound_s", "alternatives"),
    }
    assert (document["graph"], document["cluster"], document["seed"]) == ("two_branches", "pair", 5)
    row = [
        "strategy",
        "method",
        "chosen",
        "objective_s",
        "step_time_s",
        *("samples_per_s", "tokens_per_s", "mfu"),
        "feasible",
        "reason",
        "speedup_vs_single",
        "gap",
    ]
    row += ["peak_bytes", "bytes_moved", "solve_time_s", "interrupted", "note", "not_run", "placement"]
    assert all(list(entry) == row for entry in document["results"])
    bad = [entry for entry in document["results"] if not entry["feasible"]]
    assert bad
    for entry in bad:
        assert entry["reason"]
        assert entry["step_time_s"] is entry["objective_s"] is entry["placement"] is None


def test_a_comparison_by_throughput_leaves_out_methods_for_latency() -> None:
    found = compare(two_branches(), PAIR, ["single_device", "heft", "expert"], objective="throughput")
    assert {r.method for r in found.results} == {"single_device", "expert"}
    assert found.unsupported == ("heft",)
    best = found.best
    assert best.objective_s == pytest.approx(2.0)  # two ops on each device
    assert best.throughput == pytest.approx(0.5)
    assert best.step_time_s >= 3.0
    assert found.speedup(best) == pytest.approx(2.0)


def test_the_best_bound_counts_for_every_row() -> None:
    found = compare(two_branches(), PAIR, ["single_device", "exact"], evaluations=10**6)
    assert found.best.gap == 0
    assert len({r.lower_bound_s for r in found.results}) == 1
    assert found.results[-1].gap == pytest.approx(0.25, abs=1e-3)


def test_ranking_counts_rounding_as_a_tie_and_prefers_fewer_devices() -> None:
    wide, narrow = (optimize(two_branches(), PAIR, name) for name in ("heft", "single_device"))
    close = narrow.step_time_s * (1 - 1e-12)
    wide = replace(wide, answer=replace(wide.answer, step_time_s=close, objective_s=close))
    assert ranked([wide, narrow]) == (narrow, wide)
    assert ties([wide, narrow]) == {"heft": "single_device"}


# -- Result as JSON -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "placement.json"
    optimize(two_branches(), PAIR, "heft", seed=1).save(path)
    return path


def change(path: Path, **changes: Any) -> Path:
    document = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        document[key] = value(document[key]) if callable(value) else value
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_saved_result_comes_back_and_verifies_alone(saved: Path) -> None:
    result = Result.load(saved)
    assert result == optimize(two_branches(), PAIR, "heft", seed=1)
    assert verify(saved).holds
    assert verify(str(saved), two_branches(), PAIR).holds


def test_solve_time_is_outside_equality(saved: Path) -> None:
    result = Result.load(saved)
    assert replace(result, solve_time_s=1e9) == result
    assert replace(result, seed=2) != result


def test_an_infinite_link_survives_json() -> None:
    free = Cluster("free", PAIR.devices, tuple(both_ways("gpu0", "gpu1", math.inf, 0.0)))
    result = optimize(two_branches(), free, "heft")
    assert "Infinity" not in result.to_json()
    assert Result.from_json(result.to_json()).cluster == free


def test_saving_is_atomic(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        optimize(two_branches(), PAIR, "dfs").save(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def moved(op: str, target: str | None) -> Any:
    def edit(placement: dict[str, str]) -> dict[str, str]:
        return {**{k: v for k, v in placement.items() if k != op}, **({} if target is None else {op: target})}

    return edit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": moved("b", None)}, "op 'b' of graph 'two_branches' is not placed"),
        ({"placement": moved("z", "gpu0")}, "op 'z' is placed, but graph 'two_branches' has no such op"),
        ({"placement": moved("b", "gpu7")}, "op 'b' is placed on 'gpu7', but cluster 'pair' has gpu0, gpu1"),
        ({"order": {"gpu0": ["a", "b", "c", "d", "a"], "gpu1": []}}, "twice in the order|but placed on"),
        ({"order": {"gpu0": [], "gpu1": []}}, "op 'a' is in no device's order"),
        ({"graph_hash": "0" * 64}, "a placement for another graph"),
        ({"cluster_hash": "0" * 64}, "a placement for another cluster"),
        ({"schema": "other"}, "not a saved result"),
        ({"version": 99}, "version 99"),
        ({"seed": "one"}, "seed = 'one'; expected a whole number"),
        ({"placement": ["gpu0"]}, "expected an object of strings or null"),
        ({"placement": None}, "a feasible result has placement"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"cluster": {"name": "x"}}, "cluster 'x' has no devices"),
    ],
)
def test_results_that_do_not_fit_are_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    if "surprise" in changes:
        document = {**json.loads(saved.read_text(encoding="utf-8")), **changes}
        saved.write_text(json.dumps(document), encoding="utf-8")
    else:
        change(saved, **changes)
    with pytest.raises(MismatchError, match=message) as caught:
        verify(saved)
    assert str(saved) in str(caught.value)


def test_a_doubly_placed_op_is_named(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    saved.write_text(text.replace('"placement": {', '"placement": {"b": "gpu0",', 1), encoding="utf-8")
    with pytest.raises(MismatchError, match="'b' twice"):
        Result.load(saved)


def test_every_field_is_needed(saved: Path) -> None:
    document = json.loads(saved.read_text(encoding="utf-8"))
    for key in document.keys() - {"schema", "version"}:
        without = {name: value for name, value in document.items() if name != key}
        with pytest.raises(MismatchError, match=f"has no '{key}'"):
            Result.from_json(json.dumps(without))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '{"schema": NaN}', "\x80abc", '{"a": 1'])
def test_what_is_no_result_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises((MismatchError, GraphFileError)) as caught:
        verify(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match="cannot read"):
        verify(tmp_path / "nothing.json")


# -- verify ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"step_time_s": 2.5}, "step_time_s"),
        ({"objective_s": 2.5}, "objective_s"),
        ({"throughput": 9.0}, "throughput"),
        ({"lower_bound_s": 1.0}, "lower_bound_s"),
        ({"gap": 0.5}, "gap"),
        ({"bytes_moved": 1}, "bytes_moved"),
        ({"peak_bytes": {"gpu0": 1, "gpu1": 1}}, "peak_bytes of gpu0"),
    ],
)
def test_a_false_figure_is_found(saved: Path, changes: dict[str, Any], figure: str) -> None:
    found = verify(change(saved, **changes))
    assert not found.holds
    assert any(problem.startswith(figure) for problem in found.problems)
    assert found.summary().startswith("does not hold")


def test_a_broken_colocation_and_a_broken_pin_are_found(saved: Path) -> None:
    ops = [Op("a", colocation="g", time_s={"*": 1.0}), Op("b", colocation="g", time_s={"*": 1.0})]
    graph = OpGraph.build([*ops, Op("c", pins=("gpu",), time_s={"*": 1.0})], [])
    mixed = cluster_of(device("gpu0"), device("cpu0", kind="cpu"))
    result = optimize(graph, mixed, "single_device")
    there = {"a": "gpu0", "b": "cpu0", "c": "cpu0"}
    wrong = replace(result, answer=replace(result.answer, placement=there, order={"gpu0": ["a"], "cpu0": ["b", "c"]}))
    problems_found = " ".join(verify(wrong).problems)
    assert "'c' may only run on gpu" in problems_found
    assert "'a'" in problems_found


def test_a_placement_for_another_graph_or_cluster_is_refused(saved: Path) -> None:
    with pytest.raises(MismatchError, match=r"another graph: for 'two_branches'.*not for 'other'"):
        verify(saved, graph=two_branches(kept_bytes=1, name="other"))
    with pytest.raises(MismatchError, match="another cluster"):
        verify(saved, cluster=cluster_of(device("gpu0")))


def test_unknown_names_are_value_errors() -> None:
    with pytest.raises(UnknownNameError):
        compare(two_branches(), PAIR, ["nothing"])


@pytest.mark.parametrize("edit", [{"feasible": False, "reason": "x"}, {"reason": "x"}])
def test_a_placement_that_says_it_is_infeasible_is_found(saved: Path, edit: dict[str, Any]) -> None:
    assert not verify(change(saved, **edit)).holds


@pytest.mark.parametrize("key", ["objective", "priority", "method", "chosen", "graph_name", "cluster_name"])
def test_names_that_do_not_exist_are_refused(saved: Path, key: str) -> None:
    with pytest.raises((MismatchError, UnknownNameError), match="nonsense"):
        verify(change(saved, **{key: "nonsense"}))


def test_a_negative_solve_time_is_refused(saved: Path) -> None:
    with pytest.raises(MismatchError, match="solve_time_s"):
        verify(change(saved, solve_time_s=-1.0))


@pytest.mark.parametrize("seed", [True, 1.0, None])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        optimize(two_branches(), PAIR, seed=seed)


def test_what_is_no_problem_is_refused() -> None:
    wrong: Any = "alexnet"
    with pytest.raises(ValueError, match="expected an OpGraph"):
        optimize(wrong, PAIR)
    with pytest.raises(ValueError, match="list of names"):
        compare(two_branches(), PAIR, "heft")
    with pytest.raises(ValueError, match="no method"):
        compare(two_branches(), PAIR, [])


@pytest.mark.parametrize("method", ["single_device", "dp_linear", "local_search", "exact"])
def test_steady_state_needs_the_memory_of_steps_in_flight_not_of_all_tensors(method: str) -> None:
    """Forty tensors of 100 bytes, two of them at a time, on devices of 450 bytes."""
    ops = [Op(f"op{i}", time_s={"*": 1.0}, kept_bytes=1) for i in range(40)]
    graph = OpGraph.build(ops, [Tensor(f"op{i}", 100, (f"op{i + 1}",)) for i in range(39)])
    devices = tuple(Device(f"d{i}", "gpu", 450, {"float32": 1.0}, 1.0) for i in range(2))
    cluster = Cluster("pair", devices, both_ways("d0", "d1", 1000.0, 0.0))
    result = optimize(graph, cluster, method, objective="throughput", evaluations=None if method in HEURISTICS else 500)
    assert result.feasible
    assert result.objective_s == (40.0 if method == "single_device" else 20.0)
    assert verify(result).holds
