"""Saved results: what a file holds, files of earlier versions, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from small_problems import PAIR, two_branches
from training_steps import mlp

from graphs.errors import MismatchError, UnknownNameError
from graphs.packed import pack_whole
from graphs.transforms.strategy import Strategy
from placement.optimization import optimize
from placement.results.answer import Answer
from placement.results.result import Result
from placement.results.result_json import VERSION
from placement.results.same_model import check_same_model, model_hash
from placement.verification import verify

FIGURES = [f.name for f in fields(Answer)]


@pytest.fixture
def result() -> Result:
    return optimize(two_branches(), PAIR, "heft", seed=1)


@pytest.fixture
def nothing(result: Result) -> Result:
    return replace(result, answer=None, reason="it is too large.")


def edited(result: Result, **changes: Any) -> str:
    return json.dumps({**json.loads(result.to_json()), **changes})


# -- what a file holds ----------------------------------------------------------------------------------------


def test_an_object_is_flat_and_has_no_answer_in_it(result: Result) -> None:
    found = result.to_dict()
    assert "answer" not in found
    assert found.keys() >= {*FIGURES, "graph_hash", "source_hash", "strategy", "feasible", "reason", "note"}
    document = json.loads(result.to_json())
    assert document.keys() - found.keys() == {"schema", "version", "graph", "cluster"}
    assert (document["schema"], document["version"]) == ("placement.result", VERSION)
    assert (found["strategy"], found["source_hash"]) == ("none", result.graph.hash)


def test_what_an_answer_has_is_also_an_attribute_of_the_result(result: Result, nothing: Result) -> None:
    for name in FIGURES:
        assert getattr(result, name) == getattr(result.answered(), name)
        assert getattr(nothing, name) is None
    assert (result.feasible, nothing.feasible) == (True, False)
    with pytest.raises(MismatchError, match="found no feasible placement, so there is none to use: it is too large"):
        nothing.answered()


def test_an_infeasible_result_comes_back(nothing: Result) -> None:
    assert Result.from_json(nothing.to_json()) == nothing
    assert {nothing.to_dict()[name] for name in FIGURES} == {None}


def test_the_schedule_repeats_the_step(result: Result) -> None:
    score, schedule = result.schedule()
    assert score.step_time_s == result.step_time_s == schedule.step_time_s
    assert schedule.device.tolist() == result.plan().device.tolist()


# -- other versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, VERSION - 1, VERSION + 1, True, "2", None])
def test_other_versions_are_refused_with_how_to_make_the_file_anew(result: Result, version: Any) -> None:
    said = f"is of version .*, and this release reads version {VERSION}; make it again: "
    with pytest.raises(MismatchError, match=f"{said}placement optimize GRAPH -o FILE$"):
        Result.from_json(edited(result, version=version))
    with pytest.raises(MismatchError, match=f"{said}placement optimize rnnlm --seed 3$"):
        Result.from_json(edited(result, version=version, command="placement optimize rnnlm --seed 3"))


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": True}, "seed = True; expected a whole number"),
        ({"feasible": "yes"}, "feasible = 'yes'; expected true or false"),
        ({"lower_bound_s": None}, "lower_bound_s = None; expected a number"),
        ({"step_time_s": "3"}, "step_time_s = '3'; expected a number or null"),
        ({"peak_bytes": {"gpu0": 1.5}}, "expected an object of whole numbers or null"),
        ({"order": {"gpu0": "ab"}}, "expected an object of lists of strings or null"),
        ({"transfer_order": [["a", 0]]}, "expected a list of lists of 3 values or null"),
        ({"transfer_order": [["a", 0, 1]]}, "expected a list of lists of 3 values or null"),
        ({"versions": None}, "versions = None; expected an object of strings"),
        ({"gap": None}, "a feasible result has gap; that of 'heft' has none"),
        ({"feasible": False}, "an infeasible result says why"),
        ({"feasible": False, "placement": None, "reason": "x"}, "an infeasible result has no order"),
        ({"source_hash": "0" * 64}, "a graph placed as it is, is its own source"),
    ],
)
def test_wrong_fields(result: Result, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        Result.from_json(edited(result, **changes), "p.json")


def test_a_step_of_no_time_has_no_throughput(result: Result) -> None:
    assert Result.from_json(edited(result, throughput=None)).throughput is None


def test_a_strategy_that_does_not_exist_is_not_verified(result: Result) -> None:
    with pytest.raises(MismatchError, match=r"^strategy of p\.json: strategy 'dq4' cannot be read at 'dq4'"):
        Result.from_json(edited(result, strategy="dq4"), "p.json")
    with pytest.raises(UnknownNameError, match=r"unknown method of a strategy 'heft'\. Valid: strategy"):
        verify(Result.from_json(edited(result, strategy="dp4")))


def test_a_result_for_a_rewritten_graph_is_for_the_graph_it_was_made_from(result: Result) -> None:
    rewritten = replace(result, strategy=Strategy.parse("dp4"), source_hash="0" * 64)
    assert Result.from_json(rewritten.to_json()) == rewritten


# -- packed columns ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten() -> Result:
    return optimize(mlp(batch=8), PAIR, strategy="dp2")


@pytest.fixture(scope="module")
def packed(rewritten: Result) -> dict[str, Any]:
    """The file of a strategy."""
    return json.loads(rewritten.to_json())


def column(*values: int) -> dict[str, Any]:
    return {"packed": pack_whole(np.array(values)), "count": len(values)}


def test_a_strategys_file_has_columns_and_a_placements_has_names(result: Result, packed: dict[str, Any]) -> None:
    assert packed["graph"]["version"] == 3
    assert packed["placement"].keys() == {"packed", "count"}
    assert json.loads(result.to_json())["placement"] == result.placement


def test_a_fixed_sequence_of_transfers_comes_back(rewritten: Result) -> None:
    answer = rewritten.answered()
    sends = (next(iter(answer.placement)), 0, rewritten.cluster.devices[1].name)
    fixed = replace(rewritten, answer=replace(answer, transfer_order=[sends]))
    assert Result.from_json(rewritten.to_json()) == rewritten
    assert Result.from_json(fixed.to_json()) == fixed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": None}, "order is not packed, and placement is"),
        ({"order": {}}, "order is not packed, and placement is"),
        ({"order": column(1, 2)}, "order has count = 2; expected [0-9]+, one for each op"),
        ({"placement": {"packed": "AAAA", "count": 2**60}}, "placement has count = 1152921504606846976"),
        ({"placement": column(*[99] * 34)}, "the packed placement names number 99 of"),
        ({"order": column(*[0] * 34)}, "the packed order does not have each of 34 ops once"),
        ({"transfer_order": column(1)}, "the packed transfer_order has half a transfer"),
        ({"transfer_order": column(-1, 0)}, "the packed transfer_order names number -1 of"),
        ({"transfer_order": 5}, "transfer_order is not packed, and placement is"),
        ({"placement": 5}, "placement = 5; expected an object of strings or null"),
    ],
)
def test_wrong_columns_are_refused(packed: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=f"^p.json.* {message}"):
        Result.from_json(json.dumps({**packed, **changes}), "p.json")


@pytest.mark.parametrize("field", ["placement", "order", "transfer_order", "graph"])
def test_a_packed_file_without_a_field_is_refused(packed: dict[str, Any], field: str) -> None:
    with pytest.raises(MismatchError, match=rf"^p\.json has no '{field}'; it is not a complete result"):
        Result.from_json(json.dumps({key: value for key, value in packed.items() if key != field}), "p.json")


def test_a_model_is_the_same_whatever_its_ops_take() -> None:
    graph = mlp(batch=8)
    slower = replace(graph, flops=2 * graph.flops)
    larger = mlp(batch=16)
    assert slower.hash != graph.hash
    assert model_hash(slower) == model_hash(graph) != model_hash(larger)
    found = optimize(graph, PAIR, strategy="dp2")
    check_same_model(found, slower)
    with pytest.raises(MismatchError, match="is for strategy dp2 of another model than this one"):
        check_same_model(found, larger)
