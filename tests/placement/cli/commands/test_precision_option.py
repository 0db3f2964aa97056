"""``--precision`` on the command line: in every command that captures a model, and refused of what is captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.cli.entry import run

MODEL = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    return model, (torch.zeros(8, 64),)
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_answers_and_files_keep_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["model.py:make", "--train", "--precision", "master"]
    assert run(["capture", *how, "--json", "-o", "graph.json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    n = 2 * (64 * 64 + 64)
    assert (figures["precision"], figures["kept_bytes"]) == ("master", 18 * n)
    assert (
        run(["optimize", "graph.json", "--cluster", "2xV100-pcie", "--strategy", "dp2 zero1", "-o", "found.json"]) == 0
    )
    assert "eager in master" in capsys.readouterr().out
    assert run(["verify", "found.json", "--graph", "model.py:make", "--train", "--precision", "master"]) == 0
    assert "eager in master" in capsys.readouterr().out


def test_what_is_captured_already_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "model.py:make", "--train", "-o", "graph.json"]) == 0
    capsys.readouterr()
    assert run(["estimate", "graph.json", "--precision", "mixed"]) == 2
    error = capsys.readouterr().err
    assert "graph.json is a graph already, in float32" in error
    assert "capture the model with --precision mixed" in error
