"""Policies as methods of optimize and compare: budgets, Ctrl-C, local search afterwards, policy files."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import softmax_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_problems import PAIR, cluster_of, device, two_branches
from strategies import problems
from training_runs import Killed, after, fans, kill

from env.cluster import Cluster, both_ways
from env.plan import Plan
from env.problem import Problem
from graphs.errors import InfeasibleError, MismatchError, PolicyFileError, UnknownNameError
from graphs.opgraph import Op, OpGraph
from placement import compare, optimize, verify
from placement.learning import placing
from placement.learning.learners import pretrained
from placement.learning.training import train
from placement.solving.methods import LEARNED, METHODS, POLICY_NAMES, REFINED, default_methods, is_learned, supports

MIB = 2**20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest policy in the place of hierarchical."""
    softmax_policy.in_the_place_of_hierarchical(monkeypatch)


@pytest.fixture
def policy_file(fake: None, tmp_path: Path) -> Path:
    return train(fans(), PAIR, output=tmp_path / "policy.zip", evaluations=800).policy_file


# -- trained within the budget ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_policy_trains_on_the_problem_within_its_evaluations() -> None:
    result = optimize(fans(), PAIR, "hierarchical", evaluations=400, seed=2)
    assert (result.method, result.chosen, result.evaluations, result.budget_s) == (
        "hierarchical",
        "hierarchical",
        400,
        None,
    )
    assert verify(result).holds
    assert result == optimize(fans(), PAIR, "hierarchical", evaluations=400, seed=2)
    few = optimize(fans(), PAIR, "hierarchical", evaluations=8, seed=2)
    assert result.step_time_s < few.step_time_s  # type: ignore[operator]


@pytest.mark.usefixtures("fake")
def test_no_budget_is_one_update() -> None:
    result = optimize(fans(), PAIR, "hierarchical", budget_s=0)
    assert (result.budget_s, result.evaluations) == (0, softmax_policy.BATCH)


@pytest.mark.usefixtures("fake")
def test_local_search_goes_on_from_what_was_learned() -> None:
    learned, refined = (optimize(fans(9), PAIR, f"hierarchical{end}", evaluations=400) for end in ("", REFINED))
    assert (refined.method, refined.chosen) == ("hierarchical+local_search", "local_search")
    assert refined.evaluations <= 400 + softmax_policy.BATCH  # type: ignore[operator]
    assert refined.step_time_s < learned.step_time_s  # type: ignore[operator]
    assert verify(refined).holds


@pytest.mark.usefixtures("fake")
def test_a_table_shows_both_rows() -> None:
    found = compare(fans(), PAIR, ["heft", "hierarchical", "hierarchical+local_search"], evaluations=100)
    assert {result.method for result in found.results} == {"heft", "hierarchical", "hierarchical+local_search"}


@pytest.mark.usefixtures("fake")
def test_a_proof_ends_it() -> None:
    result = optimize(two_branches(), PAIR, "hierarchical", budget_s=600)
    assert result.gap == 0
    assert result.evaluations < 1000  # type: ignore[operator]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("method", ["hierarchical", "hierarchical+local_search"])
def test_ctrl_c_keeps_the_best_so_far(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update, count = softmax_policy.SoftmaxLearner.update, itertools.count()

    def interrupted(learner: softmax_policy.SoftmaxLearner) -> Any:
        if next(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return update(learner)

    placing._compile("hierarchical")
    monkeypatch.setattr(softmax_policy.SoftmaxLearner, "update", interrupted)
    result = optimize(fans(), PAIR, method, budget_s=600)
    assert result.interrupted
    assert result.evaluations == 6 * softmax_policy.BATCH
    assert verify(result).holds
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_that_fits_says_so(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = two_branches(kept_bytes=40 * MIB)  # two on each device fit, nothing else
    propose = softmax_policy.SoftmaxPolicy.propose

    def all_on_one(policy: Any, problem: Problem, *arguments: Any, **options: Any) -> Any:
        proposed = propose(policy, problem, *arguments, **options)
        proposed.device[:] = 0
        return proposed

    monkeypatch.setattr(softmax_policy.SoftmaxPolicy, "propose", all_on_one)
    result = optimize(graph, PAIR, "hierarchical", evaluations=30)
    assert not result.feasible
    assert result.reason is not None
    assert result.reason.startswith(
        "hierarchical tried 32 placements of 'two_branches' and none fits cluster 'pair'; give it a larger budget, or "
        "use method auto. The step keeps 168 MB, and "
    )
    assert "what would help: more devices or memory, half precision." in result.reason


# -- the pretrained policy --------------------------------------------------------------------------------------


def test_pretrained_is_no_search_but_local_search_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def propose(problem: Problem, seed: int, budget: Any) -> Plan:
        asked.append(seed)
        return Plan([0] * problem.graph.n_ops)

    monkeypatch.setattr(pretrained, "propose_pretrained", propose, raising=False)
    placing._compile("pretrained")
    asked.clear()
    result = optimize(fans(), PAIR, "pretrained", seed=4, budget_s=3)
    assert (result.budget_s, result.evaluations, result.chosen) == (None, None, "pretrained")
    refined = optimize(fans(), PAIR, "pretrained+local_search", evaluations=200)
    assert refined.chosen == "local_search"
    assert asked == [4, 0]


# -- policy files -----------------------------------------------------------------------------------------------


def test_a_policy_file_is_a_method(policy_file: Path) -> None:
    method = f"policy:{policy_file}"
    greedy = optimize(fans(), PAIR, method, evaluations=1)
    assert (greedy.method, greedy.chosen, greedy.evaluations) == (method, method, 1)
    more = optimize(fans(), PAIR, method, evaluations=200)
    assert more.evaluations == 200
    assert more.step_time_s <= greedy.step_time_s  # type: ignore[operator]
    assert more == optimize(fans(), PAIR, method, evaluations=200)
    assert verify(more).holds
    assert optimize(fans(), PAIR, method, budget_s=0) == optimize(fans(), PAIR, method, budget_s=0)
    untrained = [optimize(fans(), PAIR, "random", seed=seed).step_time_s for seed in range(5)]
    assert greedy.step_time_s < sum(untrained) / 5  # type: ignore[arg-type, operator]
    found = compare(fans(), PAIR, ["heft", method], evaluations=10)
    assert {result.method for result in found.results} == {"heft", method}


def test_a_policy_for_other_problems_is_refused_before_anything_runs(policy_file: Path) -> None:
    three = cluster_of(*(device(f"gpu{k}") for k in range(3)))
    told: list[str] = []
    with pytest.raises(MismatchError, match=r"for \(units, devices\)"):
        compare(fans(), three, ["heft", f"policy:{policy_file}"], progress=lambda name, *_: told.append(name))
    assert told == []


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("policy:", ValueError, "policy: names no file"),
        ("policy:nowhere.zip", PolicyFileError, "cannot read nowhere.zip"),
        ("hierarchicle", UnknownNameError, "did you mean 'hierarchical'"),
        ("hierarchical+localsearch", UnknownNameError, "did you mean 'hierarchical"),
    ],
)
def test_names_that_are_none(method: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("+", r"\+")):
        optimize(fans(), PAIR, method)


def test_learned_methods_are_for_latency_and_have_to_be_asked_for() -> None:
    assert set(LEARNED) < set(METHODS)
    assert not set(LEARNED) & set(default_methods("latency"))
    for method in (*LEARNED, "policy:x"):
        assert is_learned(method)
        assert supports(method, "latency")
        assert not supports(method, "throughput")
    with pytest.raises(MismatchError, match="hierarchical: not for objective throughput"):
        optimize(fans(), PAIR, "hierarchical", objective="throughput")


# -- the real policies ------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(), method=st.sampled_from([f"{name}{end}" for name in POLICY_NAMES for end in ("", REFINED)]))
def test_laws(problem: Problem, method: str) -> None:
    """Every feasible answer verifies, and the same seed gives the same."""
    asked: dict[str, Any] = {"seed": 3, "evaluations": 60}
    try:
        result = optimize(problem.graph, problem.cluster, method, **asked)
    except InfeasibleError:
        return
    assert result == optimize(problem.graph, problem.cluster, method, **asked)
    if result.feasible:
        assert verify(result).holds


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "ppo"])
def test_a_warm_start_is_never_worse_than_the_list_schedulers(name: str) -> None:
    slow = Cluster("slow", PAIR.devices, tuple(both_ways("gpu0", "gpu1", 3e3, 0.0)))
    for cluster in (PAIR, slow):
        known = [optimize(fans(9), cluster, heuristic).step_time_s for heuristic in ("heft", "m_etf")]
        result = optimize(fans(9), cluster, name, evaluations=50)
        assert result.step_time_s <= min(known)  # type: ignore[operator, type-var]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_goes_on_where_it_was_cut_off(name: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"policy": name, "evaluations": 100, "checkpoint_every_s": 0.0}
    whole = train(fans(7), PAIR, output=tmp_path / "whole.zip", **asked)
    assert len(whole.curve) > 2
    with pytest.raises(Killed):
        train(fans(7), PAIR, output=tmp_path / "cut.zip", progress=after(whole.curve[1].samples, kill), **asked)
    again = train(fans(7), PAIR, output=tmp_path / "cut.zip", **asked)
    assert again.resumed_from == whole.curve[0].samples
    assert (again.curve, again.results) == (whole.curve, whole.results)
    assert (tmp_path / "cut.zip").read_bytes() == (tmp_path / "whole.zip").read_bytes()


@pytest.mark.parametrize("method", ["graph", "seq2seq", "pretrained"])
def test_a_seed_may_be_any_whole_number(method: str) -> None:
    assert optimize(fans(), PAIR, method, seed=10**23, evaluations=40).feasible


def test_pretrained_says_so_where_nothing_fits() -> None:
    whole = [Op(f"op{i}", kept_bytes=PAIR.devices[0].memory_bytes * 3 // 5, time_s={"*": 1.0}) for i in range(3)]
    result = optimize(OpGraph.build(whole, [], "heavy"), PAIR, "pretrained")
    assert not result.feasible
