"""What every measured run has, and words of its strategy as frameworks lay a model out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from truth_experts import Experts, Latent
from truth_models import Shape

MIB, GIB = 2**20, 2**30
# Where `ep` is more than the replicas, experts are spread over ranks of tensor or context parallelism, too.
BEYOND_REPLICAS = "experts are spread over more ranks than there are replicas, which no strategy says"
# Defaults of megatron/training/arguments.py: widths of what queries, and keys and values, are made of, and of heads.
_LATENT = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}

Row = Mapping[str, str]


@dataclass(frozen=True)
class Software:
    """By what a framework differs from today's.

    Attributes:
        flash_1: attention is FlashAttention 1, half as fast as 2.
        flash_2: attention is FlashAttention 2 where torch has cuDNN's now.
        blocking: nothing is computed while collectives run.
        synchronous: the host waits for each kernel before it launches the next one (``CUDA_LAUNCH_BLOCKING=1``).
        cuda_11: bfloat16 products whose rows are no multiples of 16 bytes are far slower than today's.
        pipelined_products: what tensor parallelism exchanges is sent in pieces, beside the products at its ends.
        workspace_bytes: that libraries hold on each device beside the step's tensors, and that count as allocated.
    """

    flash_1: bool = False
    flash_2: bool = False
    blocking: bool = False
    synchronous: bool = False
    cuda_11: bool = False
    pipelined_products: bool = False
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Run:
    """One measured run.

    Attributes:
        name: model, machine and layout in short.
        shape: of the model.
        batch: sequences of one step.
        micro_batch: sequences of one micro-batch on one replica.
        replicas: how many there are.
        strategy: text without micro-batches, which `micro_batches` says.
        cluster: name of a preset, ``"HOSTSx8x..."`` for several hosts.
        stack: how ops become kernels.
        measured_s: seconds of a step; NaN where only memory was measured.
        measured_bytes: peak of the fullest device, allocated or, by torchtitan, reserved; None where nobody said.
        software: by what it differs from today's.
        last_rank: `measured_bytes` are of the last stage.
    """

    name: str
    shape: Shape
    batch: int
    micro_batch: int
    replicas: int
    strategy: str
    cluster: str
    stack: str
    gpus: int
    measured_s: float
    measured_bytes: float | None = None
    software: Software = Software()
    last_rank: bool = False

    @property
    def micro_batches(self) -> int:
        return max(round(self.batch / (self.micro_batch * self.replicas)), 1)

    @property
    def workload(self) -> tuple[object, ...]:
        """What is trained on what: runs of one workload are layouts of it."""
        return self.shape, self.batch, self.gpus, self.cluster


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be built, and why."""

    name: str
    reason: str


def workspaces(kind: str, has_engine: bool, is_deterministic: bool, has_groups: bool = False) -> int:
    """Bytes of cuBLAS's workspaces: torch has one for each thread, which are that of the forward and of the backward
    pass, and Transformer Engine one of its own, and for products by groups one for each of four streams.

    Of torch: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; Megatron's deterministic mode asks
    for ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` (megatron/training/arguments.py). Of Transformer Engine:
    transformer_engine/pytorch/module/base.py, get_cublas_workspace_size_bytes, get_multi_stream_cublas_workspace.
    """
    is_new = kind in ("H100", "B200")
    own = 32 * MIB if is_new or is_deterministic else 2 * 4 * MIB + 8 * 16 * 1024
    engine = 32 * MIB if is_new else 4 * MIB
    return 2 * own + (has_engine + 4 * has_groups) * engine


def even_cuts(layers: int, stages: int, first_op: str = "_to_copy", tables: bool = False) -> str:
    """Where Megatron cuts a pipeline: equally many layers in each stage, whatever comes before and after them.

    Args:
        tables: the embedding and the loss count as a layer each (``account_for_embedding_in_pipeline_split``).
    """
    each = (layers + 2 * tables) // stages
    begins = range(each - tables, layers + tables, each) if stages > 1 and each * stages == layers + 2 * tables else ()
    names = (f"layers.{layer}.norm" if layer < layers else "norm" for layer in begins)
    return "cuts=" + "+".join(f"{name}/{first_op}" for name in names) if begins else ""


def deepspeed_cuts(layers: int, stages: int) -> str:
    """Where DeepSpeed cuts a pipeline of so many layers: stages are as full as the fullest, and the last has the rest.

    Its two tables count as a layer each (``type:transformer|embedding``) where layers come out even that way alone.
    """
    tables = layers % stages != 0 and (layers + 2) % stages == 0
    each = -(-(layers + 2 * tables) // stages)
    begins = range(each - tables, layers, each)
    return "cuts=" + "+".join(f"layers.{layer}.norm/native_layer_norm" for layer in begins) if stages > 1 else ""


def megatron_words(
    replicas: int, tensor: int, context: int, stages: int, chunks: int, sequence: bool = True, spread: int = 1
) -> list[str]:
    """Segments of a strategy, with Megatron's distributed optimizer.

    Args:
        spread: replicas among which experts are spread (``expert_model_parallel_size``).
    """
    order = f"interleaved v{chunks}" if chunks > 1 else "1f1b"
    sizes = {"dp": replicas // spread, "ep": spread, "cp": context}
    split = next((name for name, size in sizes.items() if size > 1), "")
    return [
        *(f"{name}{size}{' zero1' if name == split else ''}" if size > 1 else "" for name, size in sizes.items()),
        f"tp{tensor}{' sp' if sequence else ''}" if tensor > 1 else "",
        f"pp{stages} {order}" if stages > 1 else "",
    ]


def megatron_experts(row: Row) -> tuple[Experts | None, str]:
    """``(experts of one of Megatron's tests, "")``, None without any; or why they cannot be built."""
    number = int(row["num_experts"] or 0)
    if number < 2:
        return None, ""
    tensor = int(row["tensor_model_parallel_size"] or 1)
    if tensor > 1 and (row["expert_tensor_parallel_size"] or str(tensor)) != str(tensor):
        return None, BEYOND_REPLICAS
    # "([0]*3+[1]*12)": layers with one network, and layers with experts
    stretches = re.findall(r"\[([01])\]\*(\d+)", row["moe_layer_freq"])
    is_known = row["moe_layer_freq"] in ("", "1") or [kind for kind, _ in stretches] in (["1"], ["0", "1"])
    if not is_known:
        return None, f"layers with experts by {row['moe_layer_freq']!r} are not built"
    dense = int(stretches[0][1]) if stretches and stretches[0][0] == "0" else 0
    inner = int(row["moe_ffn_hidden_size"] or row["ffn_hidden_size"] or 4 * int(row["hidden_size"]))
    shared = int(row["moe_shared_expert_intermediate_size"] or 0)
    return Experts(number, int(row["moe_router_topk"] or 2), inner, shared, dense), ""


def megatron_latent(row: Row) -> Latent | None:
    """Latent attention of one of Megatron's tests, with Megatron's defaults; None without."""
    if not row["multi_latent_attention"]:
        return None
    sizes = [int(row[key] or usual) for key, usual in _LATENT.items()]
    return Latent(*sizes, has_norms=bool(row["qk_layernorm"]))


def again(pattern: str) -> str:
    return f"recompute={pattern}" if pattern else ""


def joined(words: list[str]) -> str:
    return " | ".join(word for word in words if word)


def hosts(gpus: int, kind: str) -> str:
    """The preset with so many GPUs, eight a host; a host of eight where they are fewer."""
    hosts = math.ceil(gpus / 8)
    return f"8x{kind}-nvswitch" if hosts == 1 else f"{hosts}x8x{kind}-ib"


def true(text: str) -> bool:
    return text.strip().lower() in ("true", "1", "yes")
