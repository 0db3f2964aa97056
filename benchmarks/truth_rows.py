"""Files of measured training runs, and each of their rows as a user would write it: a model, a strategy, a machine.

The formats are those of public tables: MosaicML's llm-foundry, PyTorch's torchtitan, NVIDIA's dgxc-benchmarking,
SimuMax's and vTrain's Megatron iterations, BigScience's BLOOM topologies, and peaks of Megatron's own tests, each a CSV
file that is known by its columns. Nothing is fitted: what a row does not say follows from the framework that ran it,
and is written down here.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from truth_experts import Experts, Latent
from truth_models import Shape
from truth_runs import (
    BEYOND_REPLICAS,
    GIB,
    Row,
    Run,
    Skipped,
    Software,
    again,
    deepspeed_cuts,
    even_cuts,
    hosts,
    joined,
    megatron_experts,
    megatron_latent,
    megatron_words,
    true,
    workspaces,
)

T = TypeVar("T")
# torchtitan's selective recompute keeps attention and every second product of a layer: what runs again is the norms,
# the product after attention, and that beside the gate with the activation.
SELECTIVE = "layers.*.norm+layers.*.post+layers.*.inner.activation"
FULL = "layers.*"
# A GPT of Megatron-DeepSpeed, whose scores and softmax are kernels of their own.
MEGATRON_GPT: dict[str, Any] = {
    **{"gate": False, "activation": "gelu", "norm": "layer", "biases": True, "tied": True, "flash": False},
    "dropout": 0.1,
}
# --wgrad-deferral-limit of Megatron's tests that put gradients of the embedding off
# (tests/functional_tests, gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute/model_config.yaml @ 16d85528).
DEFERRED = 2
GPT2_PADDED = 51_200  # words of GPT-2's vocabulary, padded by Megatron


def read(path: Path) -> list[Run | Skipped] | None:
    """All rows of a file; None where its columns are those of no format."""
    found = with_reader(path, FORMATS)
    if found is None:
        return None
    build, rows = found
    return [_row(build, row, path, number) for number, row in enumerate(rows, 2)]


def with_reader(path: Path, formats: Sequence[tuple[set[str], T]]) -> tuple[T, list[dict[str, str]]] | None:
    """What belongs to the first format whose columns a CSV file has, and its rows; None where there is none."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        found = next((each for needed, each in formats if needed <= columns), None)
        return None if found is None else (found, list(reader))


def _row(build: Callable[[Row], Run | Skipped], row: Row, path: Path, line: int) -> Run | Skipped:
    try:
        return build(row)
    except (KeyError, ValueError) as error:
        return Skipped(f"line {line}", f"{path.name}, line {line}: {error!s:.100}")


# -- formats --------------------------------------------------------------------------------------------------------


def _llm_foundry(row: Row) -> Run | Skipped:
    """MPT under FSDP: biases, learned positions, tied head; blocks are recomputed whole or not at all.

    Composer's mixed precision DEFAULT gathers float32 parameters and computes under autocast; PURE gathers bfloat16.
    """
    gpus, tokens, micro = int(row["# GPUs"]), int(row["SeqLen (T)"]), int(row["MicroBatchSize"])
    gpu = row["GPU"].lower()
    name = f"MPT-{row['Model']} {tokens} tokens, {gpus} {gpu}, micro-batch {micro}"
    if row["Precision"] != "amp_bf16":
        return Skipped(name, f"{row['Precision']}: fp8 has no recipe yet")
    sharded = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": ""}.get(row["Sharding Strategy"])
    if sharded is None or row["Activation CPUOffload"] == "True":
        return Skipped(name, f"{row['Sharding Strategy']}, offload {row['Activation CPUOffload']}: not modelled")
    hidden = int(row["d_model"])
    shape = Shape(
        int(row["n_layers"]),
        hidden,
        int(row["expansion_ratio"]) * hidden,
        int(row["n_heads"]),
        int(row["n_heads"]),
        int(row["vocab_size"]),
        tokens,
        gate=False,
        activation="gelu",
        norm="layer",
        positions="learned",
        biases=True,
        tied=True,
        flash=row.get("attn_impl_in_yaml", "flash") in ("flash", "triton"),
        precision="mixed-bf16-reduce",  # PURE: parameters are gathered, and gradients reduced, in bfloat16
        autocast=row["MP Mode"] == "DEFAULT",
    )
    batch = int(row["GlobalBatchSize"])
    measured_s = float(row["step_s_from_T/s"]) if row.get("step_s_from_T/s") else 0.0
    measured_s = measured_s or batch * tokens / float(row["Throughput (T/s)"])
    cluster = hosts(gpus, {"h100_80gb": "H100", "a100_80gb": "A100", "a100_40gb": "A100-40gb"}[gpu])
    words = [
        f"dp{gpus} {sharded}".strip() if gpus > 1 else "",
        again(FULL if true(row["Activation Checkpointing"]) else ""),
    ]
    # The tables are of flash-attn 1.0.9, which the recipes of 2023 install.
    return Run(
        name,
        shape,
        batch,
        micro,
        gpus,
        joined(words),
        cluster,
        "eager",
        gpus,
        measured_s,
        software=Software(flash_1=True),
    )


def _torchtitan(row: Row) -> Run | Skipped:
    """Llama 3 under FSDP2: parameters float32, computed in bfloat16."""
    gpus, tokens = int(row["gpus"]), int(row["seq"])
    name = f"{row['model']} {tokens} tokens, {gpus} {row['gpu']}, {'compiled' if row['compile'] == '1' else 'eager'}"
    if row["precision"] != "bf16":
        return Skipped(name, f"{row['precision']}: fp8 has no recipe yet")
    shape = LLAMA.get(row["model"])
    if shape is None:
        return Skipped(name, f"no model {row['model']!r}")
    shard, tensor, stages, context = (int(row[key] or 1) for key in ("dp_shard(fsdp)", "tp", "pp", "cp"))
    if stages > 1:
        return Skipped(name, f"pipeline schedule {row['pp_schedule']!r} of torchtitan is not built")
    kept = row["activation_checkpointing"]
    words = [
        f"dp{shard} zero3" if shard > 1 else "",
        f"cp{context}" if context > 1 else "",
        f"tp{tensor} sp" if tensor > 1 else "",
        again(SELECTIVE if kept.startswith("selective") else FULL if kept == "full" else ""),
    ]
    batch, local = int(row["global_batch"]), int(row["local_batch"])
    seconds = batch * tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)
    kind = "H100-96gb" if "96GB" in row["gpu"] else row["gpu"].split()[0].split("-")[0]
    stack = "compiled" if row["compile"] == "1" else "eager"
    memory = float(row["peak_memory_GiB"]) * GIB if row["peak_memory_GiB"] else None
    return Run(
        *(
            name,
            replace(shape, tokens=tokens, precision="mixed"),
            batch,
            local,
            max(shard, 1),
            joined(words),
            hosts(gpus, kind),
            stack,
        ),
        *(gpus, seconds, memory),
        software=Software(flash_2=True),
    )


def _dgxc(row: Row) -> Run | Skipped:
    """NeMo on Megatron-LM: distributed optimizer, sequence parallel with tensor parallel, no recompute."""
    gpus = int(row["gpus"])
    tensor, stages, context = (int(row[key] or 1) for key in ("tp", "pp", "cp"))
    chunks = int(row["vp"]) if (row["vp"] or "").isdigit() else 1
    name = (
        f"{row['model']} {row['precision']} {gpus} GPUs: tp{tensor} pp{stages} cp{context} vp{chunks} gbs{row['gbs']}"
    )
    if row["precision"].lower() != "bf16":
        return Skipped(name, f"{row['precision']}: fp8 has no recipe yet")
    if "NeMo" not in row["framework"] or row["fsdp"]:
        return Skipped(name, f"{row['framework']}, {row['fsdp'] or 'no NeMo'}: not built")
    experts = int(row["experts"] or 0)
    if experts > 1 and not row["model"].startswith(("mixtral", "grok")):
        return Skipped(name, f"experts of {row['model']}: the table does not say their sizes")
    gated = row["model"].startswith(("llama", "mixtral", "grok"))
    gpt3 = row["model"].startswith("gpt3")
    shape = Shape(
        *(int(row[key]) for key in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq")),
        gate=gated,
        activation="gelu" if gpt3 or row["model"].startswith("grok") else "silu" if gated else "relu2",
        norm="rms" if gated else "layer",
        positions="learned" if gpt3 else "rotary",
        biases=gpt3,
        precision="master-bf16-reduce",  # grad_sync_dtype=bf16 in NeMo-Framework-Launcher, examples/training/*/h100
        experts=Experts(experts, 2, int(row["ffn"])) if experts > 1 else None,  # top-2, both of them
    )
    replicas, spread = gpus // (tensor * stages * context), int(row["ep"] or 1) if experts > 1 else 1
    if replicas % spread:
        return Skipped(name, BEYOND_REPLICAS)
    words = megatron_words(replicas, tensor, context, stages, chunks, spread=spread)
    words += [even_cuts(shape.layers, stages * chunks, "_to_copy" if gated else "native_layer_norm")]
    return Run(
        *(name, shape, int(row["gbs"]), int(row["mbs"]), replicas, joined(words)),
        *(hosts(gpus, "H100"), "fused", gpus, float(row["step_s"])),
        # ub_tp_comm_overlap of nemotron/nemotron4-15b-synth.yaml, NVIDIA/dgxc-benchmarking @ 8f5cbb37
        software=Software(pipelined_products=True),
    )


def _simumax(row: Row) -> Run | Skipped:
    """Megatron-LM with Transformer Engine on one host: distributed optimizer, no recompute, nothing overlaps."""
    gpus = int(row["gpus"])
    tensor, stages, context, replicas = (int(row[key] or 1) for key in ("tp", "pp", "cp", "dp"))
    keys = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq")
    shape = replace(Shape(*(int(row[key]) for key in keys)), precision="master")
    experts, spread = int(row["experts"] or 0), 1
    if experts > 1:
        spread = int(row["ep"] or 1)
        if replicas % spread:
            return Skipped(row["case"], BEYOND_REPLICAS)
        sizes = (int(row[key] or 0) for key in ("topk", "moe_ffn", "shared_ffn"))
        latent = _latent(row["model"])
        # Its scripts give DeepSeek one dense layer, whatever the number of layers (run_pretrain_deepseekv2.sh).
        mixture = Experts(experts, *sizes, dense_layers=0 if latent is None else 1)
        shape = replace(shape, experts=mixture, latent=latent)
    kind = row["gpu"].split("-")[0]
    words = [*megatron_words(replicas, tensor, context, stages, 1, spread=spread), even_cuts(shape.layers, stages)]
    if tensor == 1:  # CP_COMM_TYPE of its scripts is a2a; beside tp, which cuts heads too, no strategy says it
        words = [f"{word} ulysses" if word.startswith("cp") else word for word in words]
    return Run(
        *(row["case"], shape, int(row["global_batch"]), int(row["micro_batch"]), replicas, joined(words)),
        *(hosts(gpus, kind), "fused", gpus, float(row["step_ms"]) / 1e3, float(row["max_alloc_gib"]) * GIB),
        software=Software(blocking=True, workspace_bytes=workspaces(kind, True, False, experts > 1)),
    )


def _latent(model: str) -> Latent | None:
    """Sizes of a model's latent attention, as DeepSeek publishes them; None for a model without."""
    name = model.lower().replace("-", "").replace("_", "")
    if not name.startswith(("deepseekv2", "deepseekv3", "deepseek16b", "kimi", "moonlight")):
        return None
    is_small = name.startswith(("deepseekv2lite", "deepseek16b", "moonlight"))
    return Latent(query=0 if is_small else 1536, keys=512)


def _bloom(row: Row) -> Run | Skipped:
    """Megatron-DeepSpeed of 2022: ZeRO-1, full recompute, 1F1B; scores and softmax are kernels of their own."""
    gpus = int(row["gpus"])
    sizes = {key: int(row[key] or 0) for key in ("nlayers", "nhidden", "nheads", "dp", "tp", "pp", "mbs", "gbs")}
    if not sizes["nlayers"]:  # what the size that is stated comes to: layers "had to be tweaked to fit PP"
        sizes["nlayers"] = sizes["pp"] * round(float(row["nlayers_implied_by_size"] or 0) / sizes["pp"])
    name = f"line {row['line']}: {sizes['nlayers']} x {sizes['nhidden']}, {sizes['nheads']} heads, {gpus} GPUs: "
    name += f"tp{sizes['tp']} pp{sizes['pp']} dp{sizes['dp']}, micro-batch {sizes['mbs']}, batch {sizes['gbs']}"
    try:
        measured_s = float(row["sec_per_iteration"])
    except ValueError:
        return Skipped(name, "no time was measured")
    if sizes["dp"] * sizes["tp"] * sizes["pp"] != gpus:
        return Skipped(name, "its layout is one of another number of GPUs")
    if sizes["nhidden"] % sizes["nheads"]:
        return Skipped(name, f"{sizes['nheads']} heads do not divide {sizes['nhidden']}")
    shape = Shape(
        *(sizes["nlayers"], sizes["nhidden"], 4 * sizes["nhidden"], sizes["nheads"], sizes["nheads"]),
        *(250_880, 2048),
        **MEGATRON_GPT,
        positions="alibi",
        precision="master",  # DeepSpeed's BF16_Optimizer
    )
    words = [*megatron_words(sizes["dp"], sizes["tp"], 1, sizes["pp"], 1, sequence=False), again(FULL)]
    words += [deepspeed_cuts(sizes["nlayers"], sizes["pp"])]
    try:
        memory = float(row["memory_GB"]) * 1e9
    except ValueError:
        memory = None
    return Run(
        *(name, shape, sizes["gbs"], sizes["mbs"], sizes["dp"], joined(words)),
        *(f"{-(-gpus // 8)}x8xA100-opa", "fused", gpus, measured_s, memory),
        software=Software(blocking=True, synchronous=True, cuda_11=True),
    )


def _vtrain(row: Row) -> Run | Skipped:
    """Megatron-DeepSpeed of 2023: replicas, full recompute, 1F1B; scores and softmax are kernels of their own.

    Nothing overlaps, and gradients are all-reduced once a step (J. Bang et al., "vTrain", MICRO 2024).
    """
    columns = "# GPUs", "hidden size", "# layers", "attention heads", "sequence length"
    gpus, hidden, layers, heads, tokens = (int(row[key]) for key in columns)
    tensor, data, stages = (int(row[f"{word} parallelism"]) for word in ("tensor", "data", "pipeline"))
    batch, micro = int(row["global batch"]), int(row["micro batch"])
    name = f"{layers} x {hidden}, {gpus} GPUs: tp{tensor} pp{stages} dp{data}, micro-batch {micro}, batch {batch}"
    shape = Shape(
        *(layers, hidden, 4 * hidden, heads, heads, GPT2_PADDED, tokens),
        **MEGATRON_GPT,
        positions="learned",
    )
    words = [
        f"dp{data}" if data > 1 else "",
        f"tp{tensor}" if tensor > 1 else "",
        f"pp{stages} 1f1b" if stages > 1 else "",
        again(FULL),
    ]
    return Run(
        *(name, shape, batch, micro, data, joined(words), hosts(gpus, "A100"), "fused"),
        *(gpus, float(row["iteration time (ms)"]) / 1e3),
        software=Software(blocking=True),
    )


def _megatron_ci(row: Row) -> Run | Skipped:
    """Megatron-LM's own functional tests: peaks of the last rank, in bytes; their times are those of the host.

    Options that are not given have Megatron's defaults: learned positions, biases, dropout of 0.1, a tied table.
    """
    name = f"{row['test']} on {row['device']}"
    if row["second_half_of_resume"] == "True" or row["same_series_also_filed_under_other_device_or_test"]:
        return Skipped(name, "filed twice")
    unknown = (
        *("mtp_num_layers", "hybrid_layer_pattern", "fp8_format", "spec"),
        *("use_megatron_fsdp", "use_torch_fsdp2", "pipeline_model_parallel_layout"),
        *("data_parallel_sharding_strategy", "step_batch_size_schedule", "cuda_graph_impl"),
    )
    other = next((word for word in ("frozen", "distill") if word in row["test"]), "")
    if not row["test"].startswith(("gpt/", "moe/", "mixtral/")) or any(row[key] for key in unknown) or other:
        used = [key for key in unknown if row[key]]
        return Skipped(name, f"not built: {', '.join(used) or other or row['test'].split('/')[0]}")
    if "uneven" in row["test"]:
        return Skipped(name, "layers of stages are not listed")
    experts, why = megatron_experts(row)
    if why:
        return Skipped(name, why)
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tensor, stages, context = (int(row[key] or 1) for key in keys)
    # Where a recipe is not listed: all that are have eight GPUs, but for those of one node with four.
    gpus = int(row["nodes"] or 1) * int(row["gpus_per_node"] or 8)
    layers = int(row["num_layers"])
    replicas = gpus // (tensor * stages * context)
    each = row["num_layers_per_virtual_pipeline_stage"]
    chunks = layers // stages // int(each) if each else int(row["num_virtual_stages_per_pipeline_rank"] or 1)
    hidden, heads = int(row["hidden_size"]), int(row["num_attention_heads"])
    is_gated = bool(row["swiglu"])
    # A gate has the parameters of a network without one (megatron/training/arguments.py).
    inner = 8 * hidden // 3 // 64 * 64 if is_gated else 4 * hidden
    padded = 128 * tensor
    shape = Shape(
        *(layers, hidden, int(row["ffn_hidden_size"] or inner), heads, int(row["num_query_groups"] or heads)),
        *(-(-int(row["vocab_size"] or 50_257) // padded) * padded, int(row["seq_length"])),
        gate=is_gated,
        activation="silu" if is_gated else "relu2" if row["squared_relu"] else "gelu",
        norm="rms" if row["normalization"] == "RMSNorm" else "layer",
        positions="rotary" if row["position_embedding_type"] == "rope" else "learned",
        biases=not row["disable_bias_linear"],
        tied=not row["untie_embeddings_and_output_weights"],
        flash=row["transformer_impl"] == "transformer_engine" and row["attention_backend"] != "unfused",
        dropout=float(row["attention_dropout"] or 0.1),
        # Gradients are added up in float32 for bfloat16 alone (megatron/training/arguments.py), else in 16 bits.
        precision="master" if row["bf16"] else "master-bf16-reduce",
        head_norms=bool(row["qk_layernorm"]) and not row["multi_latent_attention"],
        head=int(row.get("kv_channels") or 0),
        experts=experts,
        latent=megatron_latent(row),
    )
    spread = int(row["expert_model_parallel_size"] or 1) if experts else 1
    instances = int(row["num_distributed_optimizer_instances"] or 1)
    if replicas // instances % spread:
        return Skipped(name, BEYOND_REPLICAS)
    is_cut = bool(row["sequence_parallel"])
    words = megatron_words(replicas // instances, tensor, context, stages, chunks, is_cut, spread)
    words = [word if row["use_distributed_optimizer"] else word.replace(" zero1", "") for word in words]
    words += [again(FULL if row["recompute_granularity"] == "full" else "")]
    tables = "account_for_embedding_loss" in row["test"]
    words += [even_cuts(layers, stages * chunks, "_to_copy" if shape.norm == "rms" else "native_layer_norm", tables)]
    kind = {"dgx_a100": "A100", "dgx_h100": "H100", "dgx_gb200": "B200"}[row["device"]]
    has_engine = row["transformer_impl"] == "transformer_engine"
    extra = workspaces(kind, has_engine, bool(row["deterministic_mode"]), bool(experts and row["moe_grouped_gemm"]))
    if row["cross_entropy_loss_fusion"]:
        # Inductor writes the exponentials of float32 logits to a buffer of their own and copies them back, as
        # megatron/core/fusions/fused_cross_entropy.py @ 0cb4a9c8 says of what it replaces.
        extra += 4 * int(row["micro_batch_size"]) * shape.tokens // context * (shape.vocabulary // tensor)
    if "defer_embedding_wgrad" in row["test"]:
        # Gradients of the logits, and what was multiplied by the table, of so many micro-batches wait for the end of
        # the step (megatron/core/tensor_parallel/layers.py, grad_output_buffer and embedding_activation_buffer).
        rows = int(row["micro_batch_size"]) * shape.tokens
        extra += DEFERRED * 2 * rows * (shape.vocabulary // tensor + hidden // (tensor if is_cut else 1))
    return Run(
        *(name, shape, int(row["global_batch_size"]), int(row["micro_batch_size"]), replicas),
        joined([f"dp{instances}" if instances > 1 else "", *words]),
        *(f"8x{kind}-nvswitch", "fused", gpus, math.nan, float(row["mem_max_allocated_bytes"])),
        software=Software(workspace_bytes=extra),
        last_rank=True,
    )


FORMATS: tuple[tuple[set[str], Callable[[Row], Run | Skipped]], ...] = (
    ({"MicroBatchSize", "GradAccum", "Sharding Strategy", "expansion_ratio", "Throughput (T/s)"}, _llm_foundry),
    ({"local_batch", "dp_shard(fsdp)", "activation_checkpointing", "tokens_per_s_per_gpu", "compile"}, _torchtitan),
    ({"framework", "precision", "mbs", "gbs", "layers", "step_s", "vp", "kv_heads"}, _dgxc),
    ({"case", "micro_batch", "num_microbatches", "step_ms", "max_alloc_gib", "kv_heads"}, _simumax),
    ({"nlayers", "nhidden", "nheads", "sec_per_iteration", "zero_stage"}, _bloom),
    ({"test", "mem_max_allocated_bytes", "tensor_model_parallel_size", "use_distributed_optimizer"}, _megatron_ci),
    ({"# GPUs", "global batch", "micro batch", "pipeline parallelism", "iteration time (ms)"}, _vtrain),
)

# Grattafiori et al., "The Llama 3 herd of models", 2024, table 3.
LLAMA = {
    "llama3.1_8b": Shape(32, 4096, 14_336, 32, 8, 128_256, 8192),
    "llama3.1_70b": Shape(80, 8192, 28_672, 64, 8, 128_256, 8192),
    "llama3.1_405b": Shape(126, 16_384, 53_248, 128, 8, 128_256, 8192),
}
LLAMA |= {name.replace("llama3.1", "llama3"): shape for name, shape in LLAMA.items()}


def runs_in(folder: Path) -> Iterator[tuple[Path, list[Run | Skipped]]]:
    """Every file of a folder whose format is known, by name."""
    for path in sorted(folder.glob("*.csv")):
        rows = read(path)
        if rows is not None:
            yield path, rows
