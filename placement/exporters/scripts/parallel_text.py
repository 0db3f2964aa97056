"""The text of what makes a model parallel: weights that are cut, modules computed again, replicas."""

from __future__ import annotations

from placement.exporters.scripts import tensor_parts
from placement.runtime.setups.code_text import dict_of, filled, keywords, quoted
from placement.runtime.setups.facts import Facts
from placement.runtime.setups.tensor_plan import TensorPlan


def tensor_parallel(facts: Facts, plan: TensorPlan) -> str:
    why = ""
    if any("use_local_output=False" in style for style in plan.styles.values()):
        why = ". Between two layers, activations are DTensors, which know their whole shape"
    present = " and module.weight is not None" if facts.stages is not None else ""
    apart = {name for names in facts.tied for name in names}  # which no stage has both of
    pairs = [names for names in plan.tied if not apart.issuperset(names)]
    lines = ["# One parameter for both: parallelize_module made two of it."] if pairs else []
    for names in pairs:
        first, other = (f"model.get_submodule({quoted(name.rpartition('.')[0])}).weight" for name in names)
        lines.append(f"{other} = {first}")
    tied = "".join(f"    {line}\n" for line in lines)
    means = tensor_parts.MEANS if plan.axis == "dp" else ""
    gather = filled(tensor_parts.GATHER, AXIS=plan.axis) if plan.gathers else ""
    is_padded = plan.axis == "dp" and bool(facts.samples)
    return filled(
        tensor_parts.TENSOR_PARALLEL,
        PAD=tensor_parts.PAD if is_padded else "",
        TAKE_OFF=tensor_parts.TAKE_OFF if is_padded else "",
        WHY=why,
        PRESENT=present,
        TIED=tied,
        AXIS=plan.axis,
        GATHER=gather,
        MEANS=means,
    )


def parallelize_body(facts: Facts, whole: str, model: str) -> str:
    """Code for a stage, or for the model: weights cut, modules computed again, replicas."""
    strategy = facts.strategy
    lines = []
    if strategy.statistics == "sync" and facts.dp > 1:
        lines.append("# Statistics of the whole batch; torch has kernels for that on GPUs alone.")
        lines.append(f'{whole} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({whole}, mesh.get_group("dp"))')
    if facts.plan is not None:
        lines.append(f"cut_weights({model}, mesh)")
        if facts.plan.sequence and facts.stages is not None:
            lines.append(f"cut_sequence(own_modules({model}, SEQUENCE), mesh)")
        elif facts.plan.sequence:
            lines.append(f"cut_sequence([{model}.get_submodule(path) for path in SEQUENCE], mesh)")

    def each(name: str) -> str:
        return f"for module in own_modules({model}, {name}):" if facts.stages is not None else f"for path in {name}:"

    inner = "module" if facts.stages is not None else f"{model}.get_submodule(path)"
    if any(modules != "*" for _, modules in facts.kept):
        lines += [
            f"for path, module in {model}.named_modules():",
            '    if any(fnmatch.fnmatchcase(path, modules) for _, modules in KEPT if modules != "*"):',
            "        tell_when_it_runs(path, module)",
        ]
    if facts.own_samples:
        lines += [each("OWN_SAMPLES"), f"    compute_own_samples({inner}, mesh)"]
    if facts.again:
        lines += [each("COMPUTED_AGAIN"), f"    recompute({inner})"]
    if facts.cores:
        lines.append("for path, counts in CORES.items():")
        if facts.stages is None:
            lines.append(f"    recompute_core({inner}, counts)")
        else:
            lines += [f"    for module in own_modules({model}, [path]):", "        recompute_core(module, counts)"]
    if facts.here:
        lines += [each("ON_DEVICE"), f"    save_here({inner})"]
    if facts.hosted:
        lines += [each("ON_HOST"), f"    save_on_host({inner})"]
    if facts.is_ddp and facts.has_cut_replicas:
        lines += [
            f"cut = [name for name, p in {whole}.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)]",
            f"DistributedDataParallel._set_params_and_buffers_to_ignore_for_model({whole}, cut)",
        ]
    if facts.is_ddp:
        given = 'process_group=mesh.get_group("dp"), bucket_cap_mb=BUCKET_MB'
        if facts.has_unused:
            given += ", find_unused_parameters=True"
            lines += [f"{whole} = DistributedDataParallel(", f"    {whole}, {given}", ")"]
        else:
            lines.append(f"{whole} = DistributedDataParallel({whole}, {given})")
    if facts.is_sharded:
        lines += _fully_shard(facts, whole, model, each("LAYERS"), inner)
    return "\n".join(f"    {line}" for line in lines) or "    # Micro-batches are all that this strategy has."


def _fully_shard(facts: Facts, whole: str, model: str, each_layer: str, inner: str) -> list[str]:
    """Code that makes `fully_shard` keep, gather and reduce parameters."""
    axes = [*facts.replica_axes, "one"] if facts.is_hybrid_shard else facts.replica_axes
    over = f"mesh[{', '.join(map(quoted, axes))}]"
    options = {"mesh": over} if facts.strategy.zero == 3 else {"mesh": over, "reshard_after_forward": "False"}
    more = {}
    lines = []
    if facts.is_hybrid_shard and facts.dp > 1:
        lines.append("# fully_shard replicates over the first axis; over the second, of size 1, it cuts nothing.")
    elif facts.groups > 1:
        lines.append("# fully_shard replicates over the first axis, groups of replicas, and cuts over the second.")
    if facts.has_policy and facts.precision is not None:
        formats = f"param_dtype=torch.{facts.precision.activation}, reduce_dtype=torch.{facts.precision.gradient}"
        lines.append(f"{model}.float()  # as parameters are kept, and updated")
        lines.append(f"# A loss inside of the model is in {facts.precision.activation}, too, as captured; float() of")
        lines.append("# what it reads, in the model, makes it float32.")
        more["mp_policy"] = f"MixedPrecisionPolicy({formats})"
    if facts.strategy.offloads_parameters:
        lines.append("# The host keeps parameters, gradients and what the optimizer makes, and updates them.")
        more["offload_policy"] = "CPUOffloadPolicy(pin_memory=torch.cuda.is_available())"
    if facts.has_cut_replicas:
        more["ignored_params"] = f"{{p for p in {model}.parameters() if isinstance(p, DTensor)}}"
    if facts.has_blocks:
        more["shard_placement_fn"] = "other_dimension"
    if facts.strategy.zero == 2:
        lines.append("# Parameters stay whole between forward and backward pass; gradients and optimizer are cut.")
    given = keywords(options)
    if more:
        lines.append(f"options = {dict_of(options)}")
        lines += [f'options["{name}"] = {code}' for name, code in more.items()]
        given = "**options"
    if facts.layers:
        lines += [each_layer, f"    fully_shard({inner}, {given})"]
    return [*lines, f"fully_shard({whole}, {given})"]
