"""Job configurations of torchtitan: TOML, as torchtitan had them until its pull request 2386 of February 2026."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphs.errors import ConfigurationError
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import PARAMETERS
from placement.configurations.configuration import (
    EVERY,
    FULL,
    LAYERS_PER_STAGE,
    NONE,
    OPS,
    Configuration,
    FileValues,
    Format,
    Key,
    inert,
    inert_keys,
    only,
    read,
    said,
    words,
)
from placement.configurations.documents import read_toml, write_toml
from placement.configurations.results import (
    configuration_of,
    irregular,
    not_bucketed,
    reduced_once,
    refuse,
    refuse_unsaid,
    uneven,
)
from placement.configurations.strategies import layers as layers_in
from placement.configurations.strategies import own_cuts
from placement.runtime.setups.limits import no_sequence

if TYPE_CHECKING:
    from placement.results.result import Result

_ORDERS = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zbv"}
_WIDE, _NARROW = "float32", "bfloat16"
_P, _T, _A, _C = "parallelism.", "training.", "activation_checkpoint.", "compile."
_MICRO = f"{_P}pipeline_parallel_microbatch_size"
_FIRST_LESS = f"{_P}pipeline_parallel_first_stage_less_layers"
_LAST_LESS = f"{_P}pipeline_parallel_last_stage_less_layers"
_ROTATE = f"{_P}context_parallel_rotate_method"
_TWO_CHUNKS = ((2, "interleaved"), (2, "zbv"))
_AXES = ("cp", "ep", GROUPS)
_NOT_NARROW = "without FSDP torchtitan computes in float32 what tensor or pipeline parallelism cuts"
_ALWAYS = (f"{_T}local_batch_size", f"{_P}data_parallel_shard_degree", f"{_P}tensor_parallel_degree")
_NO_FLOAT8 = "no presets of graphs have the casts of float8"

_KEYS: dict[str, Key] = {
    f"{_T}local_batch_size": read(int, 8),
    f"{_T}global_batch_size": read(int, -1),
    f"{_T}seq_len": read(int, 2048, field="sequence"),
    f"{_T}dtype": read(str, _WIDE, _WIDE, _NARROW),
    f"{_T}mixed_precision_param": read(str, _NARROW, _NARROW, _WIDE),
    f"{_T}mixed_precision_reduce": only(_WIDE, why="torchtitan has no other"),
    f"{_T}enable_cpu_offload": read(bool, False),
    **inert_keys("dataset dataset_path max_norm steps gc_freq gc_debug seed deterministic dataloader.*", _T),
    f"{_P}data_parallel_replicate_degree": read(int, 1),
    f"{_P}data_parallel_shard_degree": read(int, -1),
    f"{_P}fsdp_reshard_after_forward": read(str, "default", "default", "always", "never"),
    f"{_P}tensor_parallel_degree": read(int, 1, field="tensor"),
    f"{_P}disable_loss_parallel": only(False, why="logits are cut along the vocabulary"),
    f"{_P}enable_async_tensor_parallel": read(bool, False),
    f"{_P}pipeline_parallel_degree": read(int, 1, field="stages"),
    f"{_P}pipeline_parallel_schedule": words("order", "1F1B", _ORDERS),
    _MICRO: read(int, 1),
    _FIRST_LESS: read(int, 1),
    _LAST_LESS: read(int, 1),
    f"{_P}pipeline_parallel_layers_per_stage": read(int),
    f"{_P}module_fqns_per_model_part": only(None, why="stages follow from the number of layers"),
    f"{_P}pipeline_parallel_schedule_csv": only("", None, why="schedules of one's own are not read"),
    f"{_P}pipeline_parallel_expert_parallel_overlap": inert,  # of DualPipeV alone, which is refused
    f"{_P}context_parallel_degree": read(int, 1, field="context"),
    f"{_P}context_parallel_load_balancer": only("headtail", why="parts of causal attention are even"),
    _ROTATE: words("context_by", "allgather", {"allgather": "", "alltoall": "ring"}),
    f"{_P}expert_parallel_degree": read(int, 1, field="experts"),
    f"{_P}expert_tensor_parallel_degree": only(1, why="experts are not cut by tensor parallelism beside replicas"),
    f"{_P}expert_parallel_comm_backend": words("once_a_host", "standard", {"standard": False, "deepep": True}),
    f"{_A}mode": read(str, "selective", "selective", "full", "none"),
    f"{_A}selective_ac_option": read(str, "2"),
    f"{_A}per_op_sac_force_recompute_mm_shapes_by_fqns": only(
        ["moe.router.gate"], [], why="all products but every other one are made again"
    ),
    **inert_keys("early_stop preserve_rng_state determinism_check debug", _A),
    **inert_keys("memory_budget visualize_memory_budget_pareto", _A),  # of that mode, which is refused
    f"{_C}enable": words("stack", False, {False: "eager", True: "compiled"}),
    f"{_C}components": only(["model", "loss"], ["loss", "model"], why="the whole step is compiled, or nothing"),
    f"{_C}backend": only("inductor", why="only Inductor's kernels are known"),
    "optimizer.name": words("optimizer", "AdamW", {"AdamW": "adamw", "Adam": "adam"}),
    "optimizer.implementation": only("fused", "foreach", why="updates of single parameters take a launch each"),
    "optimizer.early_step_in_backward": only(False, why="updates come after the backward pass"),
    **inert_keys("lr beta1 beta2 eps weight_decay", "optimizer."),
    "model.converters": only([], why=_NO_FLOAT8),
    **inert_keys("quantize.* float8.* mx.*"),  # of converters, which are refused
    **inert_keys("model.name model.flavor model.hf_assets_path model.tokenizer_path model.print_after_conversion"),
    "fault_tolerance.enable": only(False, why="replicas that come and go are not modelled"),
    "fault_tolerance.*": inert,
    "comm.mode": only("default", why="that mode trains nothing"),
    **inert_keys("job.* profiling.* metrics.* lr_scheduler.* checkpoint.* comm.* experimental.* validation.*"),
    **inert_keys("memory_estimation.* debug.*"),
}
FORMAT = Format("torchtitan", "TOML job configurations until pull request 2386 (JobConfig of January 2026)", _KEYS)


def read_torchtitan(text: str) -> Configuration:
    """A TOML job configuration.

    Raises:
        ConfigurationError: no TOML, or a key or value that is not understood.
    """
    if "Trainer.Config" in text or "TrainerConfig" in text:
        raise ConfigurationError(
            "this is Python of torchtitan after its pull request 2386, which is not read; give its values as the TOML "
            "of the versions before, such as '[parallelism]' and 'tensor_parallel_degree = 2'."
        )
    values = FORMAT.values(read_toml(text))
    for name, key in _KEYS.items():
        if key.kind is int:
            values.at_least(name, -1 if key.default == -1 else 0 if "less_layers" in name else 1)
    shards, batch = values[f"{_P}data_parallel_shard_degree"], values[f"{_T}global_batch_size"]
    for name, value in ((f"{_P}data_parallel_shard_degree", shards), (f"{_T}global_batch_size", batch)):
        if value == 0:
            raise values.error(f"{name} = 0; expected -1, or 1 or more.", name)
    stages = values[f"{_P}pipeline_parallel_degree"]
    context, groups = values[f"{_P}context_parallel_degree"], values[f"{_P}data_parallel_replicate_degree"]
    is_sharded = shards != 1 or context > 1  # FSDP cuts along its context parallelism, too
    each, others = values[f"{_P}pipeline_parallel_layers_per_stage"], dict(values.others)
    micro, accumulation = values[f"{_T}local_batch_size"], None
    if stages > 1:
        micro, accumulation = values[_MICRO], _parts(values, values[f"{_T}local_batch_size"], values[_MICRO])
    elif _MICRO in values.given:
        others[_MICRO] = values[_MICRO]  # which nobody reads
    kept = (f"{_P}enable_async_tensor_parallel", f"{_P}fsdp_reshard_after_forward")
    others |= {name: values[name] for name in kept if values[name] != FORMAT.keys[name].default}
    return Configuration(
        **values.fields(),
        tool="torchtitan",
        groups=groups if is_sharded else 1,
        shards=(None if shards == -1 else shards) if is_sharded else groups,
        zero=_zero(values, stages) if is_sharded else 0,
        sequence_parallel=values[f"{_P}tensor_parallel_degree"] > 1,
        edge_layers=(values[_FIRST_LESS], values[_LAST_LESS]),
        micro_batch=micro,
        accumulation=accumulation,
        batch=None if batch == -1 else batch,
        precision=_precision(values),
        offload=(PARAMETERS,) if is_sharded and values[f"{_T}enable_cpu_offload"] else (),
        recompute=_recompute(values),
        sizes={} if each is None else {LAYERS_PER_STAGE: each},
        others=others,
        notes=tuple(_notes(values)),
        lines=values.lines,
    )


def _parts(values: FileValues, samples: int, each: int) -> int:
    if samples % each:
        raise values.error(
            f"{_T}local_batch_size = {samples} has no whole number of micro-batches of {each} samples ({_MICRO}).",
            _MICRO,
            f"{_T}local_batch_size",
        )
    return samples // each


def _zero(values: FileValues, stages: int) -> int:
    """FSDP2 keeps parameters after the forward pass by default where there are stages."""
    reshards = values[f"{_P}fsdp_reshard_after_forward"]
    return 3 if reshards == "always" or (reshards == "default" and stages == 1) else 2


def _precision(values: FileValues) -> str:
    if values[f"{_T}dtype"] == _NARROW:
        return _NARROW
    return "mixed" if values[f"{_T}mixed_precision_param"] == _NARROW else _WIDE


def settled(configuration: Configuration) -> Configuration:
    """With all degrees known: neither FSDP nor autocast narrows what tensor parallelism or stages alone cut."""
    found = configuration
    if found.precision == "mixed" and not found.zero and found.tensor * found.stages > 1 and found.context == 1:
        return replace(found, precision=_WIDE, notes=(*found.notes, _NOT_NARROW))
    return found


def _recompute(values: FileValues) -> str:
    mode, option = values[f"{_A}mode"], values[f"{_A}selective_ac_option"]
    if mode != "selective":
        return NONE if mode == "none" else FULL
    if option == "op":
        return OPS
    if not option.isdecimal() or int(option) < 1:
        raise values.error(
            f"{_A}selective_ac_option = {option!r:.40}; expected 'op', or a number of layers such as '2'.",
            f"{_A}selective_ac_option",
        )
    return FULL if int(option) == 1 else f"{EVERY}{int(option)}"


def _notes(values: FileValues) -> Iterator[str]:
    if values[f"{_P}enable_async_tensor_parallel"]:
        yield "async tensor parallelism is predicted without its overlap, so the step may be faster than told"


# -- written -----------------------------------------------------------------------------------------------------


def write_torchtitan(configuration: Configuration) -> str:
    """A TOML job configuration; what is torchtitan's default is left out, but for degrees and batch.

    Raises:
        MismatchError: a configuration that torchtitan has no words for.
    """
    found = configuration
    refuse_unsaid("torchtitan", _unsaid(found))
    is_sharded = found.zero > 0 or found.shards is None
    reshards = {(3, True): "always", (2, False): "never"}.get((found.zero, found.stages > 1), "default")
    has_stages = found.stages > 1
    samples = found.micro_batch or 1
    given = {
        **FORMAT.told(found),
        f"{_T}local_batch_size": samples * (found.accumulation or 1) if has_stages else samples,
        f"{_T}global_batch_size": found.batch,
        f"{_T}dtype": _NARROW if found.precision == _NARROW else None,
        f"{_T}mixed_precision_param": _WIDE if found.precision == _WIDE else None,
        f"{_T}enable_cpu_offload": PARAMETERS in found.offload,
        f"{_P}data_parallel_replicate_degree": found.groups if is_sharded else found.shards,
        f"{_P}data_parallel_shard_degree": (-1 if found.shards is None else found.shards) if is_sharded else 1,
        f"{_P}fsdp_reshard_after_forward": reshards if is_sharded else None,
        _MICRO: samples if has_stages else None,
        f"{_P}pipeline_parallel_layers_per_stage": found.sizes.get(LAYERS_PER_STAGE),
        _FIRST_LESS: None if found.edge_layers is None else found.edge_layers[0],
        _LAST_LESS: None if found.edge_layers is None else found.edge_layers[1],
        **_recompute_keys(found.recompute),
    }
    return write_toml(said(FORMAT, given, found.others, _ALWAYS))


def _recompute_keys(recompute: str) -> dict[str, Any]:
    if recompute in (NONE, FULL):
        return {f"{_A}mode": recompute}
    option = "op" if recompute == OPS else recompute.removeprefix(EVERY)
    return {f"{_A}mode": "selective", f"{_A}selective_ac_option": option}


def _unsaid(found: Configuration) -> Iterator[str]:
    """Reasons why torchtitan cannot say it."""
    if found.precision not in (None, _NARROW, _WIDE, "mixed") or found.is_float16:
        yield f"it has no precision {'float16' if found.is_float16 else found.precision}"
    if found.stack == "fused":
        yield "it has no hand-made kernels"
    if found.zero == 1:
        yield "FSDP cuts gradients with the optimizer's state, as zero2 does"
    if found.experts > 1 and not found.zero:
        yield "experts are spread over ranks that cut parameters as well, as ep with zero3"
    if found.groups > 1 and not found.zero:
        yield "replicas without ZeRO are no groups"
    if found.tensor > 1 and not found.sequence_parallel:
        yield "its tensor parallelism cuts along the sequence too, as tp sp does"
    if found.context_by == "ulysses":
        yield "its context parallelism has no Ulysses"
    if found.stages > 1 and found.order not in _ORDERS.values():
        yield f"it has no schedule for {found.order}"
    if found.chunks > 1 and LAYERS_PER_STAGE not in found.sizes and (found.chunks, found.order) not in _TWO_CHUNKS:
        yield f"it counts layers of each stage, and the {found.chunks} stages of a device are not counted so"
    if found.stages == 1 and (found.accumulation or 1) > 1 and found.batch is None:
        yield "gradients are accumulated up to a global batch, which is not known"
    if found.recompute not in (NONE, FULL, OPS) and not found.recompute.startswith(EVERY):
        yield "it recomputes whole layers, every so many of them, or all but every other product"
    if found.offload and not (found.zero and found.offload == (PARAMETERS,)):
        yield "it has no setting for the optimizer or activations on hosts alone"
    if found.optimizer not in (None, "adam", "adamw"):
        yield f"it has no optimizer {found.optimizer}"


def torchtitan(result: Result) -> str:
    """A strategy as a TOML job configuration.

    Raises:
        MismatchError: a strategy that torchtitan has no words for.
    """
    refuse("a torchtitan configuration", result, torchtitan_lacks(result))
    return write_torchtitan(configuration_of(result, "torchtitan"))


def torchtitan_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that torchtitan has no words for; it need not have been carried out."""
    graph, strategy = result.graph, result.strategy
    yield from irregular(strategy, _AXES)
    yield from reduced_once(strategy)
    yield from uneven(graph, strategy)
    yield from not_bucketed(strategy)
    yield from no_sequence(strategy)
    found, layers = configuration_of(result, "torchtitan"), layers_in(graph)
    if strategy.stages > 1 and 0 < layers + 2 < strategy.virtual_stages:
        yield f"{layers} layers, embedding and output do not make {strategy.virtual_stages} stages"
    if strategy.cuts and strategy.cuts != own_cuts("torchtitan", graph, strategy.virtual_stages):
        yield "its stages are whole layers, as many as it counts itself; leave 'cuts=' out"
    if found.context > 1 and not found.zero:
        yield "FSDP always cuts along its context parallelism, too; take zero2 or zero3"
    if not found.zero and found.tensor * found.stages > 1:
        if (found.shards or 1) > 1:
            yield "its DistributedDataParallel knows no other parallelism beside it; take zero2 or zero3"
        if found.precision == "mixed":
            yield f"{_NOT_NARROW}; take replicas with zero2 or zero3, or --precision float32"
    yield from _unsaid(found)
