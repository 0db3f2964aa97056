"""Exports as JSON, by the command, and those that are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from cases.device_map_cases import Stack, cluster_of, line

import placement
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from placement.cli import run
from placement.exporters.registry import TARGETS

GPUS = cluster_of("gpu", "gpu")


# -- JSON, and what cannot be exported ----------------------------------------------------------------------------


def test_json_has_everything(tmp_path: Path) -> None:
    result = line(("a", 1, 0), ("a", 3, 1), ("b", 1, 0))
    found = json.loads(json.dumps(placement.export(result, "json")))
    assert (found["schema"], found["version"]) == ("placement.export", 1)
    assert found["graph"] == {"name": "graph", "hash": result.graph_hash}
    assert found["cluster"] == {"name": "test", "hash": result.cluster_hash}
    assert found["ops"] == {"op0": "d0", "op1": "d1", "op2": "d0"}
    assert found["order"] == {"d0": ["op0", "op2"], "d1": ["op1"]}
    assert found["modules"] == {"a": "d1", "b": "d0"}
    assert [device["kind"] for device in found["devices"]] == ["gpu", "gpu"]


def test_what_cannot_be_exported() -> None:
    good = line(("a", 1, 0), ("b", 1, 1))
    with pytest.raises(UnknownNameError, match="unknown target 'device-map', did you mean 'device_map'"):
        placement.export(good, "device-map")
    none = dataclasses.replace(good, answer=None, reason="it is too large.")
    for target in TARGETS:
        with pytest.raises(InfeasibleError, match="so there is none to export: it is too large"):
            placement.export(none, target)
    nameless = line(("", 1, 0), ("", 1, 1))
    with pytest.raises(MismatchError, match="does not say which module its ops are from"):
        placement.export(nameless, "device_map")
    with pytest.raises(MismatchError, match=r"a module '[ab]', which Stack does not have"):
        placement.export(good, "device_map", model=Stack())
    assert placement.export(nameless, "json")["modules"] == {"": "d0"}
    with pytest.raises(MismatchError, match="no_split is for device maps"):
        placement.export(good, "json", no_split=["Layer"])
    with pytest.raises(MismatchError, match="model is for device maps, scripts of PyTorch"):
        placement.export(good, "json", model=Stack())


MODEL = """
from torch import nn, zeros

class Half(nn.Sequential):
    pass

def make():
    model = nn.Sequential(*(Half(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    return model, (zeros(1, 4),)

def nothing():
    return 3
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    line(("0.0", 2, 0), ("0.1", 1, 1), ("1.0", 1, 1), ("1.1", 1, 1)).save(tmp_path / "placement.json")
    return tmp_path / "placement.json"


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: object) -> str:
        assert run(["export", str(saved), *map(str, words)]) == 0
        return capsys.readouterr().out

    assert json.loads(call("--to", "device_map")) == {"0.0": 0, "0.1": 1, "1": 1}
    output, model = saved.with_name("map.json"), f"{saved.with_name('model.py')}:make"
    words = ("--to", "device_map", "--model", model, "--no-split", "Half", "-o", output)
    assert call(*words) == (
        "device map: 2 entries on 0 (176 bytes of 1 GB), 1 (176 bytes of 1 GB); "
        f"1 of 4 ops are not where they were placed; saved to {output}\n"
    )
    assert json.loads(output.read_text(encoding="utf-8")) == {"0": 0, "1": 1}
    assert json.loads(call(*words, "--json")) == {"0": 0, "1": 1}
    assert "4 ops on 2 devices" in call("--to", "json", "-o", output)


def test_bad_input_of_the_command(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{saved.with_name('model.py')}:make"
    for words, fragment in {
        f"{saved} --to onnx": "unknown target 'onnx'",
        f"{saved}": "Missing option '--to'",
        f"{saved}x --to json": "No such file",
        f"{saved.with_name('model.py')} --to json": "is not a saved result",
        f"{saved} --to device_map --no-split Half": "give the model too, with --model",
        f"{saved} --to device_map --no-split Quarter --model {model}": "unknown class of modules in Sequential",
        f"{saved} --to device_map --model {saved}": "is no model; give a built-in one, file.py:function",
        f"{saved} --to device_map --model {model.replace('make', 'nothing')}": "expected a model",
        f"{saved} --to json -o {saved}": "is also what the command reads",
    }.items():
        assert run(["export", *words.split()]) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert fragment in captured.err
