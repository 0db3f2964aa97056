"""The examples run, and say what their comments promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    # One thread: a network this small is slower on several.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}")' not in source] == []


def test_train_with_sb3_learns() -> None:
    found = re.findall(r"(\d+) placements: mean ([\d.]+) of one device, best ([\d.]+)", run("train_with_sb3.py"))
    means = [float(mean) for _, mean, _ in found]
    assert len(means) == 4
    assert means[-1] < 0.8 * means[0]


def test_training_takes_20_lines() -> None:
    lines = (EXAMPLES / "train_with_sb3.py").read_text(encoding="utf-8").partition('"""\n\nfrom')[2].splitlines()
    assert sum(1 for line in lines if line.strip()) <= 20


def test_custom_reward_finds_a_speed_up() -> None:
    assert float(run("custom_reward.py").split()[-1]) > 0.0


def test_own_graph_is_improved_by_the_move() -> None:
    output = run("own_graph.py")
    assert "units of placement: 4" in output
    assert output.count("ops placed") == 2
    assert float(re.findall(r"improved by ([-\d.]+)", output)[0]) == pytest.approx(0.3, abs=0.2)


def test_device_map_is_loaded_by_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    output = run("device_map.py")
    assert "'lm_head': " in output
    assert output.splitlines()[-1] == "loaded in 2 places, same outputs: True"
