"""`benchmarks/parallel_checks.py` on tables of measured all-reduces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

from env.communication.formulas import Interconnect, collective_s

A100_ADDING = 3 / 2039e9  # s per byte, of the preset's GPU


def checked(folder: Path) -> tuple[int, dict[str, Any]]:
    script = str(ROOT / "benchmarks" / "parallel_checks.py")
    words = [sys.executable, script, "--workloads", str(folder), "--json", "--files-only"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    return found.returncode, json.loads(found.stdout)


def table(path: Path, rows: list[tuple[int, int, float]]) -> None:
    path.write_text("gpus,bytes,seconds\n" + "".join(f"{p},{n},{s!r}\n" for p, n, s in rows), encoding="utf-8")


def test_a_ring_is_fitted_exactly_and_what_is_no_table_left_out(tmp_path: Path) -> None:
    port = Interconnect(5e-6, 1 / 123e9, A100_ADDING)
    sizes = [720720 * 2**k for k in range(0, 12, 3)]
    table(
        tmp_path / "ring.csv",
        [(p, n, collective_s("all_reduce", "ring", n, p, port)) for p in (2, 5, 12) for n in sizes],
    )
    # Ten times slower than any ring: a latency and a bandwidth fit, their formula does not.
    table(tmp_path / "odd.csv", [(2, 2**20, 1e-3), (2, 2**21, 1e-5), (2, 2**22, 1e-3), (2, 2**23, 1e-5)])
    table(tmp_path / "negative.csv", [(2, 2**20, -1.0)])
    (tmp_path / "other.csv").write_text("gpus,seconds\n2,1\n", encoding="utf-8")
    code, document = checked(tmp_path)
    assert code == 1  # odd.csv does not hold
    assert set(document["left_out"]) == {"negative.csv", "other.csv"}
    found = {entry["file"]: entry for entry in document["files"]}
    ring = found["ring.csv"]
    assert [row["ours"] for row in ring["rows"]] == pytest.approx([row["published"] for row in ring["rows"]], rel=1e-6)
    assert ring["summary"]["holds"]
    assert "latency 5 us, 123 GB/s" in ring["note"]
    assert not found["odd.csv"]["summary"]["holds"]
