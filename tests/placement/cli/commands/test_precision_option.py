"""``--precision`` on the command line: in every command that captures a model, and refused of what is captured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from cases.measured_cases import cpu_cluster

import placement
from graphs.errors import MismatchError
from placement.cli.entry import run
from placement.measuring.models import profiling
from placement.measuring.models.repeats import Repeats
from placement.measuring.runs import trial
from placement.results.result import Result

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


def test_a_model_is_measured_and_run_in_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused_trial(*_: object, **__: object) -> None:
        raise MismatchError("no run")

    quick = partial(profiling.measured_profile, repeats=Repeats.exactly(2, 1))
    monkeypatch.setattr(profiling, "measured_profile", quick)
    monkeypatch.setattr(trial, "try_out", refused_trial)
    how = ["model.py:make", "--train", "--cluster", "cores.toml"]
    Path("cores.toml").write_text(cpu_cluster().to_toml(), encoding="utf-8")
    assert run(["profile", *how, "--precision", "mixed", "-o", "graph.json"]) == 0
    assert placement.load_graph("graph.json").origin.precision == "mixed"
    assert run(["apply", *how, "--precision", "master", "-o", "found.json"]) == 2
    assert Result.load("found.json").graph.origin.precision == "master"
    capsys.readouterr()
    assert run(["apply", "model.py:make", "found.json", "--train", "--precision", "master"]) == 2
    assert "leave them out with PLACEMENT" in capsys.readouterr().err
    assert run(["optimize", *how, "--precision", "mixed", "--scorer", "execute"]) == 2
    assert "leave out --precision" in capsys.readouterr().err


def test_float16_is_refused_with_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "model.py:make", "--train", "--precision", "float16"]) == 2
    error = capsys.readouterr().err
    assert "precision 'float16' needs a scaled loss" in error
    assert "take 'mixed' or 'master'" in error


def test_what_is_captured_already_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "model.py:make", "--train", "-o", "graph.json"]) == 0
    capsys.readouterr()
    assert run(["estimate", "graph.json", "--precision", "mixed"]) == 2
    error = capsys.readouterr().err
    assert "graph.json is a graph already, in float32" in error
    assert "capture the model with --precision mixed" in error
