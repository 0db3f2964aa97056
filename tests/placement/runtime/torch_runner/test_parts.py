"""Parts of sequences and of experts, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parts_worker
import pytest


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Differences of all cases, from one run."""
    path = tmp_path_factory.mktemp("parts") / "seen.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, parts_worker.__file__, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(Path(path).read_text())
    return found


@pytest.mark.parametrize("case", parts_worker.CASES)
def test_losses_and_gradients_are_those_of_the_model_in_one_piece(seen: dict[str, dict[str, float]], case: str) -> None:
    """In float32, in which parts add up in another order."""
    assert seen[case]["loss"] < 1e-5
    assert seen[case]["gradients"] < 1e-5
