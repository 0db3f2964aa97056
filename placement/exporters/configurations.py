"""Strategies as configurations of accelerate and DeepSpeed, where these have words for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.strategy import Strategy
from placement.exporters.hosts import hosts_of
from placement.exporters.whole_batch import no_mean_of_parts

if TYPE_CHECKING:
    from placement.results.result import Result

_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_DEEPSPEED_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}


def accelerate(result: Result) -> dict[str, Any]:
    """The file that ``accelerate launch --config_file`` takes: DDP, FSDP2, or Megatron-LM for tensors and stages.

    Raises:
        MismatchError: a strategy that accelerate has no words for, or a cluster without GPUs.
    """
    _check_training(result)
    strategy = result.strategy
    if not any(device.kind == "gpu" for device in result.cluster.devices):
        raise MismatchError(
            f"cluster {show(result.cluster.name)} has no GPU, and without MPI accelerate starts one process alone on "
            "CPUs; --to torch writes a script."
        )
    sizes = _sizes(strategy)
    is_megatron = sizes["tp"] > 1 or strategy.stages > 1
    reasons = _not_megatron(result.graph, strategy) if is_megatron else _not_fsdp(result.graph, strategy)
    _refuse("an accelerate configuration", strategy, reasons)
    hosts = hosts_of(result, strategy)
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _autocast(result.graph) or "no",  # weights stay in the model's own format
        "num_machines": len(hosts),
        "num_processes": strategy.devices,
        "use_cpu": False,
    }
    if len(hosts) > 1:
        found |= {"main_process_ip": hosts[0], "main_process_port": 29500, "rdzv_backend": "c10d"}
    if is_megatron:
        found["distributed_type"] = "MEGATRON_LM"
        found["megatron_lm_config"] = {
            "megatron_lm_tp_degree": sizes["tp"],
            "megatron_lm_pp_degree": strategy.stages,
            "megatron_lm_num_micro_batches": strategy.micro_batches,
            "megatron_lm_sequence_parallelism": any(rule.sequence for rule in strategy.mesh),
            "megatron_lm_recompute_activations": False,
            "megatron_lm_use_distributed_optimizer": strategy.zero == 1,
        }
    elif strategy.zero:
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": strategy.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # the model's own `_no_split_modules`
            "fsdp_activation_checkpointing": bool(strategy.recompute),
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return found


def deepspeed(result: Result) -> dict[str, Any]:
    """The configuration that ``deepspeed.initialize`` takes: ZeRO and gradient accumulation.

    Raises:
        MismatchError: a strategy that such a configuration has no words for.
    """
    _check_training(result)
    strategy, graph = result.strategy, result.graph
    _refuse("a DeepSpeed configuration", strategy, _not_deepspeed(graph, strategy))
    dtype, batch, replicas = _dtype(graph), graph.origin.batch_size, _sizes(strategy)["dp"]
    if batch is None or batch % (replicas * strategy.micro_batches):
        samples = "an unknown number of" if batch is None else batch
        raise MismatchError(
            f"a batch has {samples} samples, and a DeepSpeed configuration needs {replicas * strategy.micro_batches} "
            "parts of the same size; take another batch or strategy."
        )
    found: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // (replicas * strategy.micro_batches),
        "gradient_accumulation_steps": strategy.micro_batches,
        "zero_optimization": {"stage": strategy.zero},
    }
    if strategy.zero:
        elements = max(strategy.bucket_bytes // _ELEMENT_BYTES.get(dtype, 4), 1)  # DeepSpeed counts numbers, not bytes
        found["zero_optimization"] |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": elements,
            ("stage3_prefetch_bucket_size" if strategy.zero == 3 else "allgather_bucket_size"): elements,
        }
    if strategy.offloads_optimizer:
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    autocast = _autocast(graph)
    if autocast is not None:
        found[autocast] = {"enabled": True}
    optimizer = _DEEPSPEED_OPTIMIZERS.get(graph.origin.optimizer or "")
    if optimizer is not None:
        found["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3}}
    return found


def _check_training(result: Result) -> None:
    """Raises: MismatchError: a configuration is of training, and the strategy for inference."""
    if result.graph.origin.train is False:
        raise MismatchError(
            f"strategy {show(result.strategy.text)} was found for inference, and these configurations are for "
            "training; find one for the training step, with train=True."
        )


def _sizes(strategy: Strategy) -> dict[str, int]:
    return {"dp": 1, "tp": 1, **{rule.name: rule.size for rule in strategy.mesh}}


def _dtype(graph: OpGraph) -> str:
    """The number format of most FLOPs of the forward pass."""
    flops: Counter[str] = Counter()
    for dtype, phase, amount in zip(graph.dtypes, graph.phase.tolist(), graph.flops.tolist(), strict=True):
        if phase == Phase.FORWARD:
            flops[dtype] += amount
    return flops.most_common(1)[0][0] if flops else "float32"


def _kept_in(graph: OpGraph) -> str:
    """The number format in which most weights are kept and updated."""
    kept = Counter(
        dtype for dtype, phase in zip(graph.dtypes, graph.phase.tolist(), strict=True) if phase == Phase.UPDATE
    )
    return kept.most_common(1)[0][0] if kept else "float32"


def _autocast(graph: OpGraph) -> str | None:
    """The format in which weights of float32 are computed with, in the tools' word for it; None without autocast."""
    return _PRECISION.get(_dtype(graph)) if _kept_in(graph) not in _PRECISION else None


def _refuse(what: str, strategy: Strategy, reasons: Iterator[str]) -> None:
    reason = next(reasons, None)
    if reason is not None:
        raise (
            MismatchError(
                f"strategy {show(strategy.text)} cannot be written as {what}: {reason}; --to torch writes a script."
            )
            if not strategy.is_none
            else MismatchError(
                f"this result is a placement and no strategy, which {what} could say; export it as a device_map."
            )
        )


def _irregular(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    """Parts of a strategy that neither tool has, in words."""
    if strategy.is_none:
        yield "it has nothing to say"
    for rule in strategy.mesh:
        if not AXES[rule.name].in_torch and rule.size > 1:
            yield f"there is no setting for {AXES[rule.name].label} ({rule.name}{rule.size})"
        if rule.name == GROUPS:
            yield f"it splits storage in {rule.size} groups of replicas, each for itself"
        if len(set(rule.shares)) > 1 or rule.modules or rule.tensor_modules:
            yield f"{rule} is not the same for all replicas and modules"
    reason = no_mean_of_parts(graph, strategy)
    if reason is not None:
        yield reason


def _not_offloaded(strategy: Strategy) -> Iterator[str]:
    if strategy.offloads_optimizer:
        yield "there is no setting for updates on hosts, which deepspeed has"
    if strategy.offloaded_activations:
        yield "there is no setting for activations on hosts"


def _not_fsdp(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    yield from _irregular(graph, strategy)
    yield from _not_offloaded(strategy)
    if strategy.zero == 1:
        yield "FSDP cuts gradients with the optimizer's state, as zero2 does"
    if strategy.micro_batches > 1:
        yield (
            f"gradients are accumulated by the training script, with Accelerator(gradient_accumulation_steps="
            f"{strategy.micro_batches})"
        )
    if strategy.recompute and ((strategy.recompute != ("*",) and not _is_all_layers(strategy)) or not strategy.zero):
        yield "a configuration recomputes all layers that FSDP wraps, or none"


def _is_all_layers(strategy: Strategy) -> bool:
    """Whether each pattern names all of a list of modules, as ``layers.*`` does."""
    return all(pattern.endswith(".*") and "*" not in pattern[:-1] for pattern in strategy.recompute)


def _not_megatron(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    yield from _irregular(graph, strategy)
    yield from _not_offloaded(strategy)
    yield from _other_weights("Megatron-LM", graph)
    if strategy.zero > 1:
        yield f"Megatron-LM cuts the optimizer's state alone, as zero1 does, not zero{strategy.zero}"
    if strategy.stages > 1 and (strategy.order != "1f1b" or strategy.cuts):
        yield "Megatron-LM runs stages of equally many layers in the order 1f1b"
    if strategy.recompute:
        yield "Megatron-LM recomputes the core of attentions by a setting of its own, not modules"


def _other_weights(what: str, graph: OpGraph) -> Iterator[str]:
    """A warning where the tool keeps other weights than were planned."""
    kept = _kept_in(graph)
    if kept in _PRECISION:
        yield (
            f"{what} keeps weights and optimizer state of {kept} models in float32, about twice the memory that was "
            "planned; place the model in float32 under torch.autocast"
        )


def _not_deepspeed(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    yield from _irregular(graph, strategy)
    yield from _other_weights("DeepSpeed", graph)
    if _sizes(strategy)["tp"] > 1 or strategy.stages > 1:
        yield "it has no settings for tensor parallelism and pipelines, which the model itself must bring"
    if strategy.offloaded_activations:
        yield "the model itself must say which activations go to the host"
    if strategy.offloads_optimizer and not strategy.zero:
        yield "it offloads what ZeRO splits; take zero1 or zero2"
    if strategy.recompute:
        yield "the model itself must say what it recomputes"
