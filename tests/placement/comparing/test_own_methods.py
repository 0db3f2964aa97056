"""Heuristics of a user's own beside those of the registry."""

from __future__ import annotations

import numpy as np
import pytest
from small_problems import PAIR, two_branches

import baselines
from env.plan import Plan
from env.problem import Problem
from graphs.errors import MethodError
from placement.comparing.methods import compare


def first_device(problem: Problem, seed: int) -> Plan:
    return Plan(np.zeros(problem.graph.n_ops, dtype=np.int64))


def test_a_method_of_ones_own_stands_beside_the_others() -> None:
    found = compare(two_branches(), PAIR, {**baselines.METHODS, "mine": first_device})
    mine = next(result for result in found.results if result.method == "mine")
    single = next(result for result in found.results if result.method == "single_device")
    assert mine.answered().used == {PAIR.devices[0].name}
    assert mine.answered().objective_s == pytest.approx(single.answered().objective_s)
    assert len(found.results) == len(baselines.METHODS) + 1 - len(found.unsupported)


def test_alone_it_is_compared_with_one_device() -> None:
    found = compare(two_branches(), PAIR, {"mine": first_device})
    assert [result.method for result in found.results] == ["mine"]
    assert found.speedup(found.results[0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"heft": first_device}, "'?heft'? is the name of another method"),
        ({"mine": "heft"}, "expected a function from a problem and a seed to a plan"),
        ({"mine": lambda problem, seed: [0]}, "returned list; expected an env.plan.Plan"),
        ({"mine": lambda problem, seed: Plan(np.array([0, 5]))}, "expected whole numbers from 0 to 1 for each of"),
    ],
)
def test_what_is_no_method_is_refused(methods: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(two_branches(), PAIR, methods)


def test_what_fails_in_it_is_said_with_its_name() -> None:
    def broken(problem: Problem, seed: int) -> Plan:
        raise KeyError("gpu9")

    with pytest.raises(MethodError, match="method mine raised KeyError of its own: 'gpu9'") as caught:
        compare(two_branches(), PAIR, {"mine": broken})
    assert isinstance(caught.value.__cause__, KeyError)


def test_ctrl_c_that_compiled_code_turned_into_another_error_is_ctrl_c() -> None:
    def interrupted(problem: Problem, seed: int) -> Plan:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        compare(two_branches(), PAIR, {"mine": interrupted})
