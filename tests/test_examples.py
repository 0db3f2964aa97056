"""The examples run, and say what their comments promise."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path | None = None) -> str:
    # One thread: a network this small is slower on several.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(name: str, folder: Path) -> str:
    """The output of an example on two nodes: two agents on this host, with one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--master-addr=127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*command, f"--master-port={port}", f"--node-rank={rank}", str(EXAMPLES / name)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return "".join(output for output, _ in outputs)


def test_every_example_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'("{path.name}"' not in source] == []


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


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    """Of the transformer of the example, trained in this process."""
    torch.manual_seed(0)
    model = nn.Transformer(64, 4, 2, 2, 256, batch_first=True)
    source, target = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
    adam = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(10):
        adam.zero_grad()
        loss = nn.functional.mse_loss(model(source, target), target)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("nodes", [1, 2])
def test_train_two_processes_loses_as_one_process_does(
    nodes: int, tmp_path: Path, expected_losses: list[float]
) -> None:
    start = run if nodes == 1 else torchrun  # as a plain script it starts both of them itself
    output = start("train_two_processes.py", tmp_path)
    for rank in range(2):
        losses = re.findall(rf"rank {rank}, step \d+: loss ([\d.]+)", output)
        assert [float(loss) for loss in losses] == pytest.approx(expected_losses, abs=2e-4)
    saved = safetensors.torch.load_file(tmp_path / "transformer.safetensors")
    nn.Transformer(64, 4, 2, 2, 256, batch_first=True).load_state_dict(saved)


def test_placing_and_training_takes_15_lines() -> None:
    source = (EXAMPLES / "train_two_processes.py").read_text(encoding="utf-8")
    lines = source.partition("sys.exit()\n")[2].splitlines()
    assert 0 < sum(1 for line in lines if line.strip()) <= 15
