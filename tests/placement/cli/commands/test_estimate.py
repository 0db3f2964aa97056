"""``placement estimate``, really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_lines import Call, refused

MODEL_FILE = """
import torch
def net(batch=4):
    layers = (torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU()) for _ in range(3))
    return torch.nn.Sequential(*layers), (torch.zeros(batch, 100),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL_FILE, encoding="utf-8")
    return "mine.py:net"


def test_the_advice_comes_first(call: Call, model: str) -> None:
    code, out, err = call("estimate", model, "--train")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith("mine:net has 30,300 parameters; training with adam in float32 needs ")
    assert first.endswith("at batch 4:")
    assert lines[0] == "at least 1 x H100-SXM5-80GB."
    assert any(
        line.split() == ["float32", "adam", "121", "kB", "121", "kB", "242", "kB", "485", "kB"] for line in lines
    )
    assert any(line.startswith(" A100-SXM4-80GB, H100-SXM5-80GB") for line in lines)


def test_optimizer_and_cluster_can_be_given(call: Call, model: str) -> None:
    code, out, _ = call("estimate", model, "--train", "--optimizer", "sgd", "--cluster", "4xV100-pcie", "--json")
    found = json.loads(out)
    assert (code, found["optimizer"]) == (0, "sgd")
    assert found["fewest"]["count"] == 1
    assert found["advice"].startswith("mine:net fits on 1 device like those of 4xV100-pcie, as it is, about ")
    assert found["command"] == "placement estimate mine.py:net --cluster 4xV100-pcie --optimizer sgd --train"


def test_an_inference_is_estimated_without_train(call: Call, model: str) -> None:
    code, out, _ = call("estimate", model, "--dim", "batch=8", "--json")
    found = json.loads(out)
    assert (code, found["optimizer"], found["samples"], found["trained"]) == (0, None, 8, 0)


def test_what_makes_no_sense_is_refused(call: Call, model: str) -> None:
    refused(call("estimate", model, "--train", "--optimizer", "adm"), "unknown optimizer 'adm', did you mean 'adam'?")
    refused(call("estimate", model, "--optimizer", "adam"), "--optimizer is for a training step; add --train")
    refused(call("estimate", model, "--cluster", "9xV100"), "unknown cluster '9xV100'")
