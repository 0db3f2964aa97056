"""docs/json.md says what ``--json`` prints: the fields of every command, no more and no fewer."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from env.cluster import Cluster
from env.device import MeasuredCollective
from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.records import SplitRow
from placement.calibrating.given import read_step
from placement.calibrating.records import Calibration, CheckedStep, Fit
from placement.cli import run
from placement.cli.registry import EXAMPLES
from placement.inputs import sources
from placement.measuring.machine import links
from placement.measuring.machine.links import ComparedCollective
from placement.measuring.models import profiling
from placement.measuring.runs.trial import DeviceTrial, Trial

DOC = (Path(__file__).resolve().parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", DOC, re.DOTALL | re.MULTILINE))
CLUSTER = ("--cluster", "2xK40-pcie")


def documented(section: str) -> set[str]:
    """Fields named in the bullets, before what is said about them."""
    bullets = re.findall(r"^\* (.*?)(?=^\* |\n\n|\Z)", SECTIONS[section], re.DOTALL | re.MULTILINE)
    words = re.findall(r"`([a-z_.*\[\]]+)`", " ".join(bullets))
    return set(words)


def printed(value: Any, known: set[str], prefix: str = "") -> set[str]:
    """The fields of a JSON object, those inside lists and, where `known` has them, inside named values."""
    found = set()
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for entry in inner:
                found |= printed(entry, known, f"{name}[].")
        elif isinstance(inner, dict) and any(word.startswith(f"{name}.*.") for word in known):
            for entry in inner.values():
                found |= printed(entry, known, f"{name}.*.")
        else:
            found.add(name)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))
    ops = [Op(name, time_s={"*": 1e-3}) for name in "abcd"]
    save_graph(OpGraph.build(ops, [Tensor("a", 10, ("b", "c")), Tensor("b", 10, ("d",))], "g"), "g.json")
    every = "compute_efficiency = 0.5\nbandwidth_efficiency = 0.5\nkind ="  # fields that are left out where they are 1
    rated = Cluster.preset("2xH100-nvswitch")  # has rates, nominal bandwidths and a fabric
    known = MeasuredCollective("all_reduce", 2, (1, 9), (0.1, 0.2), hosts=1)
    toml = replace(rated, collectives=(known,)).to_toml().replace('kind = "gpu"', f'{every} "gpu"')
    (tmp_path / "fitted.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(2, 1), torch.randn(40, 2)\n", encoding="utf-8"
    )
    (tmp_path / "every.toml").write_text(toml, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("models", ["models", "alexnet"]),
        ("clusters NAME", ["clusters", "every.toml"]),
        ("clusters NAME --collectives", ["clusters", "2xK40-pcie", "--collectives"]),
        ("capture", ["capture", "g.json"]),
        ("estimate", ["estimate", "g.json", *CLUSTER]),
        ("compare", ["compare", "g.json", *CLUSTER, "--methods", "heft,single_device"]),
        ("compare --strategies", ["compare", "g.json", *CLUSTER, "--strategies", "none,pp2"]),
        ("compare --seeds", ["compare", "g.json", *CLUSTER, "--methods", "heft,hash", "--seeds", "0..1"]),
        ("compare --sweep figures", ["compare", "g.json", *CLUSTER, "--sweep", "figures", "--evaluations", "0"]),
        ("optimize", ["optimize", "g.json", *CLUSTER, "--method", "heft"]),
        ("suite", ["suite", "g.json", "--clusters", "2xK40-pcie", "--methods", "heft,single_device"]),
        ("fit", ["fit", "fitted.py:make", "--cluster", "4xV100-pcie", "--updates", "2", "--every", "1"]),
        (
            "fit --sweep",
            [
                *("fit", "fitted.py:make", "--cluster", "4xV100-pcie", "--until", "loss=-3", "--batch", "4"),
                *("--every", "1", "--sweep", "workers=1..3"),
            ],
        ),
        ("train", ["train", "g.json", *CLUSTER, "--policy", "graph", "--evaluations", "0", "-o", "p.zip"]),
    ],
)
def test_the_fields_are_those_of_the_docs(
    folder: Path, capsys: pytest.CaptureFixture[str], section: str, words: list[str]
) -> None:
    assert run([*words, "--json"]) == 0
    known = documented(section)
    assert printed(json.loads(capsys.readouterr().out), known) == known


def test_the_fields_of_a_what_if_and_of_a_check_are_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "g.json", "--clusters", "2xK40-pcie,4xK40-pcie", "--methods", "heft", "--json"]
    assert run(words) == 0
    known = documented("compare --clusters, compare --sweep")
    assert printed(json.loads(capsys.readouterr().out), known) == known
    assert run(["optimize", "g.json", *CLUSTER, "--method", "heft", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert run(["verify", "p.json", "--json"]) == 0
    assert printed(json.loads(capsys.readouterr().out), set()) == documented("verify")


def test_the_fields_of_an_explained_capture_are_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (SplitRow((), (), "batch"), SplitRow((), (), "features"))
    save_graph(OpGraph.build([Op("a", flops=1.0, split_rows=rows), Op("b")], [], "g"), "rows.json")
    assert run(["capture", "rows.json", "--explain", "--json"]) == 0
    known = documented("capture") | documented("capture --explain")
    assert printed(json.loads(capsys.readouterr().out), known) == known


def test_the_fields_of_a_profile_are_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = OpGraph.build([Op("a", time_s={"cpu": 1.0})], [])
    found = SimpleNamespace(graph=graph, step_s={"cpu": 1.0}, steps={"cpu": 5}, typical_spread=lambda _: 0.1)
    monkeypatch.setattr(profiling, "measured_profile", lambda *_, **__: found)
    (folder / "m.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(2, 2), (torch.zeros(1, 2),)\n", encoding="utf-8"
    )
    assert run(["profile", "m.py:net", "--cluster", "cpu-gpu", "--json"]) == 0
    known = documented("profile")
    assert printed(json.loads(capsys.readouterr().out), known) == known


def test_the_fields_of_a_calibration_are_too(folder: Path) -> None:
    step = read_step("g.json = 1 s")
    fit = Fit("products", "float32", 3, 3, 0.5, 0.1)
    cluster = Cluster.from_toml(folder / "every.toml")
    found = Calibration(cluster, (), (fit,), {"floor_s": 1.0}, (CheckedStep(step, 1.0, 2.0),), {"kernels": 2.0})
    known = documented("calibrate")
    assert printed(found.to_dict(), known) == known


def test_the_fields_of_measured_collectives_are_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ComparedCollective("all_reduce", 2, 5, 0.12, 0.1)
    monkeypatch.setattr(links, "compared", lambda *_: [row])
    monkeypatch.setattr(sources, "read_cluster", lambda _: Cluster.from_toml(folder / "every.toml"))
    assert run(["clusters", "local", "--collectives", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert printed(found, set()) == documented("clusters local --collectives")
    assert found["median_error"] == pytest.approx(0.2)
    assert run(["clusters", "local", "--collectives"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("collectives among 2 cores: predictions are off by 20.0% in the median")
    assert "all_reduce" in out
    assert "+20%" in out


def test_the_fields_of_a_trial_are_too() -> None:
    fields = {field.name for field in dataclasses.fields(Trial)} - {"devices"}
    inner = {f"devices[].{field.name}" for field in dataclasses.fields(DeviceTrial)}
    assert documented("apply") == fields | inner | {"model", "method", "cluster"}


@pytest.mark.parametrize(
    "words",
    [
        ["optimize", "big.json", *CLUSTER],
        ["compare", "big.json", *CLUSTER],
        ["train", "big.json", *CLUSTER, "--policy", "graph", "--evaluations", "1", "-o", "p.zip"],
    ],
)
def test_what_the_bound_proves_infeasible_is_json_too(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    save_graph(OpGraph.build([Op("a", kept_bytes=2**50, time_s={"*": 1.0})], [], "big"), "big.json")
    assert run([*words, "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert set(found) == {"feasible", "reason"}
    assert found["feasible"] is False
    assert said.err == f"placement: {found['reason']}\n"
    assert run(words) == 1
    assert capsys.readouterr().out == ""


def test_no_command_is_left_out() -> None:
    assert {section.split()[0] for section in SECTIONS} == set(EXAMPLES)
