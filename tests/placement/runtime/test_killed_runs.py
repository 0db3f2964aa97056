"""A job under torchrun, a process of which is killed: it ends with the reason, and goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import killed_run
import pytest
import torch
from killed_run import N_STEPS, PHASES
from safetensors.torch import load_file

import placement
from env.cluster import Cluster
from env.device import Device, Link

PROMISED_S = 10.0


def start(folder: Path, kill: str = "") -> subprocess.CompletedProcess[str]:
    """Run the job to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, killed_run.__file__, str(folder), *([kill] if kill else [])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def prepared(folder: Path, strategy: str) -> Path:
    """A folder with the result of a strategy for the job."""
    devices = tuple(Device(f"cpu{i}", "cpu", 2**34, {"float32": 1e10}, 1e10, 5e-6) for i in range(2))
    links = tuple(Link(f"cpu{i}", f"cpu{1 - i}", 1e9, 1e-5) for i in range(2))
    graph = placement.capture(killed_run.Net(), killed_run.batch(0), train=True)
    folder.mkdir()
    placement.optimize(graph, Cluster("two", devices, links), strategy=strategy).save(folder / "result.json")
    return folder


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("dp2", 3),
        pytest.param("dp2", 20, marks=pytest.mark.slow),
        pytest.param("dp2 zero3", 6, marks=pytest.mark.slow),
    ],
)
def test_a_killed_job_ends_with_the_reason_and_goes_on_bit_by_bit(tmp_path: Path, strategy: str, kills: int) -> None:
    whole = prepared(tmp_path / "whole", strategy)
    done = start(whole)
    assert done.returncode == 0, done.stderr
    expected = load_file(whole / "model.safetensors")
    draws = random.Random(kills)
    for first in range(0, kills, N_STEPS):  # a killed run may have got a step further
        folder = prepared(tmp_path / f"killed {first}", strategy)
        for number in range(first, min(kills, first + N_STEPS)):
            phase, rank, seconds = PHASES[number % len(PHASES)], draws.randrange(2), draws.choice((0.0, 0.002, 0.01))
            _check_end(folder, f"{phase},{rank},{seconds}")
        done = start(folder)
        assert done.returncode == 0, done.stderr
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _check_end(folder: Path, kill: str) -> None:
    killed = start(folder, kill)
    ended_s, marker = time.time(), folder / "killed"
    assert ended_s - marker.stat().st_mtime < PROMISED_S, kill
    marker.unlink()
    assert killed.returncode == 1, (kill, killed.stderr)
    assert "Signal 9 (SIGKILL) received" in killed.stderr, (kill, killed.stderr)
