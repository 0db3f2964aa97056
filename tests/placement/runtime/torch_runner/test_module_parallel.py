"""Styles that cut modules which ``parallelize_module`` has no style for, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import styles_worker

CASES = [*styles_worker.cases(), *styles_worker.along_sequence()]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Differences of all cases, from one run."""
    path = tmp_path_factory.mktemp("styles") / "seen.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, styles_worker.__file__, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(Path(path).read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_parts_make_what_the_whole_module_makes(seen: dict[str, dict[str, float]], case: str) -> None:
    """Outputs, and gradients of inputs and weights; parts add up in another order, in float32."""
    assert seen[case]["outputs"] < 1e-5
    assert seen[case]["gradients"] < 1e-5
    assert seen[case]["part"] < 0.55  # of the weights, with biases that are whole


def test_layers_in_evaluation_read_no_weights_themselves(seen: dict[str, dict[str, float]]) -> None:
    assert seen["in_evaluation"]["outputs"] < 1e-5
