"""Configurations of accelerate: the YAML that ``accelerate launch --config_file`` takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.transforms.strategy import OPTIMIZER, PARAMETERS, Strategy
from placement.configurations.configuration import (
    ATTENTION,
    FULL,
    NONE,
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
from placement.configurations.documents import nested, read_yaml, write_yaml
from placement.configurations.megatron import unequal_stages
from placement.configurations.results import (
    autocast,
    configuration_of,
    irregular,
    not_bucketed,
    not_offloaded,
    other_weights,
    refuse,
    refuse_unsaid,
    uneven,
)
from placement.configurations.strategies import recompute_of
from placement.exporters.exporting import hosts_of
from placement.runtime.setups.facts_of import layers_of

if TYPE_CHECKING:
    from torch import nn

    from graphs.opgraph import OpGraph
    from placement.results.result import Result

_F, _D, _P, _M = (
    *("fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_"),
    "megatron_lm_config.megatron_lm_",
)
_TYPE, _VERSION, _SHARDING, _RESHARD = (
    "distributed_type",
    f"{_F}version",
    f"{_F}sharding_strategy",
    f"{_F}reshard_after_forward",
)
_CLASSES = f"{_F}transformer_layer_cls_to_wrap"
_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_SHARDINGS = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = dict(enumerate(_SHARDINGS, 1))
_AS_FSDP2 = "FSDP of version 1 is predicted as version 2 gathers and scatters"
DEEPSPEED_FILE = f"{_D}deepspeed_config_file"

_OWN_KEYS = ("fsdp", "deepspeed", "megatron_lm", "parallelism")
_KEYS: dict[str, Key] = {
    "compute_environment": only("LOCAL_MACHINE", why="other environments have other keys"),
    _TYPE: read(str, "NO", *_KINDS),
    "num_processes": read(int),
    "num_machines": read(int, 1),
    "mixed_precision": read(str, "no", "no", "bf16", "fp16"),
    "use_cpu": only(False, why="a cluster of GPUs is asked about"),
    "dynamo_backend": only("NO", why="it stands in dynamo_config now"),
    "dynamo_config.dynamo_backend": words("stack", "NO", {"NO": "eager", "INDUCTOR": "compiled"}),
    "dynamo_config.*": inert,
    "dynamo_config": inert,
    "fp8_config": only({}, None, why="no graphs have the casts of float8"),
    **inert_keys(
        "debug downcast_bf16 machine_rank main_training_function main_process_ip gpu_ids "
        "main_process_port rdzv_backend same_network enable_cpu_affinity tpu_env tpu_name "
        "tpu_use_cluster tpu_use_sudo tpu_zone command_file commands tpu_vm mpirun_config"
    ),
    **{f"{name}_config": only({}, None, why="it has keys of its own") for name in _OWN_KEYS},
    "mpirun_config.*": inert,
    _VERSION: read(int, 1, 1, 2),
    _SHARDING: read(str, "FULL_SHARD", *_SHARDINGS),
    _RESHARD: read(bool, True),
    f"{_F}auto_wrap_policy": only("TRANSFORMER_BASED_WRAP", why="layers are gathered one by one"),
    f"{_F}offload_params": read(bool, False),
    f"{_F}activation_checkpointing": read(bool, False),
    f"{_F}activation_checkpointing_offload": only(False, why="inputs of layers on hosts are not read"),
    f"{_F}backward_prefetch": only("BACKWARD_PRE", why="gathers run ahead of the backward pass"),
    **inert_keys(
        "forward_prefetch state_dict_type use_orig_params sync_module_states min_num_params "
        "cpu_ram_efficient_loading transformer_layer_cls_to_wrap",
        _F,
    ),
    f"{_P}dp_replicate_size": read(int, 1, field="groups"),
    f"{_P}dp_shard_size": read(int, 1, field="shards"),
    f"{_P}tp_size": read(int, 1, field="tensor"),
    f"{_P}cp_size": read(int, 1, field="context"),
    f"{_P}cp_backend": only("torch", why="accelerate has no other"),
    f"{_P}cp_comm_strategy": words("context_by", "allgather", {"allgather": "", "alltoall": "ring"}),
    f"{_P}sp_size": only(1, why="Ulysses of DeepSpeed is not read"),
    f"{_P}sp_backend": inert,
    f"{_P}sp_seq_length": inert,
    f"{_P}sp_seq_length_is_variable": inert,
    f"{_P}sp_attn_implementation": inert,
    f"{_D}zero_stage": read(int, 2, 0, 1, 2, 3, field="zero"),
    f"{_D}gradient_accumulation_steps": read(int, 1, auto=True),
    f"{_D}offload_optimizer_device": read(str, "none", "none", "cpu"),
    f"{_D}offload_param_device": read(str, "none", "none", "cpu"),
    DEEPSPEED_FILE: only("none", None, why="what it says is in that file, which compare reads in the place of this"),
    f"{_D}deepspeed_moe_layer_cls_names": inert,
    **inert_keys(
        "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile "
        "deepspeed_multinode_launcher deepspeed_exclusion_filter deepspeed_inclusion_filter",
        _D,
    ),
    f"{_M}tp_degree": read(int, 1, field="tensor"),
    f"{_M}pp_degree": read(int, 1, field="stages"),
    f"{_M}num_micro_batches": read(int, 1, field="accumulation"),
    f"{_M}sequence_parallelism": read(bool, False),
    f"{_M}recompute_activations": read(bool, False),
    f"{_M}use_distributed_optimizer": read(bool, False),
    f"{_M}gradient_clipping": inert,
    f"{_M}context_parallel_size": only(1, why="Megatron-LM's own flags say it, which compare reads"),
    f"{_M}expert_model_parallel_size": only(1, why="Megatron-LM's own flags say it, which compare reads"),
}
FORMAT = Format("accelerate", "configuration files of accelerate 1.15 (ClusterConfig)", _KEYS)


def read_accelerate(text: str) -> Configuration:
    """A configuration file.

    Raises:
        ConfigurationError: no YAML or JSON, or a key or value that is not understood.
    """
    values = FORMAT.values(_plain(read_yaml(text)))
    if _TYPE not in values.given:
        raise values.error(
            "a configuration of accelerate has distributed_type; expected one of NO, MULTI_GPU, FSDP ..."
        )
    for name, key in _KEYS.items():
        if key.kind is int and key.default != 2:
            values.at_least(name)
    kind, narrow = values[_TYPE], values["mixed_precision"]
    common = Configuration(
        tool="accelerate",
        devices=1 if kind == "NO" else values["num_processes"],
        precision=None if narrow == "no" else "mixed" if kind in ("NO", "MULTI_GPU") else _PRECISIONS[kind],
        is_float16=narrow == "fp16",
        **values.fields("dynamo"),
        others={**values.others, **_kept(values, kind)},
        lines=values.lines,
    )
    for name in values.given:
        section = name.partition(".")[0]
        if section in _SECTIONS and kind not in _SECTIONS[section]:
            raise values.error(f"{name} is for {_SECTIONS[section][0]}, and distributed_type is {kind}.", name)
    of_kind = {"FSDP": _fsdp, "DEEPSPEED": _of_deepspeed, "MEGATRON_LM": _megatron}.get(kind)
    return common if of_kind is None else of_kind(values, common)


_PRECISIONS = {"FSDP": "mixed-bf16-reduce", "DEEPSPEED": "master-bf16-reduce", "MEGATRON_LM": "master"}
_SECTIONS = {
    "fsdp_config": ("FSDP",),
    "deepspeed_config": ("DEEPSPEED",),
    "megatron_lm_config": ("MEGATRON_LM",),
    "parallelism_config": ("FSDP",),
}


def _plain(entries: dict[str, tuple[Any, int]]) -> dict[str, tuple[Any, int]]:
    """Values in one spelling: ``no`` is a truth value in YAML, shardings have numbers, truth values may be quoted."""
    found = dict(entries)
    for name, (value, line) in entries.items():
        if name in ("mixed_precision", "dynamo_backend", _TYPE) and value in (False, None):
            found[name] = ("NO" if name != "mixed_precision" else "no", line)
        elif name == _SHARDING:
            found[name] = (_NUMBERED.get(value, value) if isinstance(value, int) else str(value), line)
        elif name in _KEYS and isinstance(_KEYS[name].default, bool) and str(value).lower() in ("true", "false"):
            found[name] = (str(value).lower() == "true", line)
    return found


def _kept(values: FileValues, kind: str) -> dict[str, Any]:
    """Keys that say the same in another way, and so are written back as they were."""
    told = {_TYPE: kind}
    if kind == "FSDP":
        told[_VERSION] = values[_VERSION]
    return {**told, **({"num_machines": values["num_machines"]} if "num_machines" in values.given else {})}


def _fsdp(values: FileValues, common: Configuration) -> Configuration:
    if f"{_F}auto_wrap_policy" not in values.lines:
        raise values.error(
            f"{_F}auto_wrap_policy is not given, and without it the whole model is gathered at once, which is not "
            "predicted; expected TRANSFORMER_BASED_WRAP.",
            _TYPE,
        )
    common = replace(
        common,
        recompute=FULL if values[f"{_F}activation_checkpointing"] else NONE,
        offload=(PARAMETERS,) if values[f"{_F}offload_params"] else (),
    )
    if values[_VERSION] == 1:
        if any(name.startswith(_P) for name in values.given):
            raise values.error("parallelism_config needs fsdp_version 2, and it is 1.", _VERSION, _TYPE)
        return _sharded(values, replace(common, notes=(*common.notes, _AS_FSDP2)))
    zero = 3 if values[_RESHARD] else 2
    has_degrees = any(name.startswith(_P) for name in values.given)
    return replace(common, zero=zero, **(values.fields(_P) if has_degrees else {}))


def _sharded(values: FileValues, common: Configuration) -> Configuration:
    """FSDP of version 1, where a hybrid sharding stays inside of a machine."""
    sharding, machines = values[_SHARDING], values["num_machines"]
    if not sharding.startswith("HYBRID"):
        return replace(common, zero=_SHARDINGS[sharding])
    devices = common.devices
    if devices is None or devices % machines:
        raise values.error(
            f"{_SHARDING} = {sharding} needs as many processes on each machine; num_processes is {devices} and "
            f"num_machines {machines}.",
            _SHARDING,
        )
    return replace(common, zero=_SHARDINGS[sharding], groups=machines, shards=devices // machines)


def _of_deepspeed(values: FileValues, common: Configuration) -> Configuration:
    steps = values[f"{_D}gradient_accumulation_steps"]
    on_hosts = [values[f"{_D}offload_{what}_device"] == "cpu" for what in ("param", "optimizer")]
    if on_hosts[0] and not (on_hosts[1] and values[f"{_D}zero_stage"] == 3):
        raise values.error(
            f"{_D}offload_param_device is read with zero_stage 3 and with offload_optimizer_device, whose updates are "
            "on the host, too.",
            f"{_D}offload_param_device",
        )
    is_auto = f"{_D}gradient_accumulation_steps" in values.others
    return replace(
        common,
        **values.fields(_D),
        accumulation=None if is_auto else steps,
        offload=(PARAMETERS,) if on_hosts[0] else (OPTIMIZER,) if on_hosts[1] else (),
        precision=common.precision or "float32",
        overlaps=values[f"{_D}zero_stage"] == 3,
    )


def _megatron(values: FileValues, common: Configuration) -> Configuration:
    return replace(
        common,
        **values.fields(_M),
        zero=1 if values[f"{_M}use_distributed_optimizer"] else 0,
        sequence_parallel=values[f"{_M}sequence_parallelism"] and values[f"{_M}tp_degree"] > 1,
        edge_layers=(0, 0),
        recompute=ATTENTION if values[f"{_M}recompute_activations"] else NONE,
        stack="fused",
    )


# -- written -----------------------------------------------------------------------------------------------------


def document(configuration: Configuration) -> dict[str, Any]:
    """The file's values.

    Raises:
        MismatchError: a configuration that accelerate has no words for.
    """
    found = configuration
    kind = found.others.get(_TYPE) or _kind(found)
    refuse_unsaid("accelerate", _unsaid(found, kind))
    narrow = "no" if found.precision in (None, "float32", "bfloat16") else "fp16" if found.is_float16 else "bf16"
    given: dict[str, Any] = {
        "num_processes": found.devices,
        "mixed_precision": narrow,
        **FORMAT.told(found, "dynamo"),
    }
    if kind == "FSDP":
        given |= _fsdp_keys(found)
    elif kind == "DEEPSPEED":
        given |= {
            **FORMAT.told(found, _D),
            f"{_D}gradient_accumulation_steps": found.accumulation,
            f"{_D}offload_optimizer_device": "cpu" if found.offload else None,
            f"{_D}offload_param_device": "cpu" if PARAMETERS in found.offload else None,
        }
    elif kind == "MEGATRON_LM":
        given |= {
            **FORMAT.told(found, _M),
            f"{_M}sequence_parallelism": found.sequence_parallel,
            f"{_M}recompute_activations": found.recompute == ATTENTION,
            f"{_M}use_distributed_optimizer": found.zero == 1,
        }
    always = [name for name in given if name.startswith(_M)]
    return nested({_TYPE: kind, **said(FORMAT, given, found.others, ("mixed_precision", *_ALWAYS, *always))})


_ALWAYS = (_RESHARD, f"{_F}activation_checkpointing", f"{_D}zero_stage", f"{_P}dp_shard_size")


def _kind(found: Configuration) -> str:
    if found.stages > 1 or found.zero == 1 or (found.tensor > 1 and not found.zero):
        return "MEGATRON_LM"
    return "FSDP" if found.zero else "MULTI_GPU"


def _fsdp_keys(found: Configuration) -> dict[str, Any]:
    told: dict[str, Any] = {f"{_F}activation_checkpointing": found.recompute == FULL}
    told[f"{_F}offload_params"] = PARAMETERS in found.offload
    if found.others.get(_VERSION) == 1:
        hybrid = {3: "HYBRID_SHARD", 2: "HYBRID_SHARD_ZERO2"}
        plain = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: "NO_SHARD"}
        return told | {_SHARDING: (hybrid if found.shards is not None else plain)[found.zero]}
    told[_RESHARD] = found.zero == 3
    return told if found.shards is None else told | FORMAT.told(found, _P)


def write_accelerate(configuration: Configuration) -> str:
    """The file as YAML.

    Raises:
        MismatchError: a configuration that accelerate has no words for.
    """
    return write_yaml(document(configuration))


def _unsaid(found: Configuration, kind: str) -> Iterator[str]:
    """Reasons why accelerate cannot say it."""
    if found.experts > 1 or found.chunks > 1 or (found.stages > 1 and found.order != "1f1b"):
        yield "there is no setting for experts, and of pipelines only 1f1b"
    if found.offload and kind != "DEEPSPEED" and (kind, found.offload) != ("FSDP", (PARAMETERS,)):
        yield "there is no setting for updates on hosts, which deepspeed has"
    if kind != "MEGATRON_LM" and (found.stages > 1 or found.sequence_parallel):
        yield "only Megatron-LM has pipelines and sequence parallelism there"
    if kind == "FSDP" and not found.zero and (found.devices or 2) > 1 and found.others.get(_VERSION) != 1:
        yield "FSDP cuts storage among replicas, which distributed_type: MULTI_GPU does not"
    if found.recompute not in {"FSDP": (NONE, FULL), "MEGATRON_LM": (NONE, ATTENTION)}.get(kind, (NONE,)):
        yield f"{kind} has no setting for recomputing {found.recompute}"
    if found.zero and kind not in ("FSDP", "DEEPSPEED") and not (kind == "MEGATRON_LM" and found.zero == 1):
        yield f"{kind} has no zero{found.zero}"


def accelerate(result: Result, model: nn.Module | None = None) -> dict[str, Any]:
    """A strategy as the file of ``accelerate launch --config_file``: DDP, FSDP2, or Megatron-LM for tensors and stages.

    Args:
        model: whose layers FSDP is to gather one by one; without it those in its own ``_no_split_modules`` are.

    Raises:
        MismatchError: a strategy that accelerate has no words for, a cluster without GPUs, or another model.
    """
    refuse("an accelerate configuration", result, accelerate_lacks(result))
    found, is_megatron = configuration_of(result, "accelerate"), _is_megatron(result.strategy)
    hosts = hosts_of(result, result.strategy)
    others: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": len(hosts),
        "use_cpu": False,
    }
    if len(hosts) > 1:
        others |= {"main_process_ip": hosts[0], "main_process_port": 29500, "rdzv_backend": "c10d"}
    if found.zero and not is_megatron:
        others |= {
            _VERSION: 2,
            f"{_F}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            f"{_F}state_dict_type": "SHARDED_STATE_DICT",
        }
        classes = () if model is None else _layer_classes(result, model)
        others |= {_CLASSES: ",".join(classes)} if classes else {}
    others[_TYPE] = "MEGATRON_LM" if is_megatron else "FSDP" if found.zero else "MULTI_GPU"
    narrow = autocast(result.graph)  # weights stay in the model's own format
    precision = None if narrow is None else found.precision if found.precision != "float32" else "mixed"
    return document(replace(found, groups=1, shards=None, precision=precision, others=others))


def _layer_classes(result: Result, model: nn.Module) -> list[str]:
    """Names of the classes of a model's layers, without those that stand inside of layers and elsewhere, too."""
    layers, modules = layers_of(result.graph), dict(model.named_modules())
    missing = next((path for path in layers if path not in modules), None)
    if missing is not None:
        raise MismatchError(f"the model has no module {missing!r}, and the one that was placed has; give that one.")
    classes = {type(modules[path]).__name__ for path in layers}
    elsewhere = {type(module).__name__ for path, module in modules.items() if path not in layers}
    return sorted(classes - elsewhere or classes)


def wraps_nothing_named(document: dict[str, Any]) -> bool:
    """Whether a file leaves it to the model which of its layers FSDP gathers one by one."""
    fsdp = document.get("fsdp_config", {})
    return bool(fsdp) and _CLASSES.removeprefix("fsdp_config.") not in fsdp


def accelerate_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that accelerate has no words for; it need not have been carried out."""
    if not any(device.kind == "gpu" for device in result.cluster.devices):
        name = show(result.cluster.name)
        yield f"cluster {name} has no GPU, and without MPI accelerate starts one process alone on CPUs"
    graph, strategy = result.graph, result.strategy
    yield from uneven(graph, strategy)
    yield from _not_megatron(graph, strategy) if _is_megatron(strategy) else _not_fsdp(graph, strategy)
    yield from _other_recipe(graph.origin.precision, strategy)


def _other_recipe(precision: str | None, strategy: Strategy) -> Iterator[str]:
    """A reason where figures would be of another recipe than that in which accelerate trains a strategy."""
    what, takes, how = "DistributedDataParallel", ["mixed"], "mixed"
    if _is_megatron(strategy):
        what, takes, how = "Megatron-LM", ["master", "master-bf16-reduce"], "master --stack fused"
    elif strategy.zero:  # less is sent than told, with the first of them
        what, takes, how = "FSDP2", ["mixed", "mixed-bf16-reduce"], "mixed-bf16-reduce"
    if precision not in (None, "float32", "bfloat16", *takes):
        yield f"its {what} does not train in {precision}; give the model with --precision {how}"


def accumulating(strategy: Strategy) -> str:
    """What a script says that trains in micro-batches: by itself accelerate reduces gradients with the last one."""
    if not strategy.reduces_each:
        return f"Accelerator(gradient_accumulation_steps={strategy.micro_batches})"
    plugin = f"GradientAccumulationPlugin(num_steps={strategy.micro_batches}, sync_each_batch=True)"
    return f"Accelerator(gradient_accumulation_plugin={plugin})"


def _is_megatron(strategy: Strategy) -> bool:
    """Whether accelerate leaves a strategy to Megatron-LM."""
    return strategy.stages > 1 or any(rule.name == "tp" and rule.size > 1 for rule in strategy.mesh)


def _not_fsdp(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    yield from irregular(strategy)
    yield from not_bucketed(strategy)
    if strategy.offloads_parameters and strategy.zero != 3:
        yield "FSDP offloads what it keeps in parts; take zero3"
    elif strategy.offload != (PARAMETERS,):
        yield from not_offloaded(strategy)
    if strategy.zero == 1:
        yield "FSDP cuts gradients with the optimizer's state, as zero2 does"
    if strategy.micro_batches > 1:
        yield f"gradients are accumulated by the training script, with {accumulating(strategy)}"
    if strategy.recompute and (recompute_of(graph, strategy) != FULL or not strategy.zero):
        yield "a configuration recomputes all layers that FSDP wraps, or none"


def _not_megatron(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    yield from irregular(strategy)
    yield from not_offloaded(strategy)
    yield from other_weights("Megatron-LM", graph)
    if strategy.zero > 1:
        yield f"Megatron-LM cuts the optimizer's state alone, as zero1 does, not zero{strategy.zero}"
    if strategy.stages > 1 and strategy.order != "1f1b":
        yield "Megatron-LM has the order 1f1b alone there"
    yield from unequal_stages(graph, strategy)
    if strategy.recompute:
        yield "Megatron-LM recomputes the core of attentions by a setting of its own, not modules"
