"""``placement models``, really run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_lines import Call, refused

from graphs.zoo import MODELS


@pytest.fixture(autouse=True)
def _own_cache(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


def test_models_prints_a_row_and_json_the_same_figures(call: Call, tmp_path: Path) -> None:
    code, out, err = call("models", "alexnet")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.strip().startswith("alexnet"))
    code, text, _ = call("models", "alexnet", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["train"] is False
    (model,) = document["models"]
    assert model["name"] == "alexnet"
    assert str(model["ops"]) in row
    assert f"{model['best_speedup']:.2f}x" in row
    assert model["best_speedup"] == pytest.approx(model["work_s"] / model["critical_path_s"])
    # 5 convolutions and 3 matrix products of a batch of 256, 1.43 GFLOP an image
    assert model["flops"] == pytest.approx(256 * 1.43e9, rel=0.01)
    assert [p.name.startswith("alexnet-inference-op-") for p in (tmp_path / "cache").iterdir()] == [True]


def test_a_broken_cache_is_captured_again(call: Call, tmp_path: Path) -> None:
    first = call("models", "alexnet", "--json")
    (cached,) = (tmp_path / "cache").iterdir()
    good = cached.read_bytes()
    cached.write_text("{", encoding="utf-8")
    assert call("models", "alexnet", "--json") == first
    assert cached.read_bytes() == good
    cached.unlink()
    os.mkfifo(cached)  # whoever opens it waits for a writer
    assert call("models", "alexnet", "--json")[0] == 0
    assert not cached.is_fifo()


def test_an_unwritable_cache_does_not_matter(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert call("models", "alexnet")[0] == 0


def test_unknown_models_are_named(call: Call) -> None:
    refused(call("models", "alexnet", "resnet5"), "unknown model 'resnet5', did you mean 'resnet50'?", *MODELS)
