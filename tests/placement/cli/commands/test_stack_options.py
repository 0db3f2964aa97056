"""`--stack` and `--rates`: what the first lines say, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_lines import Call, refused

from graphs.errors import MismatchError
from placement.measuring.runs import trial
from placement.results.result import Result

CLUSTER = "4xV100-pcie"


SMALL = """
import torch
def net():
    layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Tanh()) for _ in range(2))
    return torch.nn.Sequential(*layers), (torch.zeros(512, 64),)
def data():
    return net()[0], torch.randn(40, 64)
"""


@pytest.fixture
def net(call: Call, tmp_path: Path) -> str:
    """A model of which much is fused, in the folder that commands run in."""
    (tmp_path / "m.py").write_text(SMALL, encoding="utf-8")
    return "m.py:net"


def test_the_first_line_says_the_stack(call: Call, net: str) -> None:
    words = ("optimize", net, "--train", "--cluster", CLUSTER, "--strategy", "dp2")
    for stack, rates in (("eager", ()), ("compiled", ("--rates", "peak"))):
        code, out, _ = call(*words, *(() if stack == "eager" else ("--stack", stack)), *rates)
        assert code == 0
        assert f" {stack}, fits in" in out.splitlines()[0]
        assert ("--stack compiled --rates peak" in out.splitlines()[1]) == (stack == "compiled")


def test_unknown_stacks_and_rates_are_one_sentence(call: Call) -> None:
    for option, valid in (("--stack", "fused"), ("--rates", "peak")):
        code, _, err = call("optimize", "two_tower", "--cluster", CLUSTER, option, "jit", "--method", "single_device")
        assert code == 2
        assert valid in err


@pytest.mark.parametrize("more", [("--strategies", "dp2,dp4"), ("--methods", "heft"), ("--clusters", "2xK40-pcie")])
def test_compare_says_what_compiling_would_bring(call: Call, net: str, more: tuple[str, ...]) -> None:
    others = ("--methods", "single_device") if "--clusters" in more else ("--cluster", CLUSTER)
    words = ("compare", net, "--train", *others, *more)
    code, out, _ = call(*words)
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("compiled: "))
    assert line.endswith("x: the same plan under torch.compile (stack compiled)")
    document = json.loads(call(*words, "--json")[1])
    (found,) = [case["comparison"] for case in document["cases"]] if "--clusters" in more else [document]
    assert (found["stack"], found["compiled_s"] < found["results"][0]["step_time_s"]) == ("eager", True)
    code, out, _ = call(*words, "--stack", "compiled")
    assert (code, "under torch.compile" in out) == (0, False)
    document = json.loads(call(*words, "--stack", "compiled", "--json")[1])
    (again,) = [case["comparison"] for case in document["cases"]] if "--clusters" in more else [document]
    assert (again["stack"], again["compiled_s"]) == ("compiled", None)


def test_an_estimate_is_of_a_stack(call: Call, net: str) -> None:
    words = ("estimate", net, "--train", "--cluster", CLUSTER)
    eager, compiled = (json.loads(call(*words, *more, "--json")[1]) for more in ((), ("--stack", "compiled")))
    assert (eager["stack"], compiled["stack"]) == ("eager", "compiled")
    assert compiled["states"] == eager["states"]  # a stack changes no memory
    assert compiled["fewest"]["step_time_s"] < eager["fewest"]["step_time_s"]
    assert compiled["advice"].endswith(" a step compiled.")
    assert compiled["command"].endswith(" --stack compiled")
    code, out, _ = call(*shlex.split(compiled["command"])[1:])
    do_it = next(line for line in out.splitlines() if "do it: " in line).partition("do it: placement ")[2]
    assert (code, "--stack compiled" in do_it) == (0, True)


def test_captured_and_built_in_models_are_shown_on_a_stack(call: Call) -> None:
    eager, compiled = (
        json.loads(call("models", "two_tower", *more, "--json")[1]) for more in ((), ("--stack", "compiled"))
    )
    assert (eager["stack"], compiled["stack"]) == ("eager", "compiled")
    assert compiled["models"][0]["bytes_moved"] < eager["models"][0]["bytes_moved"]
    assert json.loads(call("capture", "two_tower", "--stack", "fused", "--json")[1])["stack"] == "fused"


def test_a_saved_result_is_verified_on_its_own_stack(call: Call) -> None:
    words = ("optimize", "two_tower", "--cluster", CLUSTER, "--method", "heft", "--strategy", "none")
    assert call(*words, "--stack", "compiled", "-o", "p.json")[0] == 0
    code, out, _ = call("verify", "p.json", "--graph", "two_tower")
    assert (code, "method heft, compiled, " in out) == (0, True)
    assert json.loads(call("verify", "p.json", "--json")[1])["stack"] == "compiled"
    assert call("capture", "two_tower", "--stack", "fused", "-o", "fused.json")[0] == 0
    refused(call("verify", "p.json", "--graph", "fused.json"), "is of stack compiled", "is on stack fused")


@pytest.mark.usefixtures("net")
def test_fit_simulates_steps_on_a_stack(call: Call) -> None:
    words = ("fit", "m.py:data", "--cluster", CLUSTER, "--updates", 2, "--every", 1)
    eager, compiled = (json.loads(call(*words, *more, "--json")[1]) for more in ((), ("--stack", "compiled")))
    assert (eager["stack"], compiled["stack"]) == ("eager", "compiled")
    assert compiled["results"][0]["loss"] == eager["results"][0]["loss"]
    assert compiled["results"][0]["seconds"] < eager["results"][0]["seconds"]
    assert compiled["command"].endswith(" --stack compiled")
    assert ", compiled" in call(*words, "--stack", "compiled")[1].splitlines()[1]
    refused(call(*words, "--stack", "jit"), "unknown stack 'jit'")
    refused(call(*words, "--stack", "compiled", "--real"), "gradients are run here and timed, which is eager")


def test_apply_places_on_the_stack_and_a_placement_has_its_own(
    call: Call, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Result] = []

    def refused_trial(model: str, result: Result, **_: object) -> None:
        tried.append(result)
        raise MismatchError("no run")

    monkeypatch.setattr(trial, "try_out", refused_trial)
    words = ("apply", net, "--cluster", CLUSTER, "--method", "single_device")
    refused(call(*words, "--stack", "compiled", "-o", "p.json"), "no run")
    refused(call("apply", net, "p.json"), "no run")
    assert [result.stack for result in tried] == ["compiled", "compiled"]
    refused(call("apply", net, "p.json", "--stack", "compiled"), "--stack and --budget-s say how to place")
    refused(call(*words, "--stack", "fused"), "apply runs a model eager or compiled")
