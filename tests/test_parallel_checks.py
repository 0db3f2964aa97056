"""The checks of published figures, on files of our own."""

from __future__ import annotations

import importlib
import json
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
    assert answer["left_out"] == {"notes.txt": "no check knows its format"}
    assert code == 0


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
