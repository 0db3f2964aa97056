"""`parallelize`: a model, or the stages of it, as one rank computes it."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from placement.runtime.torch_runner.batch import compute_own_samples
from placement.runtime.torch_runner.batch_norms import synchronise_statistics
from placement.runtime.torch_runner.context_parallel import enable_context
from placement.runtime.torch_runner.expert_parallel import cut_experts
from placement.runtime.torch_runner.memory import recompute, recompute_core, save_here, save_on_host, tell_when_it_runs
from placement.runtime.torch_runner.stages import Pipeline, own_modules, own_stages
from placement.runtime.torch_runner.tensor_parallel import cut_sequence, cut_weights, other_dimension

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def parallelize(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> nn.Module:
    """The model as this rank computes it. What it has of the weights may still be elsewhere, or on ``meta``."""
    if setup.stages:
        stages = own_stages(model, mesh, setup)
        ready = {number: wrapped(stage, stage.model, mesh, setup) for number, stage in stages.items()}
        if setup.begins:
            for stage in stages.values():
                stage.hand_over_pieces()
        return Pipeline(ready, mesh, setup)
    return wrapped(model, model, mesh, setup)


def wrapped(whole: nn.Module, model: nn.Module, mesh: DeviceMesh, setup: Setup) -> nn.Module:
    """A model or stage with its weights cut, modules computed again, and replicas.

    Args:
        whole: the model, or a stage.
        model: the same, or what the stage has of it, with the model's own names.
    """
    if setup.synchronises:
        synchronise_statistics(model, mesh, setup)
    if setup.styles:
        cut_weights(model, mesh, setup)
        if setup.sequence:
            cut_sequence(own_modules(model, setup.sequence, setup), mesh)
    if setup.context > 1:
        enable_context(model, mesh, setup)
    if setup.watched:
        for path, module in model.named_modules():
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in setup.watched):
                tell_when_it_runs(path, module)
    if setup.own_samples:
        for module in own_modules(model, setup.own_samples, setup):
            compute_own_samples(module, mesh, setup)
    if setup.computed_again:
        for module in own_modules(model, setup.computed_again, setup):
            recompute(module, setup)
    if setup.cores:
        for path, counts in setup.cores.items():
            for module in own_modules(model, (path,), setup):
                recompute_core(module, counts, setup)
    if setup.on_device:
        for module in own_modules(model, setup.on_device, setup):
            save_here(module)
    if setup.on_host:
        for module in own_modules(model, setup.on_host, setup):
            save_on_host(module)
    if setup.experts > 1:
        apart = cut_experts(model, mesh, setup)
    if setup.is_ddp:
        return replicated(whole, mesh, setup)
    if setup.is_sharded:
        return sharded(whole, model, mesh, setup, apart if setup.experts > 1 else mesh)
    return whole


def replicated(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> nn.Module:
    """Replicas that reduce gradients in buckets."""
    if setup.cuts_replicas:
        cut = [name for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, cut)
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=setup.bucket_mb,
        find_unused_parameters=setup.has_unused,
    )


def sharded(whole: nn.Module, model: nn.Module, mesh: DeviceMesh, setup: Setup, apart: DeviceMesh) -> nn.Module:
    """Replicas that keep, gather and reduce parameters by `fully_shard`.

    Args:
        apart: the mesh with ranks apart that have the same experts.
    """
    over = mesh[setup.sharding_axes]  # it replicates over the first of two axes, and cuts over the last one
    options: dict[str, Any] = {"mesh": over}
    if setup.zero < 3:
        options["reshard_after_forward"] = False  # parameters stay whole between forward and backward pass
    if setup.has_policy:
        model.float()  # as parameters are kept, and updated
        # A loss inside of the model is in the narrow format, too; float() of what it reads makes it float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, setup.activation), reduce_dtype=getattr(torch, setup.gradient)
        )
    if setup.offloads_parameters:
        # The host keeps parameters, gradients and what the optimizer makes, and updates them.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if setup.shards_experts:
        for module in own_modules(model, tuple(setup.expert_modules), setup):
            for child in module.children():  # such as a router, of which all replicas have the same
                fully_shard(child, **options)
            fully_shard(module, **{**options, "mesh": apart["alike"]})
    elif setup.cuts_replicas:
        options["ignored_params"] = {p for p in model.parameters() if isinstance(p, DTensor)}
    if setup.has_blocks:
        options["shard_placement_fn"] = other_dimension
    for module in own_modules(model, setup.layers, setup):
        fully_shard(module, **options)
    fully_shard(whole, **options)  # in place
    return whole
