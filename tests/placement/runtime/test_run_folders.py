"""Folders of `save_run` that were changed, or that somebody else made."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from env.cluster import Cluster
from env.device import Device
from graphs.errors import MismatchError


class _Call:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def trained(folder: Path) -> tuple[Any, Any]:
    """A placed model of one device and its optimizer, one step after the start, saved in ``run``."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(4, 4)
    cluster = Cluster("one", (Device("cpu0", "cpu", 2**34, {"float32": 1e10}, 1e10, 5e-6),), ())
    graph = placement.capture(model, (x,), train=True)
    placed: Any = placement.apply(model, placement.optimize(graph, cluster, strategy="mb2"), (x,))
    optimizer = placed.optimizer(torch.optim.AdamW, lr=0.01)
    placed.step(x)
    optimizer.step()
    placed.save_run(folder / "run", optimizer, done=1)
    assert placed.load_run(folder / "run", optimizer) == {"done": 1}
    return placed, optimizer


@pytest.mark.parametrize("tied", [[1], {"a": 1}, {"a": ["b"]}, "a"])
def test_names_of_tied_weights_are_text(tmp_path: Path, tied: object) -> None:
    placed, optimizer = trained(tmp_path)
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "tied": tied}), encoding="utf-8")
    with pytest.raises(MismatchError, match="is no run of this version"):
        placed.load_run(tmp_path / "run", optimizer)


@pytest.mark.parametrize("content", ["call", b"", b"\x80\x04N.", b"no pickle"])
def test_an_index_of_a_checkpoint_calls_nothing(tmp_path: Path, content: object) -> None:
    placed, optimizer = trained(tmp_path)
    made = tmp_path / "made"
    index = pickle.dumps(_Call(made)) if content == "call" else content
    assert isinstance(index, bytes)
    next((tmp_path / "run").glob("step-*/.metadata")).write_bytes(index)
    before = {name: value.clone() for name, value in placed.state_dict().items()}
    with pytest.raises(MismatchError, match="as a distributed checkpoint"):
        placed.load_run(tmp_path / "run", optimizer)
    assert not made.exists()
    assert all(torch.equal(value, before[name]) for name, value in placed.state_dict().items())
