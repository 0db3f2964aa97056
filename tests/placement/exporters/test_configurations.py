"""Strategies as configurations of torchtitan, Megatron-LM, accelerate and DeepSpeed."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import exported_models
import pytest
import torch
from torch import nn

import placement
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from graphs.zoo.decoders import Decoder, DecoderConfig
from placement.cli import run
from placement.configurations.registry import read_configuration
from placement.results.result import Result
from tests.helpers.placed_models import cpus

CLUSTER = placement.Cluster.preset("4xV100-pcie")


@cache
def graph() -> OpGraph:
    return placement.capture(*exported_models.decoder()[:2], train=True)


@cache
def found(strategy: str) -> Result:
    return placement.optimize(graph(), CLUSTER, strategy=strategy, seed=0)


def test_zero_becomes_fsdp() -> None:
    document = placement.export(found("dp4 zero3 | recompute=layers.*"), "accelerate")
    assert document["distributed_type"] == "FSDP"
    assert document["num_processes"] == 4
    assert document["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert document["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert placement.export(found("dp4 zero2"), "accelerate")["fsdp_config"]["fsdp_reshard_after_forward"] is False


def test_fsdp_gathers_the_layers_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without `_no_split_modules` has no layer wrapped unless the file names its class."""
    model = exported_models.decoder()[0]
    (name,) = {type(layer).__name__ for layer in model.layers}
    result = found("dp4 zero3")
    document = placement.export(result, "accelerate", model=model)
    assert document["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == name
    with pytest.raises(MismatchError, match="the model has no module"):
        placement.export(result, "accelerate", model=nn.Linear(2, 2))
    result.save(tmp_path / "found.json")
    assert run(["export", str(tmp_path / "found.json"), "--to", "accelerate"]) == 0
    assert "with --model MODEL the file names the classes" in capsys.readouterr().err


def test_replicas_become_ddp() -> None:
    document = placement.export(found("dp4"), "accelerate")
    assert document["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in document


def test_cut_weights_and_stages_become_megatron() -> None:
    document = placement.export(found("dp2 zero1 | tp2 sp | mb2"), "accelerate")
    assert document["distributed_type"] == "MEGATRON_LM"
    assert document["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_pp_degree": 1,
        "megatron_lm_num_micro_batches": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_recompute_activations": False,
        "megatron_lm_use_distributed_optimizer": True,
    }
    assert placement.export(found("pp2 1f1b mb4"), "accelerate")["megatron_lm_config"]["megatron_lm_pp_degree"] == 2


@pytest.mark.parametrize("strategy", ["dp4", "dp4 zero3", "pp2 1f1b mb4"])
def test_accelerate_reads_the_file(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    saved = tmp_path / "found.json"
    found(strategy).save(saved)
    for name in ("config.yaml", "config.json"):  # JSON is YAML, too
        assert run(["export", str(saved), "--to", "accelerate", "-o", str(tmp_path / name)]) == 0
        read = load_config_from_file(str(tmp_path / name))
        assert read.num_processes == 4 if strategy.startswith("dp4") else 2
    assert "configuration with" in capsys.readouterr().out


@cache
def of_precision(name: str) -> OpGraph:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "mixed"):
                loss: torch.Tensor = self.layers(x).square().mean()
                return loss

    dtype = torch.bfloat16 if name == "low" else torch.float32
    return placement.capture(Layers().to(dtype), (torch.randn(8, 16, dtype=dtype),), train=True)


def test_weights_stay_in_the_format_that_was_planned() -> None:
    """Either tool turns weights into float32 where a configuration asks for mixed precision."""
    mixed, low = (placement.optimize(of_precision(n), CLUSTER, strategy="dp2 zero2") for n in ("mixed", "low"))
    assert placement.export(mixed, "accelerate")["mixed_precision"] == "bf16"
    assert placement.export(low, "accelerate")["mixed_precision"] == "no"
    assert placement.export(mixed, "deepspeed")["bf16"] == {"enabled": True}
    with pytest.raises(
        MismatchError, match="DeepSpeed keeps weights and optimizer state of bfloat16 models in float32"
    ):
        placement.export(low, "deepspeed")
    cut = placement.optimize(of_precision("low"), CLUSTER, strategy="tp2")
    with pytest.raises(MismatchError, match="Megatron-LM keeps"):
        placement.export(cut, "accelerate")


@cache
def on_hosts(strategy: str) -> Result:
    return placement.optimize(of_precision("mixed"), placement.Cluster.preset("2x8xH100-ib"), strategy=strategy, seed=0)


def test_processes_are_spread_over_the_hosts() -> None:
    document = placement.export(on_hosts("dp4 | devices=host0/gpu0+host0/gpu1+host1/gpu0+host1/gpu1"), "accelerate")
    assert (document["num_machines"], document["num_processes"]) == (2, 4)
    assert document["main_process_ip"] == "host0"
    assert placement.export(on_hosts("dp2"), "accelerate")["num_machines"] == 1
    text = placement.export(on_hosts("dp4 | devices=host0/gpu0+host1/gpu0+host1/gpu1+host0/gpu1"), "torch")
    assert "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 FILE" in text
    assert "CUDA_VISIBLE" not in text
    text = placement.export(on_hosts("dp2 | devices=host0/gpu3+host0/gpu1"), "torch")
    assert "CUDA_VISIBLE_DEVICES=3,1 torchrun --nproc-per-node 2 FILE" in text
    uneven = on_hosts("dp4 | devices=host0/gpu0+host0/gpu1+host0/gpu2+host1/gpu0")
    with pytest.raises(MismatchError, match=r"3 of host0, 1 of host1, .* start equally many on each host"):
        placement.export(uneven, "accelerate")
    text = placement.export(uneven, "torch")
    assert "on each host, of which HOST is the first; COUNT is 3, 1 by NUMBER:" in text
    assert "--nnodes 2 --node-rank NUMBER --nproc-per-node COUNT --master-addr HOST --master-port 29500 FILE" in text
    mixed = on_hosts("dp2 | tp2 | devices=host0/gpu0+host1/gpu0+host0/gpu1+host1/gpu1")
    with pytest.raises(MismatchError, match="number them host by host"):
        placement.export(mixed, "accelerate")


def test_a_device_map_is_of_one_host() -> None:
    placed = placement.optimize(of_precision("mixed"), placement.Cluster.preset("2x8xH100-ib"), "single_device")
    with pytest.raises(MismatchError, match="has 2 hosts"):
        placement.export(placed, "device_map")


def test_a_loss_over_the_whole_batch_has_no_configuration() -> None:
    model, args, _ = exported_models.contrastive()
    pairs = placement.capture(model, args, train=True)
    result = placement.optimize(pairs, CLUSTER, strategy="dp2", seed=0, target="any")
    for to in ("accelerate", "deepspeed"):
        with pytest.raises(MismatchError, match="reads samples of the whole batch"):
            placement.export(result, to)


def test_deepspeed_counts_samples_and_numbers() -> None:
    document = placement.export(found("dp2 zero2 | mb2 | bucket=4MB"), "deepspeed")
    assert document["train_batch_size"] == 8
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert document["gradient_accumulation_steps"] == 2
    assert document["zero_optimization"]["stage"] == 2
    assert document["zero_optimization"]["reduce_bucket_size"] == 1_000_000
    assert document["optimizer"]["type"] == "Adam"
    assert json.loads(json.dumps(document)) == document
    assert placement.export(found("dp2"), "deepspeed")["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(
    ("to", "strategy", "reason"),
    [
        ("accelerate", "dp4 zero1", "as zero2 does"),
        ("accelerate", "dp2 | mb2", r"Accelerator\(gradient_accumulation_steps=2\)"),
        ("accelerate", "dp2 zero3 | recompute=layers.1", "all layers that FSDP wraps"),
        ("accelerate", "pp2 gpipe mb2", "the order 1f1b alone"),
        ("accelerate", "dp2 zero2 | tp2", "as zero1 does"),
        ("accelerate", "cp2", "context parallelism"),
        ("accelerate", "dp2 | dp2 zero3", "in 2 groups of replicas"),
        ("deepspeed", "dp2 | dp2 zero3", "in 2 groups of replicas"),
        ("deepspeed", "tp2", "which the model itself must bring"),
        ("deepspeed", "dp2 | recompute=layers.*", "what it recomputes"),
        ("deepspeed", "dp3", "3 parts of the same size"),
    ],
)
def test_what_a_configuration_cannot_say_is_named(to: str, strategy: str, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        placement.export(found(strategy), to)


def test_accelerate_is_for_gpus() -> None:
    on_cpus = placement.optimize(graph(), cpus(2), strategy="dp2", seed=0)
    with pytest.raises(MismatchError, match=r"has no GPU, .*; --to torch writes a script"):
        placement.export(on_cpus, "accelerate")
    assert placement.export(on_cpus, "deepspeed")["zero_optimization"] == {"stage": 0}


def test_a_strategy_is_no_placement() -> None:
    with pytest.raises(MismatchError, match="export it as a device_map"):
        placement.export(placement.optimize(graph(), CLUSTER, "single_device", seed=0), "deepspeed")
    with pytest.raises(MismatchError, match="export to 'device_map' works with the ops of the model itself"):
        placement.export(found("dp2"), "device_map")
    with pytest.raises(MismatchError, match="graph is for scripts of PyTorch"):
        placement.export(found("dp2"), "accelerate", graph=graph())


def test_updates_on_hosts_become_deepspeed_s_and_nobody_else_s() -> None:
    cluster = placement.Cluster.preset("4xK40-pcie")

    def offloaded(strategy: str) -> Result:
        return placement.optimize(graph(), cluster, strategy=f"{strategy} | offload=optimizer", seed=0)

    document = placement.export(offloaded("dp4 zero2"), "deepspeed")
    assert document["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    for strategy, to, sentence in (
        ("dp4", "deepspeed", "it offloads what ZeRO splits; take zero1 or zero2"),
        ("dp4 zero2", "accelerate", "no setting for updates on hosts, which deepspeed has"),
        ("pp2 1f1b mb2", "accelerate", "no setting for updates on hosts, which deepspeed has"),
    ):
        with pytest.raises(MismatchError, match=sentence):
            placement.export(offloaded(strategy), to)
    hosted = placement.optimize(graph(), cluster, strategy="dp4 zero3 | offload=parameters", seed=0)
    zero = placement.export(hosted, "deepspeed")["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    assert placement.export(hosted, "accelerate")["fsdp_config"]["fsdp_offload_params"] is True
    whole = placement.optimize(graph(), cluster, strategy="dp4 | offload=parameters", seed=0)
    for to in ("deepspeed", "accelerate"):
        with pytest.raises(MismatchError, match=r"offloads what .*; take zero3"):
            placement.export(whole, to)
    text = placement.export(offloaded("dp4 zero2"), "torch", model=exported_models.decoder()[0])
    assert 'local(tensor).to("cpu", copy=is_copied)' in text


def test_torchtitan_has_degrees_and_batch() -> None:
    text = placement.export(found("dp2 zero3 | tp2 sp | recompute=layers.*"), "torchtitan")
    document = tomllib.loads(text)
    assert document["parallelism"]["data_parallel_shard_degree"] == 2
    assert document["parallelism"]["tensor_parallel_degree"] == 2
    assert document["training"]["local_batch_size"] == 4
    assert document["activation_checkpoint"] == {"mode": "full"}
    hybrid = tomllib.loads(placement.export(found("dp2 | dp2 zero2"), "torchtitan"))["parallelism"]
    assert (hybrid["data_parallel_replicate_degree"], hybrid["fsdp_reshard_after_forward"]) == (2, "never")
    stages = tomllib.loads(placement.export(found("dp2 zero3 | pp2 1f1b mb4"), "torchtitan"))
    assert stages["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert stages["training"]["local_batch_size"] == 4
    accumulated = tomllib.loads(placement.export(found("dp2 zero3 | mb2"), "torchtitan"))["training"]
    assert (accumulated["local_batch_size"], accumulated["global_batch_size"]) == (2, 8)


def test_megatron_has_a_command() -> None:
    text = placement.export(found("dp2 zero1 | tp2 sp | mb2"), "megatron")
    assert text.startswith(
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc-per-node 4 --nnodes 1 pretrain_gpt.py \\\n"
    )
    flags = ("--tensor-model-parallel-size 2", "--sequence-parallel", "--use-distributed-optimizer")
    for flag in (*flags, "--overlap-grad-reduce", "--micro-batch-size 2", "--global-batch-size 8"):
        assert f" {flag} \\\n" in f"{text.rstrip()} \\\n"
    block = placement.export(found("dp2 | recompute=layers.0"), "megatron")
    assert "--recompute-granularity full" in block


def test_megatron_gets_the_flags_that_it_asserts_beside_sharded_replicas() -> None:
    """As of `validate_args` in megatron/training/arguments.py, commit 000c4ac2."""
    mixed = placement.optimize(of_precision("mixed"), CLUSTER, strategy="dp2 zero3", seed=0)
    fsdp2, own = placement.export(mixed, "megatron"), placement.export(found("dp2 zero3"), "megatron")
    for text in (fsdp2, own):
        assert text.startswith("unset CUDA_DEVICE_MAX_CONNECTIONS\ntorchrun ")
        assert "--no-gradient-accumulation-fusion" in text
        assert read_configuration(text).zero == 3
    assert "--use-torch-fsdp2" in fsdp2
    assert "--untie-embeddings-and-output-weights" in fsdp2
    assert "--use-distributed-optimizer" not in fsdp2
    assert "--ckpt-format fsdp_dtensor" in own
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in placement.export(found("dp2"), "megatron")


@pytest.mark.parametrize(
    ("to", "strategy", "reason"),
    [
        ("torchtitan", "dp4 zero1", "as zero2 does"),
        ("torchtitan", "tp2", "as tp sp does"),
        ("torchtitan", "dp2 zero3 | recompute=layers.0", "every so many of them"),
        ("megatron", "dp2 | dp2 zero3", "in 2 groups of replicas"),
        ("megatron", "pp2 gpipe mb2", "no schedule for gpipe"),
        ("megatron", "dp3", "3 parts of the same size"),
    ],
)
def test_what_a_tool_cannot_say_is_named(to: str, strategy: str, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        placement.export(found(strategy), to)


@cache
def of_masters() -> OpGraph:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(8, 64, 2, 32, 4, 4, 64, 128, dtype=torch.float32))
    words = torch.zeros((8, 64), dtype=torch.int64, device="meta")
    return placement.capture(model, (words,), train=True, precision="master")


def test_master_copies_are_what_megatron_and_deepspeed_keep() -> None:
    def written(strategy: str, to: str) -> Any:
        return placement.export(placement.optimize(of_masters(), CLUSTER, strategy=strategy, seed=0), to)

    assert " --bf16 " in written("dp2 zero1", "megatron")
    assert written("dp2 zero1", "deepspeed")["bf16"] == {"enabled": True}
    assert written("tp2", "accelerate")["mixed_precision"] == "bf16"
