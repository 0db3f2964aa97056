"""What every measured run has, how cells of a row are read, and words of strategies as frameworks lay a model out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from truth_experts import Experts, Latent
from truth_models import Shape

from graphs.recipes import PRECISIONS

MIB, GIB = 2**20, 2**30
MOST = 10**8  # no size of a model or of a run is more
BEYOND_REPLICAS = "experts are spread over some of the ranks of an axis, which no strategy says"
# Defaults of megatron/training/arguments.py: widths of what queries, and keys and values, are made of, and of heads.
_LATENT = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
# Presets by what tables call a GPU, the first that is found; GB200's GPU is a B200.
_KINDS = {
    **{r"a100.*(?<!\d)40 ?gb": "A100-40gb", "a100": "A100", r"h100.*96 ?gb": "H100-96gb", "h100": "H100"},
    **{r"(?<!g)h200": "H200", "b200": "B200"},
}


class NotBuilt(ValueError):
    """A row that cannot be built, and why."""


class Row(dict[str, str]):
    """Cells by column; a column that is not there is an empty cell."""

    def __missing__(self, key: str) -> str:
        return ""

    def whole(self, key: str, usual: int | None = None) -> int:
        """The whole number that a cell is or begins with (``"8 top 2"``), `usual` for one without (``""``, ``"n/a"``).

        Raises:
            NotBuilt: it has none, and nothing is usual; it is a fraction, or beyond any size.
        """
        found = re.match(r"\d+(?![\d.e])", self[key].replace(",", ""))
        number = float(found[0]) if found else self.amount(key)
        if not number >= 0:  # NaN, too
            if usual is None:
                raise NotBuilt(f"{key} {self[key]!r} is no number")
            return usual
        if number != number // 1 or number > MOST:
            raise NotBuilt(f"{key} {self[key]!r} is no size")
        return int(number)

    def amount(self, key: str) -> float:
        """The number that a cell is; NaN where it is none."""
        try:
            return float(self[key].replace(",", ""))
        except ValueError:
            return math.nan

    def memory(self, key: str, unit: float) -> float | None:
        """Bytes of a cell in `unit`; None where it has no number (``"OOM"``)."""
        found = self.amount(key) * unit
        return found if 0 < found < math.inf else None

    def says(self, key: str) -> bool:
        """Whether a cell says yes: anything but a word for no."""
        return self[key].lower() not in ("", "0", "0.0", "false", "no", "none", "-", "n/a")


def kind_of(gpu: str) -> str:
    """The preset's name of a GPU as a table calls it.

    Raises:
        NotBuilt: there is none.
    """
    found = next((kind for word, kind in _KINDS.items() if re.search(word, gpu.lower())), None)
    if found is None:
        raise NotBuilt(f"no preset of the GPU {gpu!r}")
    return found


def precision_of(word: str, usual: str) -> str:
    """The precision of a run whose table says `word`; `usual` is that of its framework's runs in 16 bits.

    Raises:
        NotBuilt: it is another one.
    """
    if re.search(r"fp8|float8", word.lower()):
        if f"{usual}-fp8" not in PRECISIONS:
            raise NotBuilt("fp8 is no precision yet")
        return f"{usual}-fp8"
    if not re.search(r"bf16|fp16|float16|half", word.lower()):
        raise NotBuilt(f"precision {word!r} is not built" if word else "its precision is not said")
    return usual


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
        name: model, machine and layout in short.
    """

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
    name: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether a time was measured, too."""
        return not math.isnan(self.measured_s)

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
    is_new = kind in ("H100", "H200", "B200")
    own = 32 * MIB if is_new or is_deterministic else 2 * 4 * MIB + 8 * 16 * 1024
    engine = 32 * MIB if is_new else 4 * MIB
    return 2 * own + (has_engine + 4 * has_groups) * engine


def cuts(sizes: Sequence[int], first_op: str, tables: bool = False) -> str:
    """Where a pipeline is cut whose stages have so many layers each; nothing for one stage.

    Args:
        tables: the embedding counts as a layer of the first stage.
    """
    begins = [layer - tables for layer in accumulate(sizes[:-1])]
    names = (f"layers.{layer}.norm" if layer < sum(sizes) - 2 * tables else "norm" for layer in begins)
    return "cuts=" + "+".join(f"{name}/{first_op}" for name in names) if begins else ""


def even_cuts(layers: int, stages: int, first_op: str = "_fused_rms_norm", tables: bool = False) -> str:
    """Where Megatron cuts a pipeline: equally many layers in each stage, whatever comes before and after them.

    Args:
        tables: the embedding and the loss count as a layer each (``account_for_embedding_in_pipeline_split``).
    """
    each, left = divmod(layers + 2 * tables, stages)
    return "" if left else cuts([each] * stages, first_op, tables)


def deepspeed_cuts(layers: int, stages: int) -> str:
    """Where DeepSpeed cuts a pipeline of so many layers: stages are as full as the fullest, and the last has the rest.

    Its two tables count as a layer each (``type:transformer|embedding``) where layers come out even that way alone.
    """
    tables = layers % stages != 0 and (layers + 2) % stages == 0
    each = -(-(layers + 2 * tables) // stages)
    begins = range(each - tables, layers, each)
    return "cuts=" + "+".join(f"layers.{layer}.norm/native_layer_norm" for layer in begins) if stages > 1 else ""


def replicas_of(gpus: int, *layout: int) -> int:
    """Replicas on so many GPUs, each of them on the product of `layout`.

    Raises:
        NotBuilt: that comes out uneven.
    """
    if gpus < 1 or gpus % math.prod(layout):
        raise NotBuilt(f"{gpus} GPUs are no multiple of the {math.prod(layout)} of its layout")
    return gpus // math.prod(layout)


def megatron_words(
    replicas: int,
    tensor: int,
    context: int,
    stages: int,
    chunks: int = 1,
    sequence: bool = True,
    spread: int = 1,
    sharded: str = "zero1",
    whole_experts: bool = False,
    once: bool = False,
) -> list[str]:
    """Segments of a strategy, with Megatron's distributed optimizer.

    Args:
        spread: ranks among which experts are spread (``expert_model_parallel_size``): those of tensor parallelism where
            it leaves experts whole, then replicas, and those of context parallelism where there are fewer of these.
        sharded: what replicas share, a word of ZeRO or none.
        whole_experts: tensor parallelism leaves experts whole (``expert_tensor_parallel_size`` of 1).
        once: tokens are sent to a host once (DeepEP).

    Raises:
        NotBuilt: they are spread over some of the ranks of an axis.
    """
    along = {"tp": whole_experts and tensor > 1 and spread > 1, "cp": False}
    if along["tp"] and spread % tensor:
        raise NotBuilt(BEYOND_REPLICAS)
    spread //= tensor if along["tp"] else 1
    if replicas % spread:
        along["cp"] = context > 1 and spread % context == 0
        spread //= context if along["cp"] else 1
    if replicas % spread:
        raise NotBuilt(BEYOND_REPLICAS)
    order = f"interleaved v{chunks}" if chunks > 1 else "1f1b"
    sizes = {"dp": replicas // spread, "ep": spread, "cp": context}
    split = next((name for name, size in sizes.items() if size > 1), "")
    words = {name: " experts" * along.get(name, False) for name in ("dp", "ep", "cp", "tp")}
    words["ep"] = " once" * once
    return [
        *(f"{n}{size}{words[n]} {sharded * (n == split)}".strip() for n, size in sizes.items() if size > 1),
        f"tp{tensor}{' sp' if sequence else ''}{words['tp']}" if tensor > 1 else "",
        f"pp{stages} {order}" if stages > 1 else "",
    ]


def megatron_experts(row: Row) -> Experts | None:
    """Experts of one of Megatron's tests, None without any.

    Raises:
        NotBuilt: which layers have experts is said in a way that is not built.
    """
    number = row.whole("num_experts", 0)
    if number < 2:
        return None
    # "([0]*3+[1]*12)": layers with one network, and layers with experts
    stretches = re.findall(r"\[([01])\]\*(\d+)", row["moe_layer_freq"])
    is_known = row["moe_layer_freq"] in ("", "1") or [kind for kind, _ in stretches] in (["1"], ["0", "1"])
    if not is_known:
        raise NotBuilt(f"layers with experts by {row['moe_layer_freq']!r} are not built")
    dense = int(stretches[0][1]) if stretches and stretches[0][0] == "0" else 0
    inner = row.whole("moe_ffn_hidden_size", row.whole("ffn_hidden_size", 4 * row.whole("hidden_size")))
    shared = row.whole("moe_shared_expert_intermediate_size", 0)
    return Experts(number, row.whole("moe_router_topk", 2), inner, shared, dense)


def megatron_latent(row: Row) -> Latent | None:
    """Latent attention of one of Megatron's tests, with Megatron's defaults; None without."""
    if not row.says("multi_latent_attention"):
        return None
    sizes = [row.whole(key, usual) for key, usual in _LATENT.items()]
    return Latent(*sizes, has_norms=row.says("qk_layernorm"))


def again(pattern: str) -> str:
    return f"recompute={pattern}" if pattern else ""


def joined(words: Sequence[str]) -> str:
    return " | ".join(word for word in words if word)


def hosts(gpus: int, kind: str) -> str:
    """The preset with so many GPUs, eight a host; a host of eight where they are fewer."""
    hosts = math.ceil(gpus / 8)
    return f"8x{kind}-nvswitch" if hosts == 1 else f"{hosts}x8x{kind}-ib"
