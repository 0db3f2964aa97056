"""Models of torchtitan's and Megatron-LM's configurations: sizes as published, batches of the file, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from env.cluster import Cluster
from graphs.errors import ConfigurationError, UnknownNameError
from graphs.zoo.decoders import DecoderConfig, decoder
from placement.configurations.models import decoder_of, graph_of_configuration
from placement.configurations.registry import read_configuration
from placement.configurations.strategies import settled, strategy_of

TOML = """[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 16
[parallelism]
data_parallel_shard_degree = 4
"""
MEGATRON = """torchrun --nproc-per-node 4 pretrain_gpt.py \\
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \\
  --ffn-hidden-size 96 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \\
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --vocab-size 1000 \\
  --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --bf16
"""
# Parameters of the releases.
FLAVORS = {
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("deepseek_v3", "16B"): 15_706_484_224,
}
# GPT-3 by equation 2 of Narayanan et al. 2021, GPT-2 with its vocabulary padded; the others as released.
SCRIPTS = {
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --vocab-size 51200": 174_615_846_912,
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-position-embeddings 1024": (
        354_871_296
    ),
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --vocab-size 32000 "
    "--use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear --no-position-embedding "
    "--untie-embeddings-and-output-weights": 6_738_415_616,
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --swiglu --vocab-size 32000 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2": 46_702_792_704,
    "--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 --swiglu --vocab-size 102400 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --multi-latent-attention "
    "--untie-embeddings-and-output-weights --kv-lora-rank 512 --v-head-dim 128 --num-experts 64 --moe-router-topk 6 "
    "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]*1+[1]*26)": (
        15_706_484_224
    ),
}


def parameters(config: DecoderConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in decoder(config).model.parameters())


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_of_torchtitan_have_the_published_sizes(flavor: tuple[str, str]) -> None:
    text = f'[model]\nname = "{flavor[0]}"\nflavor = "{flavor[1]}"\n'
    assert parameters(decoder_of(text, "torchtitan", 1, 8)) == FLAVORS[flavor]


@pytest.mark.parametrize("arguments", SCRIPTS)
def test_arguments_of_megatron_make_the_published_sizes(arguments: str) -> None:
    words = 1024 if "--max-position" in arguments else 2048
    quoted = arguments.replace("([0]", '"([0]').replace("26)", '26)"')
    config = decoder_of(f"pretrain_gpt.py {quoted}", "megatron", 1, words)
    assert parameters(config) == SCRIPTS[arguments]


def written(folder: Path, text: str, name: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


def test_a_graph_has_the_batch_of_all_replicas_and_the_precision_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TOML.replace("degree = 4", "degree = -1"), "train.toml")
    toml = graph_of_configuration(path, {}, cluster=Cluster.preset("4xH100-nvswitch"))
    assert toml.is_training
    assert (toml.name, toml.origin.batch_size, toml.origin.precision) == ("train", 8, "mixed")
    script = graph_of_configuration(written(tmp_path, MEGATRON, "pretrain.sh"), {}, "float32")
    assert (script.origin.batch_size, script.origin.precision) == (8, "float32")
    assert script.is_training
    more = graph_of_configuration(written(tmp_path, TOML, "train.toml"), {"batch": 3, "sequence": 8})
    assert more.origin.batch_size == 3
    assert more.flops.sum() < toml.flops.sum()


def test_how_experts_are_cut_says_nothing_of_a_model_without_any(tmp_path: Path) -> None:
    text = MEGATRON + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1\n"
    graph = graph_of_configuration(written(tmp_path, text, "pretrain.sh"), {})
    strategy = strategy_of(settled(read_configuration(text), Cluster.preset("4xH100-nvswitch")), graph)
    assert {rule.name: (rule.size, rule.has_experts) for rule in strategy.mesh} == {"dp": (2, False), "tp": (2, False)}


def test_attention_drops_inside_of_its_kernels(tmp_path: Path) -> None:
    text = MEGATRON.replace("--attention-dropout 0.0", "--attention-dropout 0.1")
    graph = graph_of_configuration(written(tmp_path, text, "pretrain.sh"), {})
    assert any("scaled_dot_product" in kind for kind in graph.kinds)
    assert not any("dropout" in kind for kind in graph.kinds)
    assert "without its dropout" in read_configuration(text).notes[0]
    assert not read_configuration(MEGATRON).notes


REFUSED = {
    "another model": (TOML.replace("llama3", "flux"), "train.toml", r"line 2: model.name = 'flux'.*llama3, qwen3"),
    "no [model]": (TOML[TOML.index("[training]") :], "train.toml", "trains its debug model; add it"),
    "another flavor": (TOML.replace("debugmodel", "7B"), "train.toml", r"line 3: model.flavor = '7B'.*8B, 70B, 405B"),
    "replicas": (TOML.replace("degree = 4", "degree = -1"), "train.toml", "--dim batch=SAMPLES"),
    "no size": (MEGATRON.replace("--num-layers 2", ""), "run.sh", "has no --num-layers"),
    "no vocabulary": (MEGATRON.replace("--vocab-size 1000", ""), "run.sh", "--dim vocabulary=SIZE"),
    "positions": (
        MEGATRON.replace("type rope", "type mrope"),
        "run.sh",
        "line 3: --position-embedding-type is 'mrope'",
    ),
    "heads": (MEGATRON.replace("heads 4", "heads 5"), "run.sh", "heads to divide the width"),
    "experts": (MEGATRON + "--num-experts 4 --moe-layer-freq 2\n", "run.sh", "--moe-layer-freq is '2'; expected 1"),
    "no model": (
        "distributed_type: FSDP\nnum_processes: 4\n",
        "accelerate.yaml",
        "accelerate does not say which model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gives_no_model_is_refused_by_its_line(tmp_path: Path, name: str) -> None:
    text, file, said = REFUSED[name]
    path = written(tmp_path, text.replace("--bf16\n--num", "--bf16 \\\n --num"), file)
    with pytest.raises(ConfigurationError, match=f"{file}: .*{said}"):
        graph_of_configuration(path, {})


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'layers'"):
        graph_of_configuration(written(tmp_path, TOML, "train.toml"), {"layers": 1})


def test_the_vocabulary_may_be_told(tmp_path: Path) -> None:
    config = decoder_of(MEGATRON.replace("--vocab-size 1000", ""), "megatron", 1, 8, vocabulary=500)
    assert config.vocabulary == 500
    assert decoder_of(MEGATRON, "megatron", 1, 8).vocabulary == 1024
