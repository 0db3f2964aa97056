"""Configurations that cannot be read, or that model or cluster contradict: one sentence with the line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import placement
from env.cluster import Cluster
from graphs.errors import ConfigurationError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.zoo.decoders import Decoder, DecoderConfig
from placement.configurations.registry import read_configuration, tool_of
from placement.configurations.strategies import batch_of, notes_on, settled, strategy_of

P, T, A = "[parallelism]\n", "[training]\n", "[activation_checkpoint]\n"
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"


@pytest.mark.parametrize(
    ("tool", "text", "sentence"),
    [
        ("torchtitan", f"{P}tensor_paralel_degree = 2", "line 2: .*did you mean 'parallelism.tensor_parallel_degree'"),
        ("torchtitan", f"{P}tensor_parallel_degree = 'two'", "line 2: .* expected a whole number"),
        ("torchtitan", f"{P}tensor_parallel_degree = 0", "line 2: .* expected 1 or more"),
        ("torchtitan", f"{P}tensor_parallel_degree =", "is not TOML"),
        ("torchtitan", f"{P}\npipeline_parallel_schedule = 'LoopedBFS'", "line 3: .* expected '?1F1B"),
        ("torchtitan", f"{P}data_parallel_shard_degree = 0", "line 2: .* expected -1, or 1 or more"),
        ("torchtitan", "[comm]\nmode = 'fake_backend'", "line 2: .* is not predicted: that mode trains nothing"),
        ("torchtitan", f"{A}mode = 'memory_budget'", "line 2: .* expected '?selective'?, '?full'? or '?none"),
        ("torchtitan", f"{A}selective_ac_option = 'mm'", "line 2: .* expected 'op', or a number"),
        ("torchtitan", "[model]\nconverters = ['float8']", "line 2: .* casts of float8"),
        (
            "torchtitan",
            f"{P}pipeline_parallel_degree=2\npipeline_parallel_microbatch_size=3",
            "line 3: .* 8 has no whole",
        ),
        (
            "torchtitan",
            "def llama3() -> Trainer.Config:\n  return x",
            "Python of torchtitan after its pull request 2386",
        ),
        ("megatron", "--hiden-size 4", "line 1: .* did you mean '--hidden-size'"),
        (
            "megatron",
            "--num-layers 2\n--hidden-size $WIDTH",
            "line 2: --hidden-size is \\$WIDTH, which the script does not",
        ),
        ("megatron", "--num-layers many", "line 1: .* expected a number"),
        ("megatron", "--bf16\n--fp16", "line 2: --bf16 and --fp16 are both given"),
        ("megatron", "--micro-batch-size 2\n--micro-batch-size 4", "line 2: .* is 4, and on line 1 it is 2"),
        (
            "megatron",
            "A=(--bf16)\nif [ $X ]; then\n A+=(--num-layers 2)\nfi\npython x.py ${A[@]}",
            "line 3: .* in a branch",
        ),
        (
            "megatron",
            "TP=2\nif [ $BIG ]; then\n TP=4\nfi\ntorchrun x.py --tensor-model-parallel-size $((TP * 1))",
            "line 5: --tensor-model-parallel-size has a value that is set on line 3 in a branch",
        ),
        (
            "megatron",
            "TP=2\n[ $BIG ] && TP=4\ntorchrun x.py --bf16 --tensor-model-parallel-size $TP",
            "set on line 2 in a branch",
        ),
        ("megatron", "--qx 1\n--bf16\n--fnord", "line 1: .*'--qx'. Unknown, too: '--fnord' on line 3"),
        ("megatron", "--recompute-granularity full", "line 1: .* needs --recompute-method"),
        (
            "megatron",
            "--recompute-granularity full --recompute-method uniform\n--recompute-num-layers 4",
            "line 2: .*expected 1",
        ),
        ("megatron", "--num-virtual-stages-per-pipeline-rank 2", "line 1: virtual stages need a pipeline"),
        ("megatron", "--fp8-param-gather", "line 1: .* products alone are in 8 bit"),
        ("deepspeed", '{"zero_optimization": {\n"stage": 4}}', "line 2: .* expected 0, 1, 2 or 3"),
        ("deepspeed", '{"zero_optimization": {\n"stag": 1}}', "line 2: .* did you mean 'zero_optimization.stage'"),
        (
            "deepspeed",
            '{"fp16": {"enabled": true},\n "bf16": {"enabled": true}}',
            "line 1: fp16 and bf16 are both enabled",
        ),
        (
            "deepspeed",
            '{"zero_optimization": {"stage": 3,\n"offload_param": {"device": "cpu"}}}',
            "line 2: .* with stage 3 and",
        ),
        (
            "deepspeed",
            '{"zero_optimization":\n{"offload_optimizer": {"device": "cpu"}}}',
            "line 2: .* needs stage 1, 2 or 3",
        ),
        ("deepspeed", '{"train_batch_size": true}', "line 1: .* expected a whole number"),
        ("deepspeed", '{"train_batch_size": 3,}', "is not JSON"),
        ("deepspeed", "[1]", "is list in JSON; expected an object"),
        ("deepspeed", '{"sparse_attention": {"mode": "fixed"}}', "line 1: .* another model; leave it out"),
        ("accelerate", "num_processes: 8\nmixed_precision: bf16", "has distributed_type"),
        ("accelerate", "distributed_type: TPU", "line 1: .* expected "),
        ("accelerate", "distributed_type: FSDP\nnum_processes: 8", "line 1: .*auto_wrap_policy is not given"),
        ("accelerate", f"{FSDP}  fsdp_activation_checkpointing_offload: true", "line 5: .* on hosts"),
        ("accelerate", f"{FSDP}parallelism_config:\n  parallelism_config_tp_size: 2", "needs fsdp_version 2"),
        ("accelerate", "distributed_type: MULTI_GPU\nmixed_precision: fp8", "line 2: .* expected 'no'"),
        ("accelerate", "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2", "line 3: .* is for FSDP"),
        ("accelerate", "distributed_type: [", "line 1: the configuration is not YAML"),
        ("accelerate", "- 1", "is list in YAML; expected keys"),
        ("accelerate", f"{FSDP}a: &a [1]\nb: *a", r"line 6: \*a stands for other values; write these out"),
        ("accelerate", f"{FSDP}a: &a {{x: 1}}\nb: {{<<: [*a, *a]}}", "line 6: a merge key << stands for other values"),
        ("accelerate", "num_processes: 010", "line 1: YAML reads '010' as another number"),
        ("accelerate", "num_processes: 1:30", "line 1: YAML reads '1:30' as another number"),
        ("accelerate", f"{FSDP}num_processes: 4", "line 5: 'num_processes' stands twice"),
        ("accelerate", "distributed_type: MEGATRON_LM\nmegatron_lm_config: megat", "line 2: .* has keys of its own"),
        ("accelerate", f"{FSDP}x: {'[' * 5000}", "nests deeper than 200 brackets"),
        ("accelerate", f"x: {'a' * 300_000}", "more than 262,144 characters"),
        ("deepspeed", '{"train_batch_size": NaN}', "NaN is no number of JSON"),
        ("deepspeed", '{"train_batch_size": 8, "train_batch_size": 4}', "'train_batch_size' stands twice"),
        ("deepspeed", f'{{"train_batch_size": {"9" * 400}}}', "is no number below 1e\\+15"),
        ("deepspeed", f'{{"a": {"[" * 5000}', "nests deeper than 200 brackets"),
        ("torchtitan", f"{P}{'a.' * 4000}a = 1", "a key has more than 200 parts"),
        ("torchtitan", f"{P}steps = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("megatron", "--untie-#x", "line 1: unknown key of Megatron-LM '--untie-#x'"),
        ("megatron", "--num-layers 1e999", "line 1: --num-layers is '1e999'; expected a number"),
        (
            "megatron",
            "".join(f'A{k}="$A{k + 1}$A{k + 1}"\n' for k in range(25)) + "A25=1\ntorchrun x.py --seed $A0",
            "variables of the script stand for more than",
        ),
    ],
)
def test_one_sentence_with_the_line(tool: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(text, tool)
    assert re.search(sentence.replace("expected 'no'", "expected '?no'?"), str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


def test_fields_of_deepspeed_have_two_names() -> None:
    fields = {"prefetch_bucket_size": 7, "max_live_parameters": 3, "gather_16bit_weights_on_model_save": True}
    long, short = (
        read_configuration(json.dumps({"zero_optimization": {"stage": 3, **{f"{p}{k}": v for k, v in fields.items()}}}))
        for p in ("stage3_", "")
    )
    assert replace(long, others={}, lines={}) == replace(short, others={}, lines={})


def test_flags_of_the_launcher_s_launcher_are_none_of_the_tool() -> None:
    text = "srun --nodes 2 --ntasks 16 \\\n torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16"
    assert read_configuration(text, "megatron").devices == 16


def test_text_of_no_tool() -> None:
    with pytest.raises(ConfigurationError, match="of no tool; expected TOML of torchtitan"):
        tool_of("hello")
    with pytest.raises(UnknownNameError, match="did you mean 'megatron'"):
        read_configuration("--bf16", "megatorn")
    assert tool_of('{"zero_optimization": {}}') == "deepspeed"
    assert tool_of('{"distributed_type": "NO"}') == "accelerate"
    assert tool_of("{") == "deepspeed"
    assert tool_of("num_layers: 2\nbf16: true\n") == "megatron"


@cache
def graph() -> OpGraph:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(8, 64, 4, 32, 4, 4, 64, 128, dtype=torch.float32))
    return placement.capture(model, (torch.zeros((8, 64), dtype=torch.int64, device="meta"),), train=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            f"{P}data_parallel_shard_degree = 4\ntensor_parallel_degree = 4",
            "line 3: .* multiply to 16 devices .* there are 8",
        ),
        (f"{P}tensor_parallel_degree = 3", "line 2: tensor 3 .* = 3, which does not divide 8 devices"),
        (
            "torchrun --nproc-per-node 16 x.py --bf16",
            "line 1: the configuration is for 16 devices, and the cluster has 8",
        ),
        (f"{T}seq_len = 64\nlocal_batch_size = 3\nglobal_batch_size = 16", "line 4: .* no whole number of 3 samples"),
        (
            f"{T}seq_len = 64\nlocal_batch_size = 2",
            "line 3: .* has 16 samples in a step, and the graph 8; give the model with as many .by --dim batch=16,",
        ),
        (f"{T}seq_len = 128\nlocal_batch_size = 1", "line 2: .* samples of 128 words, and those of the model have 64"),
        ("--num-layers 8\n--micro-batch-size 1", "line 1: the configuration has 8 layers, and the model has 4"),
        ("--num-layers 4\n--hidden-size 4096 --micro-batch-size 1", "line 2: 4 layers of width 4096 .* million"),
        (
            "--num-layers 4 --micro-batch-size 1 --global-batch-size 8\n--pipeline-model-parallel-size 8",
            "line 2: 4 layers do not make 8 equal",
        ),
        (
            "--expert-model-parallel-size 3 --micro-batch-size 1",
            "line 1: 3 parts of the experts do not divide 8 replicas",
        ),
        (
            f"{T}seq_len = 64\nlocal_batch_size=2\nglobal_batch_size=16\n{P}pipeline_parallel_degree=2",
            "line 4: .* = 8, and the batch has 16: gradients that are accumulated around a pipeline",
        ),
        (
            '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,\n"gradient_accumulation_steps": 2}',
            "line 1: .* = 16",
        ),
    ],
)
def test_model_and_cluster_contradict(text: str, sentence: str) -> None:
    cluster = Cluster.preset("8xH100-nvswitch")
    with pytest.raises(ConfigurationError) as raised:
        strategy_of(settled(read_configuration(text), cluster), graph())
    assert re.search(sentence, str(raised.value)), str(raised.value)


def test_notes_say_what_is_predicted_otherwise() -> None:
    found = read_configuration(f"{FSDP}mixed_precision: fp16\n")
    assert [note.partition(" is predicted")[0] for note in found.notes] == ["FSDP of version 1", "float16"]
    gelu, swiglu = read_configuration("--micro-batch-size 1"), read_configuration("--micro-batch-size 1 --swiglu")
    assert notes_on(swiglu, graph()) == ()
    assert "no --swiglu, layers with gelu, and the model silu" in notes_on(gelu, graph())[0]


def test_fewer_devices_than_the_cluster_has_are_its_first() -> None:
    found = settled(read_configuration(f"{P}data_parallel_shard_degree = 4"), Cluster.preset("8xH100-nvswitch"))
    assert (found.devices, found.shards, batch_of(found)) == (4, 4, 32)


def test_torchtitan_narrows_nothing_without_fsdp() -> None:
    text = f"{P}data_parallel_shard_degree = 1\ntensor_parallel_degree = 8"
    found = settled(read_configuration(text), Cluster.preset("8xH100-nvswitch"))
    assert found.precision == "float32"
    assert any("float32" in note for note in found.notes)
