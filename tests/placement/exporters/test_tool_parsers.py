"""Answers for a tool, read by the tool's own parser; a test is skipped where the tool is not installed.

torchtitan and DeepSpeed are no requirements: ``pip install --no-deps --target DIR torchtitan==0.2.2 tyro
docstring_parser typeguard hjson py-cpuinfo msgpack einops deepspeed``, and PYTHONPATH=DIR, let them run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from zoo_models import decoder_step

import placement
from graphs.entry_points import imported
from placement.configurations.documents import write_yaml
from placement.exporters.registry import EXPORTERS
from placement.solving.methods import STRATEGY
from placement.solving.strategy_row import without_answer

CLUSTER = placement.Cluster.preset("8xH100-nvswitch+host")


def exported(strategy: str, target: str, precision: str) -> Any:
    """In the target's words, without a simulation of it."""
    draft = without_answer(decoder_step(precision), CLUSTER, 0, STRATEGY, "not carried out")
    draft = dataclasses.replace(draft, strategy=placement.Strategy.parse(strategy))
    return imported(EXPORTERS[target].function)(draft)


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("dp8 zero3", (1, 8, 1, 1, 1)),
        ("dp8", (8, 1, 1, 1, 1)),
        ("dp2 | dp4 zero2 | recompute=layers.*", (2, 4, 1, 1, 1)),
        ("dp2 zero3 | tp2 sp", (1, 2, 2, 1, 1)),
        ("dp2 zero3 | cp2 ring", (1, 2, 1, 2, 1)),
        ("dp2 zero2 | pp2 1f1b mb2", (1, 2, 1, 1, 2)),
        ("dp2 zero2 | pp2 zbv mb4", (1, 2, 1, 1, 2)),
        ("dp4 zero3 | mb2 | offload=parameters", (1, 4, 1, 1, 1)),
    ],
)
def test_torchtitan_reads_its_configuration(
    strategy: str, degrees: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("torchtitan is not installed")
    package = ModuleType("torchtitan")  # without its kernels of Triton
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    config = pytest.importorskip("torchtitan.config", reason="a version with TOML")
    path = tmp_path / "train.toml"
    path.write_text(exported(strategy, "torchtitan", "mixed"))
    read = config.ConfigManager().parse_args(["--job.config_file", str(path)])
    names = (
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"),
        *("context_parallel_degree", "pipeline_parallel_degree"),
    )
    assert tuple(getattr(read.parallelism, name) for name in names) == degrees
    assert read.training.global_batch_size == 8
    assert read.training.seq_len == 64
    assert read.activation_checkpoint.mode == ("full" if "recompute" in strategy else "none")


@pytest.mark.parametrize("strategy", ["dp8", "dp8 zero1", "dp4 zero2 | mb2", "dp8 zero3 | offload=parameters"])
def test_deepspeed_reads_its_configuration(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    parsed = placement.Strategy.parse(strategy)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: parsed.devices)
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    document = exported(strategy, "deepspeed", "master-bf16-reduce")
    read = config.DeepSpeedConfig(document)
    assert (read.zero_optimization_stage, read.train_batch_size) == (parsed.zero, 8)
    assert read.gradient_accumulation_steps == parsed.micro_batches
    assert (read.zero_config.offload_param is not None) == parsed.offloads_parameters


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("dp8", "mixed"),
        ("dp8 zero3", "mixed-bf16-reduce"),
        ("dp8 zero2 | recompute=layers.*", "mixed-bf16-reduce"),
        ("dp4 | tp2", "master"),
    ],
)
def test_accelerate_launches_with_its_configuration(
    strategy: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(exported(strategy, "accelerate", precision)))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == 8
    assert arguments.mixed_precision == "bf16"
    environment = prepare_multi_gpu_env(arguments)
    if "zero" not in strategy:
        assert bool(arguments.use_megatron_lm) == ("tp" in strategy)
        return
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is ("zero3" in strategy)
    assert plugin.activation_checkpointing is ("recompute" in strategy)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
