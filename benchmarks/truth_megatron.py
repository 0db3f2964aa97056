"""Formats of measured runs of Megatron-LM and what is built on it, for `truth_rows`.

NVIDIA's dgxc-benchmarking and Megatron-Bridge, SimuMax's and vTrain's iterations, BigScience's BLOOM topologies, peaks
of Megatron's own tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from truth_experts import Experts, Latent
from truth_known import model_of
from truth_models import Shape
from truth_runs import (
    GIB,
    NotBuilt,
    Row,
    Run,
    Software,
    again,
    cuts,
    deepspeed_cuts,
    even_cuts,
    hosts,
    joined,
    kind_of,
    megatron_experts,
    megatron_latent,
    megatron_words,
    precision_of,
    replicas_of,
    workspaces,
)

FULL = "layers.*"
# A GPT of Megatron-DeepSpeed, whose scores and softmax are kernels of their own.
GPT: dict[str, Any] = {
    **{"gate": False, "activation": "gelu", "norm": "layer", "biases": True, "tied": True, "flash": False},
    "dropout": 0.1,
}
# --wgrad-deferral-limit of Megatron's tests that put gradients of the embedding off
# (tests/functional_tests, gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute/model_config.yaml @ 16d85528).
DEFERRED = 2
GPT2_PADDED = 51_200  # words of GPT-2's vocabulary, padded by Megatron


def _sizes(row: Row, *keys: str) -> list[int]:
    """Cells that are 1 where they are empty or 0."""
    return [max(row.whole(key, 1), 1) for key in keys]


def _shape(row: Row, **others: Any) -> Shape:
    """A shape whose sizes a row says; heads of keys and values are as many as others where it does not."""
    layers, hidden, inner, heads = (row.whole(key) for key in ("layers", "hidden", "ffn", "heads"))
    grouped = row.whole("kv_heads", heads) or heads
    return Shape(layers, hidden, inner, heads, grouped, row.whole("vocab"), row.whole("seq"), **others)


def _dgxc_name(row: Row) -> str:
    tensor, stages, context = _sizes(row, "tp", "pp", "cp")
    layout = f"tp{tensor} pp{stages} cp{context} vp{row.whole('vp', 1)} gbs{row['gbs']}"
    kind = "" if "H100" in row["gpu"] else f" {row['gpu'].split(',')[0]}"
    return f"{row['model']} {row['precision']} {row['gpus']} GPUs{kind}: {layout}"


def _dgxc(row: Row) -> Run:
    """NeMo on Megatron-LM: distributed optimizer, sequence parallel with tensor parallel, no recompute.

    PaxML, and NeMo where it says so, cut parameters instead, and are compiled.
    """
    gpus, tensor, stages, context, chunks, spread = _sizes(row, "gpus", "tp", "pp", "cp", "vp", "ep")
    # grad_sync_dtype=bf16 in NeMo-Framework-Launcher, examples/training/*/h100
    precision = precision_of(row["precision"], "master-bf16-reduce")
    is_cut = row.says("fsdp") or "pax" in row["framework"].lower()
    name = row["model"].lower()
    experts, latent = _mixture(row), _latent(name)
    if latent is None and "mla" in row["kv_heads"].lower():
        raise NotBuilt(f"latent attention of {name}: the table does not say its sizes")
    is_gpt3, is_nemotron = name.startswith("gpt3"), name.startswith("nemotron")
    gated = not is_gpt3 and not is_nemotron
    shape = _shape(
        row,
        gate=gated,
        activation="gelu" if is_gpt3 or name.startswith("grok") else "silu" if gated else "relu2",
        norm="rms" if gated else "layer",
        positions="learned" if is_gpt3 else "rotary",
        biases=is_gpt3,
        precision=precision,
        experts=experts,
        latent=latent,
    )
    replicas, spread = replicas_of(gpus, tensor, stages, context), spread if experts else 1
    sharded = "zero3" if is_cut else "zero1"
    words = megatron_words(replicas, tensor, context, stages, chunks, spread=spread, sharded=sharded)
    words += [even_cuts(shape.layers, stages * chunks, "_fused_rms_norm" if gated else "native_layer_norm")]
    return Run(
        *(shape, row.whole("gbs"), row.whole("mbs"), replicas, joined(words)),
        *(hosts(gpus, kind_of(row["gpu"])), "fused", gpus, row.amount("step_s")),
        # ub_tp_comm_overlap of nemotron/nemotron4-15b-synth.yaml, NVIDIA/dgxc-benchmarking @ 8f5cbb37
        software=Software(pipelined_products=True),
    )


def _mixture(row: Row) -> Experts | None:
    """Experts of a row of dgxc-benchmarking: ``"8"`` or ``"8 top 2"``; None without any."""
    number, top = row.whole("experts", 0), re.search(r"top\W*(\d+)", row["experts"])
    if number < 2:
        return None
    if row["model"].startswith(("mixtral", "grok")):
        return Experts(number, int(top[1]) if top else 2, row.whole("ffn"))
    known = model_of(row["model"]).experts
    if known is None or known.number != number:
        raise NotBuilt(f"{number} experts of {row['model']}: the table does not say their sizes")
    return replace(known, asked=int(top[1]) if top else known.asked)


def _bridge_name(row: Row) -> str:
    sizes = " ".join(f"{key}{row[key]}" for key in ("fsdp", "tp", "pp", "cp", "vp", "ep"))
    name = f"{row['model']} {row['precision']} {row['gpus']} {row['system'] or 'H100'}: {sizes} gbs{row['gbs']}"
    return f"{name}, {row['change'] or row['variant'] or row['release']}"


def _bridge(row: Row) -> Run:
    """Megatron-Bridge: as NeMo; tensor parallelism does not cut experts, which are spread over its ranks instead."""
    keys = ("gpus", "tp", "pp", "cp", "vp", "ep", "fsdp")
    gpus, tensor, stages, context, chunks, spread, shard = _sizes(row, *keys)
    shape = replace(model_of(row["model"]), tokens=row.whole("seq"))
    # A release without the column tells of two granularities of fp8 (performance-summary-archive.md, 25.09).
    shape = replace(shape, precision=precision_of(row["precision"] or "fp8", "master-bf16-reduce"))
    if row["change"] not in ("", "no recompute"):
        raise NotBuilt(f"{row['change']}: not built")
    if "lora" in row["task"].lower():
        shape = replace(shape, adapters=16)
    replicas, spread = replicas_of(gpus, tensor, stages, context), spread if shape.experts else 1
    sharded = "zero3" if shard > 1 else "zero1"
    # Recipes of Megatron-Bridge leave experts whole (`expert_tensor_parallel_size = 1`), and DeepSeek's for H100 enable
    # DeepEP (scripts/performance/configs/deepseek/deepseek_llm_pretrain.py @ 01328424).
    once = row["model"].startswith("DeepSeek") and kind_of(row["system"] or "H100") == "H100"
    spread_as = {"spread": spread, "sharded": sharded, "whole_experts": True, "once": once}
    words = megatron_words(replicas, tensor, context, stages, chunks, **spread_as)
    words += [even_cuts(shape.layers, stages * chunks)]
    return Run(
        *(shape, row.whole("gbs"), row.whole("mbs"), replicas, joined(words)),
        *(hosts(gpus, kind_of(row["system"] or "H100")), "fused", gpus, row.amount("step_s")),
        row.memory("peak_allocated_GB", 1e9),
        software=Software(pipelined_products=True),
    )


def _simumax(row: Row) -> Run:
    """Megatron-LM with Transformer Engine on one host: distributed optimizer, no recompute, nothing overlaps."""
    gpus, tensor, stages, context, spread = _sizes(row, "gpus", "tp", "pp", "cp", "ep")
    replicas = replicas_of(gpus, tensor, stages, context)
    shape, has_experts = _shape(row, precision="master"), row.whole("experts", 0) > 1
    if has_experts:
        sizes = (row.whole(key, 0) for key in ("topk", "moe_ffn", "shared_ffn"))
        latent = _latent(row["model"])
        # Its scripts give DeepSeek one dense layer, whatever the number of layers (run_pretrain_deepseekv2.sh).
        mixture = Experts(row.whole("experts"), *sizes, dense_layers=0 if latent is None else 1)
        shape = replace(shape, experts=mixture, latent=latent)
    kind = kind_of(row["gpu"])
    words = megatron_words(replicas, tensor, context, stages, spread=spread if has_experts else 1)
    words += [even_cuts(shape.layers, stages)]
    if tensor == 1:  # CP_COMM_TYPE of its scripts is a2a; beside tp, which cuts heads too, no strategy says it
        words = [f"{word} ulysses" if word.startswith("cp") else word for word in words]
    return Run(
        *(shape, row.whole("global_batch"), row.whole("micro_batch"), replicas, joined(words)),
        *(hosts(gpus, kind), "fused", gpus, row.amount("step_ms") / 1e3, row.memory("max_alloc_gib", GIB)),
        software=Software(blocking=True, workspace_bytes=workspaces(kind, True, False, has_experts)),
    )


def _latent(model: str) -> Latent | None:
    """Sizes of a model's latent attention, as DeepSeek publishes them; None for a model without."""
    name = re.sub(r"[-_. ]", "", model.lower())
    if not name.startswith(("deepseekv2", "deepseekv3", "deepseek16b", "kimi", "moonlight")):
        return None
    is_small = name.startswith(("deepseekv2lite", "deepseek16b", "moonlight"))
    return Latent(query=0 if is_small else 1536, keys=512)


def _bloom_sizes(row: Row) -> dict[str, int]:
    """Layers, width, heads and layout; replicas are those of the GPUs where a row says others."""
    sizes = {key: row.whole(key, 0) for key in ("nlayers", "nhidden", "nheads", "dp", "tp", "pp", "mbs", "gbs", "gpus")}
    stages = max(sizes["pp"], 1)
    if not sizes["nlayers"]:  # what the size that is stated comes to: layers "had to be tweaked to fit PP"
        sizes["nlayers"] = stages * round(row.amount("nlayers_implied_by_size") / stages)
    sizes["dp"] = sizes["gpus"] // max(sizes["tp"] * stages, 1)
    return sizes


def _bloom_name(row: Row) -> str:
    sizes = _bloom_sizes(row)
    name = f"line {row['line']}: {sizes['nlayers']} x {sizes['nhidden']}, {sizes['nheads']} heads, {sizes['gpus']} GPUs"
    return f"{name}: tp{sizes['tp']} pp{sizes['pp']} dp{sizes['dp']}, micro-batch {sizes['mbs']}, batch {sizes['gbs']}"


def _bloom(row: Row) -> Run:
    """Megatron-DeepSpeed of 2022: ZeRO-1, full recompute, 1F1B; scores and softmax are kernels of their own."""
    sizes = _bloom_sizes(row)
    layers, hidden, heads, replicas, tensor, stages = (
        sizes[key] for key in ("nlayers", "nhidden", "nheads", "dp", "tp", "pp")
    )
    replicas_of(sizes["gpus"], tensor, stages)
    if hidden % heads:
        raise NotBuilt(f"{heads} heads do not divide {hidden}")
    shape = Shape(
        *(layers, hidden, 4 * hidden, heads, heads, 250_880, 2048),
        **GPT,
        positions="alibi",
        precision="master",  # DeepSpeed's BF16_Optimizer
    )
    words = [*megatron_words(replicas, tensor, 1, stages, sequence=False), again(FULL), deepspeed_cuts(layers, stages)]
    return Run(
        *(shape, sizes["gbs"], sizes["mbs"], replicas, joined(words), f"{-(-sizes['gpus'] // 8)}x8xA100-opa", "fused"),
        *(sizes["gpus"], row.amount("sec_per_iteration"), row.memory("memory_GB", 1e9)),
        software=Software(blocking=True, synchronous=True, cuda_11=True),
    )


def _vtrain_name(row: Row) -> str:
    tensor, data, stages = (row[f"{word} parallelism"] for word in ("tensor", "data", "pipeline"))
    name = f"{row['# layers']} x {row['hidden size']}, {row['# GPUs']} GPUs: tp{tensor} pp{stages} dp{data}"
    return f"{name}, micro-batch {row['micro batch']}, batch {row['global batch']}"


def _vtrain(row: Row) -> Run:
    """Megatron-DeepSpeed of 2023: replicas, full recompute, 1F1B; scores and softmax are kernels of their own.

    Nothing overlaps, and gradients are all-reduced once a step (J. Bang et al., "vTrain", MICRO 2024).
    """
    columns = "# GPUs", "hidden size", "# layers", "attention heads", "sequence length"
    gpus, hidden, layers, heads, tokens = (row.whole(key) for key in columns)
    tensor, stages = _sizes(row, "tensor parallelism", "pipeline parallelism")
    data = replicas_of(gpus, tensor, stages)
    shape = Shape(layers, hidden, 4 * hidden, heads, heads, GPT2_PADDED, tokens, **GPT, positions="learned")
    words = [*megatron_words(data, tensor, 1, stages, sequence=False, sharded=""), again(FULL)]
    return Run(
        *(shape, row.whole("global batch"), row.whole("micro batch"), data, joined(words), hosts(gpus, "A100")),
        *("fused", gpus, row.amount("iteration time (ms)") / 1e3),
        software=Software(blocking=True),
    )


# What a test of Megatron's says that no graph here has.
UNKNOWN = (
    *("mtp_num_layers", "hybrid_layer_pattern", "use_torch_fsdp2", "pipeline_model_parallel_layout"),
    *("cuda_graph_impl",),
)
ENGINE = ("", "transformer_engine")
OTHERS = ("distill", "grpo")  # and what the name of one says
# --data-parallel-sharding-strategy of Megatron's FSDP
SHARDED = {"optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}


def _tests_name(row: Row) -> str:
    return f"{row['test']} on {row['device']}"


def _tests(row: Row) -> Run:
    """Megatron-LM's own functional tests: peaks of the last rank, in bytes; their times are those of the host.

    Where a recipe is not listed: all that are have eight GPUs, but for those of one node with four, and those whose
    layout needs more. Tests called "frozen" resume from a checkpoint that is kept, and freeze nothing.
    """
    if row.says("step_batch_size_schedule") and not row["nodes"]:
        raise NotBuilt("a release, and how many GPUs it ran on is not said")
    used = [key for key in UNKNOWN if row.says(key)] + [word for word in OTHERS if word in row["test"]]
    family = row["test"].split("/")[0]
    if used or family not in ("gpt", "moe", "mixtral", "bert") or row["spec"] not in ("", "local"):
        raise NotBuilt(f"not built: {', '.join(used) or row['spec'] or family}")
    tensor, stages, context = _sizes(
        row, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
    )
    shape = _tests_shape(row, family, tensor)
    layers, spread, each_tensor = shape.layers, 1, 1
    if shape.experts:
        spread = row.whole("expert_model_parallel_size", 1)
        each_tensor = row.whole("expert_tensor_parallel_size", tensor)
        if tensor > 1 and each_tensor not in (1, tensor):
            raise NotBuilt("experts are cut into fewer parts than all else")
    instances = row.whole("num_distributed_optimizer_instances", 1)
    gpus = row.whole("nodes", 1) * row.whole("gpus_per_node", 8)
    needed = math.lcm(tensor * context, spread * each_tensor) * stages * instances
    gpus = gpus if gpus % needed == 0 else needed
    replicas = replicas_of(gpus, tensor, stages, context)
    each = row.whole("num_layers_per_virtual_pipeline_stage", 0)
    chunks = layers // stages // each if each else row.whole("num_virtual_stages_per_pipeline_rank", 1)
    sharded = "zero1" if row.says("use_distributed_optimizer") else ""
    if row.says("use_megatron_fsdp"):
        sharded = SHARDED.get(row["data_parallel_sharding_strategy"], "")
    is_cut, kind = row.says("sequence_parallel"), kind_of(row["device"])
    words = [f"dp{instances}" if instances > 1 else ""]
    whole_experts = each_tensor == 1 < tensor
    words += megatron_words(
        replicas // instances, tensor, context, stages, chunks, is_cut, spread, sharded, whole_experts
    )
    words += [again(FULL if row["recompute_granularity"] == "full" else ""), _tests_cuts(row, shape, stages, chunks)]
    extra = _tests_extra(row, shape, kind, tensor, context)
    batch, micro = row.whole("global_batch_size"), row.whole("micro_batch_size")
    if chunks > 1:  # in groups of other sizes than there are stages: a peak is that of any number of micro-batches
        batch = math.ceil(batch / (micro * replicas * stages)) * micro * replicas * stages
    return Run(
        *(shape, batch, micro, replicas, joined(words)),
        *(hosts(gpus, kind), "fused", gpus, math.nan, row.memory("mem_max_allocated_bytes", 1)),
        software=Software(workspace_bytes=extra),
        last_rank=True,
    )


def _tests_shape(row: Row, family: str, tensor: int) -> Shape:
    """The model of a test. Options that are not given have Megatron's defaults: learned positions, biases, dropout of
    0.1, a tied table."""
    layers, hidden, heads = (row.whole(key) for key in ("num_layers", "hidden_size", "num_attention_heads"))
    is_gated = row.says("swiglu")
    # A gate has the parameters of a network without one (megatron/training/arguments.py).
    inner = 8 * hidden // 3 // 64 * 64 if is_gated else 4 * hidden
    padded, words = 128 * tensor, 30_522 if family == "bert" else 50_257
    # Gradients are added up in float32 for bfloat16 alone (megatron/training/arguments.py), else in 16 bits.
    precision = "master" if row.says("bf16") else "master-bf16-reduce"
    return Shape(
        *(layers, hidden, row.whole("ffn_hidden_size", inner), heads, row.whole("num_query_groups", heads)),
        *(-(-row.whole("vocab_size", words) // padded) * padded, row.whole("seq_length")),
        gate=is_gated,
        activation="silu" if is_gated else "relu2" if row.says("squared_relu") else "gelu",
        norm="rms" if row["normalization"] == "RMSNorm" else "layer",
        positions="rotary" if row["position_embedding_type"] == "rope" else "learned",
        biases=not row.says("disable_bias_linear"),
        tied=not row.says("untie_embeddings_and_output_weights"),
        flash=row["transformer_impl"] in ENGINE and row["attention_backend"] != "unfused",
        dropout=row.amount("attention_dropout") if row["attention_dropout"] else 0.1,
        precision=precision_of("fp8" if row.says("fp8_format") else "bf16", precision),
        head_norms=row.says("qk_layernorm") and not row.says("multi_latent_attention"),
        head=row.whole("kv_channels", 0),
        experts=megatron_experts(row),
        latent=megatron_latent(row),
    )


def _tests_cuts(row: Row, shape: Shape, stages: int, chunks: int) -> str:
    first = "_fused_rms_norm" if shape.norm == "rms" else "native_layer_norm"
    if "uneven" in row["test"] and stages > 2 and chunks == 1:
        # --decoder-first-pipeline-num-layers: 2, and of the last (gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline @ 55b6a00d)
        return cuts([2, *[(shape.layers - 4) // (stages - 2)] * (stages - 2), 2], first)
    return even_cuts(shape.layers, stages * chunks, first, "account_for_embedding_loss" in row["test"])


def _tests_extra(row: Row, shape: Shape, kind: str, tensor: int, context: int) -> int:
    """Bytes that a test holds beside the tensors of its step."""
    has_engine, grouped = row["transformer_impl"] in ENGINE, row.says("moe_grouped_gemm")
    extra = workspaces(kind, has_engine, row.says("deterministic_mode"), bool(shape.experts) and grouped)
    rows, vocabulary = row.whole("micro_batch_size") * shape.tokens, shape.vocabulary // tensor
    if row.says("cross_entropy_loss_fusion"):
        # Inductor writes the exponentials of float32 logits to a buffer of their own and copies them back, as
        # megatron/core/fusions/fused_cross_entropy.py @ 0cb4a9c8 says of what it replaces.
        extra += 4 * (rows // context) * vocabulary
    if "defer_embedding_wgrad" in row["test"]:
        # Gradients of the logits, and what was multiplied by the table, of so many micro-batches wait for the end of
        # the step (megatron/core/tensor_parallel/layers.py, grad_output_buffer and embedding_activation_buffer).
        extra += DEFERRED * 2 * rows * (vocabulary + shape.hidden // (tensor if row.says("sequence_parallel") else 1))
    return extra


# Columns, and who names and builds a row.
FORMATS: tuple[tuple[set[str], Callable[[Row], str], Callable[[Row], Run]], ...] = (
    ({"framework", "precision", "mbs", "gbs", "layers", "step_s", "vp", "kv_heads"}, _dgxc_name, _dgxc),
    ({"system", "model", "precision", "gbs", "mbs", "fsdp", "ga", "step_s"}, _bridge_name, _bridge),
    ({"change", "model", "precision", "gbs", "mbs", "vp", "step_s"}, _bridge_name, _bridge),
    ({"case", "micro_batch", "num_microbatches", "step_ms", "kv_heads"}, lambda row: row["case"], _simumax),
    ({"nlayers", "nhidden", "nheads", "sec_per_iteration", "zero_stage"}, _bloom_name, _bloom),
    (
        {"test", "mem_max_allocated_bytes", "tensor_model_parallel_size", "use_distributed_optimizer"},
        *(_tests_name, _tests),
    ),
    ({"# GPUs", "global batch", "micro batch", "pipeline parallelism", "iteration time (ms)"}, _vtrain_name, _vtrain),
)
