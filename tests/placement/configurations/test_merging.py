"""A user's own file with another strategy in it: what changes is edited where it stands, all else stays."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

from env.cluster import Cluster
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.cli import run
from placement.configurations.merging import Merged, merged
from placement.configurations.models import graph_of_configuration
from placement.configurations.registry import read_configuration
from placement.configurations.strategies import settled, strategy_of

CLUSTER = Cluster.preset("4xH100-nvswitch")
TOML = """# of the group
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 16  # short
[parallelism]
data_parallel_shard_degree = -1
"""
JSON = """{
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu"
        }
    },
    "gradient_clipping": 1.0
}
"""
YAML = """# of the group
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2  # as always
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
num_processes: 4
mixed_precision: bf16
"""
SCRIPT = """#!/bin/bash
# of the group
TP=2
GPT=(
    --num-layers 6 --hidden-size 256
    --seq-length 16  # short
)
torchrun --nproc_per_node=4 pretrain_gpt.py ${GPT[@]} \\
    --tensor-model-parallel-size $TP \\
    --recompute-activations \\
    --micro-batch-size 1 --global-batch-size 8 --bf16
"""
# Of each file: the strategy, and the lines that go and come, as of `diff`.
CASES = {
    "toml": (
        TOML,
        "dp2 zero3 | tp2 sp | mb2 | recompute=layers.*",
        [
            "+global_batch_size = 8",
            "-data_parallel_shard_degree = -1",
            "+data_parallel_shard_degree = 2",
            "+tensor_parallel_degree = 2",
            *("+", "+[activation_checkpoint]", '+mode = "full"'),
        ],
    ),
    "script": (
        SCRIPT,
        "dp4 zero1 | recompute=layers.*",
        [
            "-    --tensor-model-parallel-size $TP \\",
            "-    --recompute-activations \\",
            "-    --micro-batch-size 1 --global-batch-size 8 --bf16",
            "+    --ddp-bucket-size 6250000 \\",
            "+    --overlap-grad-reduce \\",
            "+    --recompute-granularity full \\",
            "+    --recompute-method uniform \\",
            "+    --recompute-num-layers 1 \\",
            "+    --use-distributed-optimizer \\",
            "+    --micro-batch-size 2 --global-batch-size 8 --bf16",
        ],
    ),
    "asserted": (
        SCRIPT,
        "dp2 zero3 | tp2 | bucket=1000000000000",
        [
            "+unset CUDA_DEVICE_MAX_CONNECTIONS",
            "-    --recompute-activations \\",
            "-    --micro-batch-size 1 --global-batch-size 8 --bf16",
            "+    --ckpt-format fsdp_dtensor \\",
            "+    --data-parallel-sharding-strategy optim_grads_params \\",
            "+    --no-gradient-accumulation-fusion \\",
            "+    --overlap-grad-reduce \\",
            "+    --use-distributed-optimizer \\",
            "+    --use-megatron-fsdp \\",
            "+    --micro-batch-size 4 --global-batch-size 8 --bf16",
        ],
    ),
    "json": (
        JSON,
        "dp4 zero3 | mb1",
        [
            '-    "train_micro_batch_size_per_gpu": 1,',
            '-    "gradient_accumulation_steps": 2,',
            '+    "train_micro_batch_size_per_gpu": 2,',
            '+    "gradient_accumulation_steps": 1,',
            '-        "stage": 2,',
            '-        "offload_optimizer": {',
            '-            "device": "cpu"',
            "-        }",
            '+        "stage": 3,',
            '+        "reduce_bucket_size": 6250000',
        ],
    ),
    "yaml": (
        YAML,
        "dp4 zero2 | recompute=layers.*",
        [
            "-  fsdp_reshard_after_forward: true",
            "+  fsdp_reshard_after_forward: false",
            "+  fsdp_activation_checkpointing: true",
        ],
    ),
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> OpGraph:
    path = tmp_path_factory.mktemp("file") / "train.toml"
    path.write_text(TOML)
    return graph_of_configuration(str(path), {}, cluster=CLUSTER)


def with_other(text: str, graph: OpGraph, strategy: str) -> Merged:
    found = settled(read_configuration(text), CLUSTER)
    return merged(text, found, graph, strategy_of(found, graph), Strategy.parse(strategy))


def changed(before: str, after: str) -> list[str]:
    lines = unified_diff(before.splitlines(), after.splitlines(), n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@pytest.mark.parametrize("name", CASES)
def test_what_changes_is_edited_where_it_stands(name: str, graph: OpGraph) -> None:
    text, strategy, lines = CASES[name]
    found = with_other(text, graph, strategy)
    assert found.is_edited
    assert changed(text, found.text) == lines
    # It is read as the strategy: another one would change keys again.
    assert with_other(found.text, graph, strategy).keys == ()


def test_a_form_that_is_not_edited_is_written_anew(graph: OpGraph) -> None:
    yaml = (
        "# of the group\nMODEL_ARGS:\n  --micro-batch-size: 1\n  --global-batch-size: 8\n  --lr: 0.1\n  --bf16: true\n"
    )
    found = with_other(yaml, graph, "dp4 zero1 | recompute=layers.*")
    assert not found.is_edited
    assert "--lr 0.1" in found.text
    assert ("--recompute-granularity", "", "full") in found.keys


def test_what_the_form_of_the_file_has_no_words_for_is_refused(graph: OpGraph) -> None:
    with pytest.raises(MismatchError, match="distributed_type: MULTI_GPU"):
        with_other(YAML, graph, "dp4")


def test_the_command_writes_the_user_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(TOML)
    words = ["optimize", "train.toml", "--for", "torchtitan", "--cluster", "4xH100-nvswitch", "-o", "out.json"]
    assert run([*words, "--strategy", "dp4 zero2 | recompute=layers.*"]) == 0
    told = capsys.readouterr().out
    assert "in your file" in told
    assert "parallelism.fsdp_reshard_after_forward = never" in told
    assert changed(TOML, Path("out.torchtitan.toml").read_text()) == [
        '+fsdp_reshard_after_forward = "never"',
        *("+", "+[activation_checkpoint]", '+mode = "full"'),
    ]
    assert Path("train.toml").read_text() == TOML
