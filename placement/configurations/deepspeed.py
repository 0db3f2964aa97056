"""Configurations of DeepSpeed: the JSON that ``deepspeed.initialize`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from graphs.recipes import PRECISIONS, number_bytes
from graphs.transforms.strategy import AFTER_ALL, OPTIMIZER, PARAMETERS, Strategy
from placement.configurations.configuration import (
    NONE,
    Configuration,
    FileValues,
    Format,
    Key,
    inert,
    inert_keys,
    only,
    read,
    refused,
    said,
    words,
)
from placement.configurations.documents import nested, read_json
from placement.configurations.results import (
    configuration_of,
    irregular,
    other_weights,
    reduced_once,
    refuse,
    refuse_unsaid,
    uneven,
)

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from placement.results.result import Result

_Z = "zero_optimization."
_STAGE, _OVERLAP = f"{_Z}stage", f"{_Z}overlap_comm"
_REDUCED, _PREFETCHED = f"{_Z}reduce_bucket_size", f"{_Z}stage3_prefetch_bucket_size"
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OF_MODEL = "it acts in models alone that call deepspeed.checkpointing, which no configuration says"
_QUANTISED = "exchanges in fewer bits are not modelled"

_KEYS: dict[str, Key] = {
    _BATCH: read(int, auto=True, field="batch"),
    _MICRO: read(int, auto=True, field="micro_batch"),
    _STEPS: read(int, auto=True, field="accumulation"),
    "bf16.enabled": read(bool, False, auto=True),
    "bf16.bf16_master_weights_and_grads": only(False, why="weights have a copy in float32"),
    "bf16.*": inert,
    "fp16.enabled": read(bool, False, auto=True),
    "fp16.fp16_master_weights_and_grads": only(False, why="weights have a copy in float32"),
    "fp16.*": inert,
    "amp.enabled": only(False, why="apex is not modelled"),
    "amp.*": inert,
    "torch_autocast.enabled": only(False, why="weights and gradients are those of bf16 or fp16"),
    "torch_autocast.*": inert,
    "data_types.grad_accum_dtype": read(str, None, "fp32", "bf16", "fp16"),
    "communication_data_type": only(None, "bf16", "fp16", why="gradients travel in the format of the model"),
    "optimizer.type": words("optimizer", None, {name: word for word, name in _OPTIMIZERS.items()}),
    "optimizer.*": inert,
    "scheduler.*": inert,
    _STAGE: read(int, 0, 0, 1, 2, 3, field="zero"),
    _OVERLAP: read(bool, auto=True),
    _REDUCED: read(int, 500_000_000, auto=True),
    f"{_Z}allgather_bucket_size": inert,
    _PREFETCHED: inert,
    f"{_Z}allgather_partitions": only(True, why="parameters are gathered, not broadcast"),
    f"{_Z}reduce_scatter": only(True, "auto", why="gradients are scattered, not all-reduced"),
    f"{_Z}contiguous_gradients": only(True, "auto", why="gradients lie one behind the other"),
    f"{_Z}offload_optimizer.device": read(str, "none", "none", "cpu", auto=True),
    f"{_Z}offload_optimizer.ratio": only(1.0, why="all of the optimizer is on the host"),
    f"{_Z}offload_optimizer.*": inert,
    f"{_Z}offload_param.device": read(str, "none", "none", "cpu", auto=True),
    f"{_Z}offload_param.*": inert,
    f"{_Z}cpu_offload": only(False, why="it is now offload_optimizer.device"),
    f"{_Z}zero_hpz_partition_size": only(1, why="a second copy of the parameters in each host is not modelled"),
    f"{_Z}zero_quantized_weights": only(False, why=_QUANTISED),
    f"{_Z}zero_quantized_nontrainable_weights": only(False, why=_QUANTISED),
    f"{_Z}zero_quantized_gradients": only(False, why=_QUANTISED),
    f"{_Z}mics_shard_size": only(-1, why="groups of MiCS are not read"),
    f"{_Z}mics_hierarchical_params_gather": only(False, why="groups of MiCS are not read"),
    **inert_keys(
        "round_robin_gradients sub_group_size ignore_unused_parameters legacy_stage1 "
        "max_live_parameters max_reuse_distance model_persistence_threshold "
        "gather_16bit_weights_on_model_save "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint memory_efficient_linear param_persistence_threshold "
        "stage3_model_persistence_threshold use_multi_rank_bucket_allreduce log_trace_cache_warnings",
        _Z,
    ),
    "activation_checkpointing.partition_activations": only(False, why=_OF_MODEL),
    "activation_checkpointing.cpu_checkpointing": only(False, why=_OF_MODEL),
    "activation_checkpointing.*": inert,
    "tensor_parallel.autotp_size": read(int, 1, field="tensor"),
    "tensor_parallel.*": inert,
    "sequence_parallel_size": read(int, 1, field="context"),
    "pipeline.*": refused("stages are those of the model's PipelineModule, which no configuration says"),
    "compression_training.*": refused("compressed models are other models"),
    "sparse_attention.*": refused("sparse attention makes another model"),
    "elasticity.enabled": only(False, why="batches that follow the number of devices are not read"),
    "elasticity.*": inert,
    "curriculum_learning.enabled": only(False, why="samples change their length"),
    "curriculum_learning.*": inert,
    "data_efficiency.enabled": only(False, why="samples change their length"),
    "data_efficiency.*": inert,
    "compile.*": refused("torch.compile inside of DeepSpeed is not modelled"),
    "prescale_gradients": inert,
    "gradient_predivide_factor": inert,
    "gradient_clipping": inert,
    "sparse_gradients": only(False, why="gradients of tables are dense"),
    **inert_keys(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown disable_allgather seed "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last "
        "graph_harvesting seq_parallel_communication_data_type use_data_before_expert_parallel_ "
        "load_universal_checkpoint"
    ),
    **inert_keys(
        "flops_profiler.* tensorboard.* wandb.* csv_monitor.* comet.* comms_logger.* aio.* autotuning.* "
        "checkpoint.* nebula.* data_sampling.*"
    ),
}
FORMAT = Format("DeepSpeed", "configuration JSON of DeepSpeed 0.17", _KEYS)


def read_deepspeed(text: str) -> Configuration:
    """A configuration as JSON.

    Raises:
        ConfigurationError: no JSON, or a key or value that is not understood.
    """
    given = read_json(text)
    # The field's own name, which DeepSpeed takes beside its alias.
    short = _PREFETCHED.replace("stage3_", "")
    values = FORMAT.values({_PREFETCHED if name == short else name: each for name, each in given.items()})
    for name in (_BATCH, _MICRO, _STEPS, "tensor_parallel.autotp_size", "sequence_parallel_size", _REDUCED):
        values.at_least(name)
    is_float16, is_bfloat16 = values["fp16.enabled"], values["bf16.enabled"]
    if is_float16 and is_bfloat16:
        raise values.error("fp16 and bf16 are both enabled; expected one of them.", "fp16.enabled")
    precision = _precision(values, bool(is_float16 or is_bfloat16))
    zero, others = values[_STAGE], dict(values.others)
    is_on_hosts = values[f"{_Z}offload_optimizer.device"] == "cpu"
    if is_on_hosts and not zero:
        raise values.error(
            f"{_Z}offload_optimizer needs stage 1, 2 or 3, and the stage is 0.", f"{_Z}offload_optimizer.device"
        )
    has_parameters = values[f"{_Z}offload_param.device"] == "cpu"
    if has_parameters and not (is_on_hosts and zero == 3):
        raise values.error(
            f"{_Z}offload_param is read with stage 3 and with offload_optimizer, whose updates are on the host, too.",
            f"{_Z}offload_param.device",
        )
    overlaps = values[_OVERLAP]
    return Configuration(
        **values.fields(),
        tool="deepspeed",
        context_by="ulysses" if values["sequence_parallel_size"] > 1 else "",
        precision=precision,
        is_float16=bool(is_float16),
        offload=(PARAMETERS,) if has_parameters else (OPTIMIZER,) if is_on_hosts else (),
        bucket_bytes=values[_REDUCED] * _gradient_bytes(precision) if _REDUCED in values.given else None,
        overlaps=zero == 3 if overlaps is None or not zero else overlaps,
        others=others,
        notes=tuple(_notes(values, zero, overlaps)),
        lines=values.lines,
    )


def _precision(values: FileValues, is_narrow: bool) -> str | None:
    if is_narrow:
        return "master" if values["data_types.grad_accum_dtype"] == "fp32" else "master-bf16-reduce"
    return None if "auto" in (values.others.get("bf16.enabled"), values.others.get("fp16.enabled")) else "float32"


def _gradient_bytes(precision: str | None) -> int:
    """Bytes of a number, by which DeepSpeed counts buckets; where the precision is left to the trainer, 2."""
    return number_bytes(PRECISIONS[precision or "bfloat16"].gradient)


# Values that the trainer gives in the place of "auto", as Hugging Face's accelerate and transformers do.
_ASSUMED = {
    _BATCH: "that of the model",
    _STEPS: "1 unless the batch says otherwise",
    "bf16.enabled": "true unless --precision says otherwise",
    "fp16.enabled": "the opposite of bf16.enabled",
    _OVERLAP: "the default of the stage",
    _REDUCED: "the square of the width of the layers",
}


def _notes(values: FileValues, zero: int, overlaps: bool | None) -> Iterator[str]:
    told = [f"{name} as {words}" for name, words in _ASSUMED.items() if values.others.get(name) == "auto"]
    if told:
        yield f"auto leaves to the trainer, and here are predicted: {', '.join(told)}"
    if zero == 2 and not overlaps:
        yield "without overlap_comm gradients are reduced while nothing computes, so the step is slower than told"
    yield "a configuration of DeepSpeed does not say what the model recomputes: nothing, as it is predicted"


# -- written -----------------------------------------------------------------------------------------------------


def document(configuration: Configuration) -> dict[str, Any]:
    """The configuration as JSON values.

    Raises:
        MismatchError: what DeepSpeed has no words for.
    """
    found = configuration
    refuse_unsaid("DeepSpeed", _unsaid(found))
    is_narrow = found.precision in ("master", "master-bf16-reduce")
    given = {
        **FORMAT.told(found),
        "bf16.enabled": is_narrow and not found.is_float16,
        "fp16.enabled": is_narrow and found.is_float16,
        "data_types.grad_accum_dtype": "fp32" if found.precision == "master" else None,
        _OVERLAP: None if not found.zero or found.overlaps == (found.zero == 3) else found.overlaps,
        _REDUCED: None if found.bucket_bytes is None else found.bucket_bytes // _gradient_bytes(found.precision),
        f"{_Z}offload_optimizer.device": "cpu" if found.offload else None,
        f"{_Z}offload_param.device": "cpu" if PARAMETERS in found.offload else None,
    }
    return nested(said(FORMAT, given, found.others, (_STAGE, _REDUCED)))


def write_deepspeed(configuration: Configuration) -> str:
    """The configuration as JSON.

    Raises:
        MismatchError: what DeepSpeed has no words for.
    """
    return json.dumps(document(configuration), indent=2) + "\n"


def _unsaid(found: Configuration) -> Iterator[str]:
    """Reasons why DeepSpeed cannot say it."""
    if found.groups > 1:
        yield f"it splits storage in {found.groups} groups of replicas, each for itself"
    if found.stages > 1 or found.experts > 1:
        yield "pipelines and experts are the model's own"
    if found.precision not in (None, "float32", "master", "master-bf16-reduce"):
        yield f"it has no precision {found.precision}"
    if found.recompute != NONE:
        yield "the model itself must say what it recomputes"
    if found.optimizer not in (None, *_OPTIMIZERS):
        yield f"it has no optimizer {found.optimizer}"


def deepspeed(result: Result) -> dict[str, Any]:
    """A strategy as the configuration that ``deepspeed.initialize`` takes: ZeRO and gradient accumulation.

    Raises:
        MismatchError: a strategy that such a configuration has no words for.
    """
    refuse("a DeepSpeed configuration", result, deepspeed_lacks(result))
    return document(planned(configuration_of(result, "deepspeed")))


def planned(found: Configuration) -> Configuration:
    """A strategy's configuration in DeepSpeed's own formats, with what else it has to say."""
    is_narrow = found.precision not in (None, "float32")
    precision = "master-bf16-reduce" if is_narrow else "float32"
    others: dict[str, Any] = {}
    if found.zero:
        elements = max((found.bucket_bytes or 0) // _gradient_bytes(found.precision), 1)  # DeepSpeed counts numbers
        others = {f"{_Z}contiguous_gradients": True} | ({_PREFETCHED: elements} if found.zero == 3 else {})
        found = replace(found, bucket_bytes=elements * _gradient_bytes(precision))
    else:
        found = replace(found, bucket_bytes=None)
    optimizer = found.optimizer if found.optimizer in _OPTIMIZERS else None
    others |= {"optimizer.params": {"lr": 1e-3}} if optimizer else {}
    return replace(found, precision=precision, optimizer=optimizer, overlaps=found.zero > 0, others=others)


def reduced_at_the_end(graph: OpGraph, strategy: Strategy) -> Strategy:
    """A strategy as DeepSpeed runs it: without ZeRO it reduces gradients after the whole backward pass."""
    is_late = not strategy.zero and strategy.replicas > 1
    return replace(strategy, bucket_bytes=AFTER_ALL) if is_late else strategy


def deepspeed_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that DeepSpeed has no words for; it need not have been carried out."""
    graph, strategy = result.graph, result.strategy
    yield from chain(irregular(strategy), reduced_once(strategy), other_weights("DeepSpeed", graph))
    if any(rule.name == "tp" and rule.size > 1 for rule in strategy.mesh) or strategy.stages > 1:
        yield "it has no settings for tensor parallelism and pipelines, which the model itself must bring"
    if strategy.offloaded_activations:
        yield "the model itself must say which activations go to the host"
    if strategy.offloads_optimizer and not strategy.zero:
        yield f"it offloads what ZeRO splits; take {'zero3' if strategy.offloads_parameters else 'zero1 or zero2'}"
    if strategy.recompute:
        yield "the model itself must say what it recomputes"
    if graph.origin.batch_size is None:
        yield "a batch has an unknown number of samples, and it needs parts of the same size; take another batch"
    if strategy.zero and not strategy.bucket_bytes:
        yield f"it divides by {_REDUCED}, so that no bucket at all is none of its settings; leave out 'bucket=0'"
    yield from uneven(graph, strategy)
