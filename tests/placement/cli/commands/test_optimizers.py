"""The optimizer of a result is the optimizer of all that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import Call

import placement
from placement.results.same_model import with_recipe_of

_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.first(x))).square().mean()

def make(batch=8):
    return Net(), (torch.randn(batch, 16),)
"""
_CLASSES = {"adam": "Adam,", "adamw": "AdamW,", "momentum": "SGD, lr=LEARNING_RATE, momentum=0.9", "sgd": "SGD,"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(_MODEL)
    return "net.py:make"


@pytest.mark.parametrize("optimizer", sorted(_CLASSES))
def test_a_result_is_exported_and_verified_with_its_optimizer(call: Call, model: str, optimizer: str) -> None:
    words = ("--cluster", "4xV100-pcie", "--strategy", "dp2", "--train", "--optimizer", optimizer)
    code, out, err = call("optimize", model, *words, "-o", "found.json")
    assert code == 0, err
    assert "not checked" not in out
    code, script, err = call("export", "found.json", "--to", "torch", "--model", model)
    assert code == 0, err
    assert f"torch.optim.{_CLASSES[optimizer]}" in script.replace("lr=LEARNING_RATE)", "")
    assert call("verify", "found.json", "--graph", model, "--train")[0] == 0


def test_a_graph_gets_the_optimizer_of_a_result_of_a_saved_graph(call: Call, model: str) -> None:
    assert call("capture", model, "--train", "-o", "net.json")[0] == 0
    words = ("--cluster", "4xV100-pcie", "--strategy", "dp2", "--optimizer", "sgd")
    assert call("optimize", "net.json", *words, "-o", "found.json")[0] == 0
    found = placement.Result.load("found.json")
    graph = placement.capture("net.py:make", train=True)
    assert with_recipe_of(found, graph).origin.optimizer == "sgd"
    assert "torch.optim.SGD" in placement.export(found, "torch", graph=graph)
    assert placement.verify(found, graph).made_again


def test_steps_of_apply_have_the_optimizer_of_the_placement(call: Call, model: str) -> None:
    words = ("--train", "--optimizer", "momentum", "--strategy", "mb2", "--steps", "2")
    code, out, err = call("apply", model, *words, "--cluster", "local")
    assert code == 0, err
    assert "weights equal, in 3 steps of momentum" in out


def test_plans_of_an_answer_are_taken_by_their_numbers(call: Call, model: str) -> None:
    words = ("--cluster", "4xV100-pcie", "--train", "--evaluations", 300, "-o", "found.json")
    code, out, err = call("optimize", model, *words)
    assert code == 0, err
    plans = placement.Result.load("found.json").alternatives
    number = next(k for k, one in enumerate(plans, 1) if one.strategy.text == "dp4 zero3")
    assert f"{number} plain FSDP" in out
    code, script, err = call("export", "found.json", "--plan", number, "--to", "torch", "--model", model)
    assert code == 0, err
    assert "dp4 zero3" in script
    assert call("verify", "found.json", "--plan", number, "--graph", model, "--train")[0] == 0
    code, _, err = call("verify", "found.json", "--plan", len(plans) + 1)
    assert (code, f"the result has plans 1 to {len(plans)}, got {len(plans) + 1}" in err) == (2, True)
    code, _, err = call("apply", model, "--plan", 1)
    assert (code, "give PLACEMENT, too" in err) == (2, True)
