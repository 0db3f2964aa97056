"""`parallelize`: a model, or the stages of it, as one rank computes it."""

from __future__ import annotations

import fnmatch
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from placement.runtime.torch_runner.batch import Padding, compute_own_samples, synchronise_statistics
from placement.runtime.torch_runner.context_parallel import enable_context
from placement.runtime.torch_runner.memory import recompute, recompute_core, save_here, save_on_host, tell_when_it_runs
from placement.runtime.torch_runner.module_parallel import (
    AttentionParallel,
    SummedParallel,
    TransposedParallel,
    WholeParallel,
    cut_experts,
    in_blocks,
)
from placement.runtime.torch_runner.stages import Pipeline, own_modules, own_stages

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


__all__ = [  # what setups are made of
    "AttentionParallel",
    "BlocksParallel",
    "ColwiseParallel",
    "ConvolutionParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "SummedParallel",
    "TransposedParallel",
    "WholeParallel",
]


class BlocksParallel(ParallelStyle):
    """Cuts each of several blocks of the rows of a weight, such as those for query, key and value."""

    def __init__(self, blocks: int, use_local_output: bool = False) -> None:
        super().__init__()
        self.blocks, self.use_local_output = blocks, use_local_output

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        cut = _StridedShard(0, split_factor=self.blocks)
        for name, p in list(module.named_parameters(recurse=False)):
            placements = [Replicate() if p.ndim == 1 else cut]  # a bias is cut each time
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, placements)))
        module.forward = functools.partial(self._forward, module, mesh)
        return module

    def _forward(self, module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        bias = module.bias
        if bias is not None:
            bias = bias.redistribute(placements=[_StridedShard(0, split_factor=self.blocks)]).to_local()
        made = nn.functional.linear(x, module.weight.to_local(), bias)
        return made if self.use_local_output else in_blocks(made, self.blocks, mesh, is_local=False)


class ConvolutionParallel(ParallelStyle):
    """Cuts the output channels of a convolution (0), or its input channels (1); what it hands on has all of them."""

    def __init__(self, dimension: int, layout: Any) -> None:
        super().__init__()
        self.dimension, self.input_layouts, self.output_layouts = dimension, (layout,), (layout,)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            is_cut = p.ndim > 1 or self.dimension == 0  # a bias is of output channels
            placements = [Shard(self.dimension) if is_cut else Replicate()]
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, placements)))
        module.forward = functools.partial(self._forward, module, mesh)
        return module

    def _forward(self, module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        bias = module.bias
        if self.dimension == 0:
            x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            bias = None if bias is None else bias.to_local()
        else:
            x = x.redistribute(placements=[Shard(1)]).to_local()
            bias = None if bias is None else bias.to_local(grad_placements=[Partial()]) / mesh.size()  # added up below
        weight = module.weight.to_local()
        convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[weight.ndim - 3]
        made = convolution(x, weight, bias, module.stride, module.padding, module.dilation)
        whole = made.new_empty((len(made), module.out_channels, *made.shape[2:]), device="meta")
        placements = [Partial() if self.dimension else Shard(1)]
        parts = DTensor.from_local(made, mesh, placements, shape=whole.shape, stride=whole.stride())
        return parts.redistribute(placements=self.output_layouts).to_local()


def other_dimension(p: nn.Parameter) -> Shard | None:
    """Columns, for a weight whose rows are cut in blocks; else what fully_shard cuts by itself."""
    return (
        Shard(1)
        if isinstance(p, DTensor) and isinstance(part := p.placements[0], _StridedShard) and part.dim == 0
        else None
    )


def cut_weights(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
    """Cut weights as the styles say. Between two layers, activations may be DTensors, which know their whole shape."""
    over = mesh[setup.weight_axis]
    for path, module in list(model.named_modules()):
        style: Any = next((s for pattern, s in setup.styles.items() if fnmatch.fnmatchcase(path, pattern)), None)
        if style is None or (setup.stages and next(module.parameters(), None) is None):  # of another stage
            continue
        if setup.pads and style.input_layouts[0] == Shard(0):
            module.register_forward_pre_hook(Padding.put_on)
        parallelize_module(module, over, style)
        if setup.pads and style.output_layouts[0] == Shard(0):
            module.register_forward_hook(Padding.take_off)
        if setup.gathers_sequence and isinstance(style, SequenceParallel):
            # One all-gather for all layers that read what a norm writes, and one reduce-scatter of their gradients.
            whole = PrepareModuleOutput(
                output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
            )
            parallelize_module(module, over, whole)
    if setup.tied_weights:
        # One parameter for both: parallelize_module made two of it.
        for first, other in setup.tied_weights:
            holder, _, name = other.rpartition(".")
            setattr(model.get_submodule(holder), name, model.get_parameter(first))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in (p for p in trained if not isinstance(p, DTensor)):  # one that meets DTensors has a gradient of their kind
        p.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    if setup.cuts_replicas:
        for p in (p for p in trained if isinstance(p, DTensor)):  # sums over samples of all replicas; others are means
            p.register_hook(lambda gradient: gradient / over.size())


def cut_sequence(modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut activations [batch, sequence, ...] along the sequence, as DTensors, from the first module to the last one."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return DTensor.from_local(args[0], mesh["tp"], [Replicate()]).redistribute(placements=[Shard(1)]), *args[1:]

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        cut = module is not modules[-1]  # what is handed to the next module; all else is whole
        given = output if isinstance(output, tuple) else (output,)
        found = (*given[:cut], *(x.full_tensor() if isinstance(x, DTensor) else x for x in given[cut:]))
        return found if isinstance(output, tuple) else found[0]

    modules[0].register_forward_pre_hook(enter)
    for module in modules:
        module.register_forward_hook(leave)


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
