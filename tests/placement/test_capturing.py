"""`placement.capture` of what a command line names, which is what the module that it stands for gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import placement
from graphs.capture import capture
from graphs.errors import CaptureError, UnknownNameError

MODEL = """
from torch import nn
import torch
def make(batch=4):
    return nn.Linear(3, 2), (torch.zeros(batch, 3),)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


def test_a_function_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    found = placement.capture(f"{tmp_path}/mine.py:make", train=True, optimizer="sgd", name="mine", dims={"batch": 5})
    own = capture(nn.Linear(3, 2), torch.zeros(5, 3), train=True, optimizer="sgd")
    assert (found.name, found.hash, found.origin.optimizer) == ("mine", own.hash, "sgd")


def test_a_configuration_by_its_path(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}), encoding="utf-8")
    found = placement.capture(path, train=True, dims={"batch": 3})
    assert (found.name, found.origin.batch_size) == ("GPT2LMHeadModel", 3)


def test_a_configuration_of_torchtitan_with_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[model]\nname = "llama3"\n[training]\nlocal_batch_size = 2\nseq_len = 8\n', encoding="utf-8")
    cluster = placement.Cluster.preset("4xH100-nvswitch")
    found = placement.capture(path, cluster=cluster, optimizer="adamw")
    assert (found.origin.batch_size, found.origin.optimizer) == (8, "adamw")


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(CaptureError, match="alexnet brings its own arguments"):
        placement.capture("alexnet", (torch.zeros(1),))
    with pytest.raises(CaptureError, match="for a model that is named"):
        placement.capture(nn.Linear(3, 2), torch.zeros(4, 3), dims={"batch": 4})
    with pytest.raises(UnknownNameError, match="did you mean 'alexnet'"):
        placement.capture("alexnett")
