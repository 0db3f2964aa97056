"""`placement.apply` of strategies in processes of torchrun, beside the plain model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import exported_models
import pytest
import torch

import placement
from baselines.strategies.allowed import check_allowed
from graphs.opgraph import OpGraph
from placement.solving.strategy_row import strategy_row

CLUSTER = placement.Cluster.preset("4xV100-pcie")
WORKER = Path(__file__).parents[3] / "workers" / "applied_work.py"
STEPS = {
    "dp2": ("decoder", "dp2"),
    "dp2_mb2": ("convnet", "dp2 | mb2"),
    "zero1": ("padded", "dp2 zero1"),
    "zero2_offload": ("decoder", "dp2 zero2 | offload=optimizer"),
    "zero3_mb2": ("decoder", "dp2 zero3 | mb2 | recompute=layers.*"),
    "shares": ("classified", "dp2 shares=5:3 zero3"),
    "towers": ("towers", "dp2"),
    "tp2_tied": ("tied_decoder", "tp2"),
    "tp2_sp": ("llama", "tp2 sp"),
    "pp2_tied": ("tied_decoder", "pp2 1f1b mb2"),
    "pp2_interleaved": ("decoder", "pp2 interleaved mb4"),
    "pp2_padded": ("padded", "pp2 gpipe mb2"),
}


@cache
def graph_of(model: str) -> OpGraph:
    torch.manual_seed(0)
    made, args, *rest = getattr(exported_models, model)()
    return placement.capture(made, args, *rest, train=True, name=model)


def prepared(folder: Path, name: str, model: str, strategy: str) -> None:
    """A result for one case."""
    cluster = placement.Cluster.preset("4xH100-nvswitch+host") if "offload" in strategy else CLUSTER
    found = placement.Strategy.parse(strategy)
    check_allowed(graph_of(model), cluster, found)
    strategy_row(graph_of(model), cluster, found, 0).result.save(folder / f"{name}.json")
    (folder / f"{name}.txt").write_text(model)


def torchrun(folder: Path, work: str, *names: str, processes: int = 2) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw of each case."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    root = str(Path(placement.__file__).parents[1])
    paths = os.pathsep.join([root, str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, str(WORKER), str(folder), work, *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: [json.loads((folder / f"{name}-{rank}.out").read_text()) for rank in range(processes)] for name in names
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What three steps of each case gave."""
    folder = tmp_path_factory.mktemp("steps")
    for name, case in STEPS.items():
        prepared(folder, name, *case)
    return torchrun(folder, "steps", *STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_plain_model(name: str, steps: dict[str, list[dict[str, Any]]]) -> None:
    """Parts add up in another order, in float32: 2e-5 of the largest entry of each tensor."""
    first, second = steps[name]
    for key in ("losses", "norm", "outputs"):
        assert max(first[key], second[key]) < 2e-5, key
    for key in ("gradients", "weights", "added"):
        assert first[key] < 2e-5, key


def test_own_samples_give_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    prepared(tmp_path, "uneven", "classified", "dp2 shares=5:3")
    found = torchrun(tmp_path, "samples", "uneven")["uneven"]
    assert [one["sizes"] for one in found] == [[5, 5], [3, 3]]
    for one in found:
        assert one["own"] < 1e-6
        assert "expected 8, the batch that the strategy divides, or" in one["refused"]


@pytest.mark.parametrize("strategy", ["dp2 zero3", "tp2", "pp2 gpipe mb2"])
def test_a_model_on_meta_gets_its_values_from_a_file(strategy: str, tmp_path: Path) -> None:
    prepared(tmp_path, "case", "decoder", strategy)
    for one in torchrun(tmp_path, "files", "case")["case"]:
        assert "was on meta and has no values yet" in one["unfilled"]
        assert one["loaded"] < 1e-6
        assert one["whole"] == 0
    assert one.get("state", 0.0) == 0


def test_a_run_goes_on_under_the_same_strategy_and_another(tmp_path: Path) -> None:
    """To the last bit under the same one; under others parts add up in another order."""
    for name, strategy in {"first": "dp2 zero3", "same": "dp2 zero3", "cut": "tp2", "staged": "pp2 1f1b mb2"}.items():
        prepared(tmp_path, name, "decoder", strategy)
    found = torchrun(tmp_path, "runs", "first", "same", "cut", "staged")
    assert found["first"][0]["facts"] is None
    assert found["same"][0]["is_equal"]
    for name in ("same", "cut", "staged"):
        assert [one["facts"] for one in found[name]] == [{"step": 2}] * 2
        assert found[name][0]["weights"] < 1e-4
