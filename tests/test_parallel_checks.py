"""The checks of published figures, on files of our own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

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


def checked(folder: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "benchmarks/parallel_checks.py", "--workloads", str(folder), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_bubble_rates_by_the_papers_formulas(tmp_path: Path) -> None:
    (tmp_path / "any name.json").write_text(json.dumps([SETTING]), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("nothing to check", encoding="utf-8")
    code, answer = checked(tmp_path)
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


def test_a_figure_that_differs_is_told_and_ends_with_1(tmp_path: Path) -> None:
    wrong = {**SETTING, "bubble_rate": {"1F1B": 0.25}}
    (tmp_path / "wrong.json").write_text(json.dumps([wrong]), encoding="utf-8")
    code, answer = checked(tmp_path)
    assert code == 1
    assert answer["files"][0]["summary"]["holds"] is False
    assert answer["files"][0]["summary"]["value"] == pytest.approx(9 / 33 - 0.25)
