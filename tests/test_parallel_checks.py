"""The checks of published figures, on files of our own."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

Run = Callable[[], tuple[int, dict[str, Any]]]
SETTING = {
    "model": "small",
    "layers": 6,
    "heads": 4,
    "hidden": 64,
    "sequence": 32,
    "stages": 4,
    "micro_batches": 8,
    "t_forward_ms": 1.0,
    "t_backward_input_ms": 1.0,
    "t_backward_weight_ms": 1.0,
    "t_comm_ms": 0.0,
    # (p - 1)(F + B + W), (p - 1)(F + B - W) and none, beside m (F + B + W).
    "bubble_rate": {"1F1B": 9 / 33, "1F1B-interleaved": 4.5 / 28.5, "ZB-H1": 3 / 27, "ZB-H2": 0.0, "ZB-2p": 0.0},
}


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit code and the answer about the files of the folder, without the figures that need no file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("parallel_checks")
    monkeypatch.setattr(script, "WITHOUT_FILE", {})
    monkeypatch.setattr(sys, "argv", ["parallel_checks.py", "--workloads", str(tmp_path), "--json"])

    def run() -> tuple[int, dict[str, Any]]:
        code = script.main()
        return code, json.loads(capsys.readouterr().out)

    return run


def test_bubble_rates_by_the_papers_formulas(tmp_path: Path, checked: Run) -> None:
    (tmp_path / "any name.json").write_text(json.dumps([SETTING]), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("nothing to check", encoding="utf-8")
    code, answer = checked()
    (file,) = answer["files"]
    assert file["file"] == "any name.json"
    ours = {row["name"].removeprefix("small p4 m8 "): row for row in file["rows"]}
    for name, rate in SETTING["bubble_rate"].items():  # type: ignore[attr-defined]
        row = next(row for known, row in ours.items() if known.startswith(name) and row["published"] is not None)
        assert row["published"] == rate
        assert row["ours"] == pytest.approx(rate, abs=1e-12)
        assert row["difference"] == pytest.approx(0.0, abs=1e-12)
    assert file["summary"]["holds"] is True
    assert file["further"][0]["holds"] is True
    assert answer["left_out"] == {"notes.txt": "no check knows its format"}
    assert code == 0


def test_an_order_that_is_found_must_not_be_worse_than_the_published_one(tmp_path: Path, checked: Run) -> None:
    better = {**SETTING, "bubble_rate": {"ZB-2p": -0.01}}
    (tmp_path / "better.json").write_text(json.dumps([better]), encoding="utf-8")
    code, answer = checked()
    assert code == 1
    (excess,) = answer["files"][0]["further"]
    assert excess["value"] == pytest.approx(0.01)
    assert excess["holds"] is False
    assert answer["files"][0]["summary"]["holds"] is True


def test_a_figure_that_differs_is_told_and_ends_with_1(tmp_path: Path, checked: Run) -> None:
    wrong = {**SETTING, "bubble_rate": {"1F1B": 0.25}}
    (tmp_path / "wrong.json").write_text(json.dumps([wrong]), encoding="utf-8")
    code, answer = checked()
    assert code == 1
    assert answer["files"][0]["summary"]["holds"] is False
    assert answer["files"][0]["summary"]["value"] == pytest.approx(9 / 33 - 0.25)


def test_a_pipeline_of_replicas(tmp_path: Path, checked: Run) -> None:
    """Two equal layers without anything to send: all devices share the work, unless memory keeps them apart."""
    plain = {"timePerSample": 1.0, "parameterSize": 0.0, "memoryUsageA": 0.0, "memoryUsageB": 5 * 2.0**30}
    plain |= {"id": "vanilla", "syncTimeFw": {}, "syncTimeBw": {}}  # two of them do not fit into 8 GiB
    edge = {"sourceId": 0, "destId": 1, "communicationCost": 0.0}
    for name, size in (("apart", 5), ("together", 1)):
        layer = {**plain, "memoryUsageB": size * 2.0**30}
        model = {"nodes": [{"id": i, "TMPCs": {"1": [layer]}} for i in range(2)], "edges": [edge]}
        (tmp_path / f"{name}.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "broken.json").write_text(json.dumps({"nodes": [{"TMPCs": {}}], "edges": []}), encoding="utf-8")
    code, answer = checked()
    assert code == 0
    for file in answer["files"]:
        assert [row["published"] for row in file["rows"]] == [None] * 4
        assert [row["ours"] for row in file["rows"]] == [2 / d for d in (8, 16, 32, 64)]
    assert [file["file"] for file in answer["files"]] == ["apart.json", "together.json"]
    assert answer["left_out"]["broken.json"].startswith("its format is known, but it cannot be checked: KeyError")


def test_no_stages_beat_those_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut, number of replicas, degree and set of recomputing layers of small models, by the definition."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    piper = importlib.import_module("piper")
    monkeypatch.setattr(piper, "MEMORY_BYTES", 30.0)
    monkeypatch.setattr(piper, "MICRO_BATCHES", 4)
    monkeypatch.setattr(piper, "BANDWIDTH_BYTES_PER_S", 50.0)
    finite = again = 0
    for seed in range(25):
        model = piper.Model(_random_layers(random.Random(seed)))
        for devices in (2, 4):
            stages = piper.best_stages(model, devices)
            all_ways = _all_stages(piper, model, devices)
            least_s = min((piper.seconds(model, ways) for ways in all_ways), default=float("inf"))
            assert piper.seconds(model, stages) == pytest.approx(least_s)
            assert sum(stage.replicas * stage.degree for stage in stages) <= devices
            finite += least_s < float("inf")
            again += any(stage.again for stage in stages)
    assert 10 < again < finite < 50


def _random_layers(rng: random.Random) -> dict[str, Any]:
    def variant(again: bool, degree: int, size: int) -> dict[str, Any]:
        return {
            "timePerSample": (1.3 if again else 1.0) * rng.uniform(1, 2) / degree,
            "parameterSize": 5.0 * size,
            "memoryUsageA": (size if again else 9.0 * size) / degree,
            "memoryUsageB": 8.0 * size / degree,
            "syncTimeFw": {"0": 2.0 * (degree - 1)},
            "syncTimeBw": {},
        }

    sizes = [rng.randint(1, 3) for _ in range(3)]
    nodes = [
        {"id": i, "TMPCs": {str(t): [variant(again, t, size) for again in (False, True)] for t in (1, 2)}}
        for i, size in enumerate(sizes)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "communicationCost": rng.uniform(1, 20)} for i in range(2)]
    return {"nodes": nodes, "edges": edges}


def _all_stages(piper: Any, model: Any, devices: int) -> list[list[Any]]:
    n = len(model.order)

    def from_layer(i: int, left: int) -> list[list[Any]]:
        if i == n:
            return [[]]
        return [
            [piper.Stage(i, j, d, t, frozenset(again)), *rest]
            for j in range(i + 1, n + 1)
            for t in (1, 2)
            for d in (1, 2, 4)
            if d * t <= left
            for rest in from_layer(j, left - d * t)
            for count in range(j - i + 1)
            for again in itertools.combinations(model.order[i:j], count)
        ]

    return from_layer(0, devices)
