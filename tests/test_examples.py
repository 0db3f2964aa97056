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
from torch.utils.data import BatchSampler, RandomSampler

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path | None = None, *arguments: str) -> str:
    # One thread: a network this small is slower on several.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
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


def test_every_example_is_tested_here_and_named_in_the_table() -> None:
    source, table = Path(__file__).read_text(encoding="utf-8"), (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert [name for name in names if f'("{name}"' not in source and name != "classifier.py"] == []  # a model of others
    assert [name for name in names if f"]({name})" not in table] == []


def test_my_model_on_my_cluster_finds_a_speed_up() -> None:
    output = run("my_model_on_my_cluster.py")
    assert float(re.findall(r"([\d.]+)x one device", output)[0]) > 1.5
    assert output.splitlines()[-1] == "verified: True"


def test_why_this_strategy_tells_reasons_and_the_effect_of_a_port() -> None:
    slow, fast = run("why_this_strategy.py").strip().split("\n\n")
    assert "dp32                strategy 'dp32' needs 32 devices" in slow
    times = [float(re.findall(r"dp4 +([\d.]+) ms", text)[0]) for text in (slow, fast)]
    assert times[1] < 0.7 * times[0]
    assert re.search(r"spent: [\d.]+ .?s computing", slow)
    assert re.search(r"why: dp4 zero3 takes .* more: .*over ethernet", slow)


def test_an_exported_script_trains_on_two_processes() -> None:
    output = run("export_it.py")
    assert len(re.findall(r"step \d: loss [\d.]+", output)) == 3
    assert "cannot be written as plain PyTorch" in output.splitlines()[-1]


def test_a_learned_policy_beats_one_device_on_another_graph() -> None:
    times = dict(re.findall(r"^(\w+) +([\d.]+) ms", run("learn_a_policy.py"), re.MULTILINE))
    assert float(times["policy"]) < float(times["single_device"])


def test_the_heuristic_that_was_added_stands_between_one_device_and_the_bound() -> None:
    output = run("add_a_heuristic.py")
    times = {name: float(ms) for name, ms in re.findall(r"^(\w+) +([\d.]+) ms", output, re.MULTILINE)}
    bound = float(re.findall(r"lower bound ([\d.]+) ms", output)[0])
    assert bound <= times["least_loaded"] < times["single_device"]


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


def test_device_map_is_loaded_by_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    output = run("device_map.py")
    assert "'lm_head': " in output
    assert output.splitlines()[-1] == "loaded in 2 places, same outputs: True"


def test_the_models_to_fit_can_be_learned() -> None:
    found = re.findall(r"loss ([\d.]+), after 60 updates ([\d.]+)", run("fit_models.py"))
    assert len(found) == 2
    assert all(float(last) < 0.75 * float(first) for first, last in found)


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    """Of the transformer of the example, trained in this process."""
    torch.manual_seed(0)
    model = nn.Transformer(64, 4, 2, 2, 256, batch_first=True, dropout=0.0)
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
def test_run_it_loses_as_one_process_does(nodes: int, tmp_path: Path, expected_losses: list[float]) -> None:
    start = run if nodes == 1 else torchrun  # as a plain script it starts both of them itself
    output = start("run_it.py", tmp_path)
    for rank in range(2):
        losses = re.findall(rf"rank {rank} of '.*', step \d+: loss ([\d.]+)", output)
        assert [float(loss) for loss in losses] == pytest.approx(expected_losses, abs=2e-4)
    saved = safetensors.torch.load_file(tmp_path / "translator.safetensors")
    whole = nn.ModuleDict({"transformer": nn.Transformer(64, 4, 2, 2, 256, batch_first=True)})
    whole.load_state_dict(saved)


def test_placing_and_training_takes_15_lines() -> None:
    lines = (EXAMPLES / "run_it.py").read_text(encoding="utf-8").partition("torch.manual_seed(0)")[2].splitlines()
    assert 0 < sum(1 for line in lines if line.strip()) <= 15


def llama_losses() -> list[float]:
    """What the example's model loses at the end of each of four epochs, trained in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes))
    text = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8)
    lines = text.long().unfold(0, 32, 32)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100)
    losses = []
    for epoch in range(4):
        draw = RandomSampler(lines, generator=torch.Generator().manual_seed(epoch))  # type: ignore[arg-type]
        for numbers in BatchSampler(draw, 16, drop_last=True):
            loss = model(input_ids=lines[numbers], labels=lines[numbers]).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_train_llama_goes_on_with_other_processes_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = llama_losses()
    for cluster, n_ranks, epochs in (("two_cores.toml", 2, (0, 1)), ("four_cores.toml", 4, (2, 3))):
        output = run("train_llama.py", tmp_path, cluster)
        for rank in range(n_ranks):
            found = re.findall(rf"rank {rank}, epoch (\d+): loss ([\d.]+)", output)
            assert [int(epoch) for epoch, _ in found] == list(epochs)
            assert [float(loss) for _, loss in found] == pytest.approx([expected[e] for e in epochs], abs=1e-3)


def test_training_under_a_strategy_takes_40_lines() -> None:
    lines = (EXAMPLES / "train_llama.py").read_text(encoding="utf-8").partition('"""\n\nimport')[2].splitlines()
    assert 0 < sum(1 for line in lines if line.strip()) <= 40


def test_three_methods_are_compared_in_20_lines() -> None:
    output = run("compare_training_methods.py")
    assert " reaches loss 0.6 first, in " in output
    assert len(re.findall(r"loss 0\.[0-5]\d+, [\d.]+ ms", output)) == 3
    source = (EXAMPLES / "compare_training_methods.py").read_text(encoding="utf-8")
    lines = source.partition("torch.manual_seed(0)")[2].splitlines()  # all but one's own model
    assert sum(1 for line in lines if line.strip()) <= 20


def test_downpour_runs_on_two_processes() -> None:
    output = run("downpour_two_processes.py", EXAMPLES)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) > 10
    assert losses[-1] < 0.5 * losses[0]
