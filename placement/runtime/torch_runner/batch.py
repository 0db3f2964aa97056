"""Parts of the batch: the samples that a rank takes, and losses that are means over the labels of the whole batch."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from placement.runtime.torch_runner.context_parallel import part_of_sequence

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def replica(mesh: DeviceMesh, setup: Setup) -> int:
    """The number of this rank's replica: its group of replicas first, then its place in that."""
    number = 0
    for axis in setup.replica_axes:
        number = number * mesh[axis].size() + mesh[axis].get_local_rank()
    return number


def borders(mesh: DeviceMesh, setup: Setup) -> list[int]:
    """The numbers of the samples with which this rank's micro-batches begin, and that after the last one."""
    number = replica(mesh, setup)
    if setup.context > 1:
        number //= setup.context
    first = number * setup.micro_batches
    if setup.samples:
        return list(itertools.accumulate(setup.samples, initial=0))[first : first + setup.micro_batches + 1]
    parts = setup.replicas * setup.micro_batches
    if setup.context > 1:
        parts //= setup.context
    each = setup.batch // parts
    return [each * number for number in range(first, first + setup.micro_batches + 1)]


def part_of_batch(inputs: dict[str, Any], mesh: DeviceMesh, setup: Setup, number: int | None = None) -> dict[str, Any]:
    """The inputs of this rank's replica, or of one of its micro-batches.

    A tensor with the whole batch, or with the samples of this replica, is cut along its first dimension; all else is
    taken as it is.

    Raises:
        ValueError: no tensor has as many samples.
    """
    ends = borders(mesh, setup)
    first, last = ends[0], ends[-1]
    low, high = (first, last) if number is None else (ends[number], ends[number + 1])

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        if len(value) == setup.batch:
            return value[low:high]
        return value[low - first : high - first] if len(value) == last - first else value

    sizes = {len(value) for value in tree_leaves(inputs) if isinstance(value, torch.Tensor) and value.ndim}
    if setup.batch and sizes and sizes.isdisjoint((setup.batch, last - first)):
        told = f"expected {setup.batch} samples in all (BATCH), or this replica's {last - first}"
        raise ValueError(f"{told}; got {min(sizes)}.")
    found = {name: tree_map(own, value) for name, value in inputs.items()}
    if setup.context > 1:
        return part_of_sequence(found, mesh, setup)
    return found


class Labels(TorchFunctionMode):
    """Makes cross-entropies means over the labels of the whole batch that count, whatever part of it they are in.

    One part of the batch may have more labels that count than another, and each label is to weigh the same.
    """

    def __init__(self, mesh: DeviceMesh, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.mesh = mesh
        if setup.labels != "each":
            self.counts: list[torch.Tensor] = []  # of the labels that count, or their share of all, of each part
        if setup.labels == "one":
            self.weight = 1.0  # of a part, by its samples

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (nn.functional.cross_entropy, nn.functional.nll_loss):
            return function(*args, **(kwargs or {}))
        given = inspect.signature(function).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        target, weight = given.arguments["target"], given.arguments["weight"]
        if given.arguments["reduction"] != "mean" or target.is_floating_point():
            return function(*given.args)
        is_counted = target != given.arguments["ignore_index"]
        counted = is_counted if weight is None else weight.detach()[target.where(is_counted, 0)] * is_counted
        count = counted.sum().float()
        if self.setup.labels == "equal":
            self.counts.append(count)
            return function(*given.args)
        given.arguments["reduction"] = "sum"
        if self.setup.labels == "one":
            # Divided by all labels here, and by the share of those that count when all parts are known.
            self.counts.append(count / target.numel() * self.weight)
            return function(*given.args) / target.numel() * self.weight
        for axis in self.setup.replica_axes:
            dist.all_reduce(count, group=self.mesh.get_group(axis))
        return function(*given.args) / (count / self.setup.replicas)  # gradients are means over replicas


def divide_by_share(labels: Labels, model: nn.Module, setup: Setup) -> torch.Tensor:
    """Divide gradients by the share of the labels that count, which is known after all parts; returns it."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    device = gradients[0].device if gradients else torch.empty(0, device=labels.mesh.device_type).device
    parts = setup.micro_batches * setup.label_losses
    counts = labels.counts[-parts:]  # of a first step, not those of the run that finds out shapes
    share = sum(counts, torch.zeros((), device=device)) / (parts * setup.replicas)
    labels.counts.clear()
    for axis in setup.label_axes:
        dist.all_reduce(share, group=labels.mesh.get_group(axis))
    for gradient in gradients:
        gradient.div_(share.to(gradient.device))
    return share


def check_counts(labels: Labels, setup: Setup) -> None:
    """Raises: ValueError: the mean over the labels of a batch is not the mean of the means of its parts."""
    if not labels.counts:
        return
    counts = torch.stack(labels.counts[-setup.micro_batches * setup.label_losses :]).reshape(setup.micro_batches, -1)
    labels.counts.clear()
    both = torch.stack([counts.amax(0), -counts.amin(0)])
    if setup.replicas > 1:
        for axis in setup.replica_axes:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=labels.mesh.get_group(axis))
    if (both.sum(0) != 0).any():
        raise ValueError("parts of the batch have unlike numbers of labels that count; make them equal")


class Padding:
    """Samples of zeros after a rank's own, so that a layer that is cut gets as many from each replica."""

    own = 0  # samples of the part of the batch that this rank computes
    most = 0  # samples of the largest part

    @staticmethod
    def put_on(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = len(args[0]) // Padding.own * (Padding.most - Padding.own)
        return torch.cat([args[0], args[0].new_zeros(rows, *args[0].shape[1:])]), *args[1:]

    @staticmethod
    def take_off(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output[: len(output) // Padding.most * Padding.own]


def laid_out(value: Any, samples: int, mesh: DeviceMesh, is_cut: bool) -> Any:
    """The tensors of so many samples in a value: this rank's samples of those of all replicas, or the other way."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(laid_out(one, samples, mesh, is_cut) for one in value)
    if isinstance(value, dict):
        return {key: laid_out(one, samples, mesh, is_cut) for key, one in value.items()}
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != samples:
        if is_cut or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        raise ValueError(
            f"a module of which each replica computes its own {samples} samples hands a tensor of shape "
            f"{tuple(value.shape)}, which is not by samples, to code that reads the whole batch, such as a loss that "
            "balances experts; leave that out (output_router_logits=False), or take a strategy without 'dp', such as "
            "tp2"
        )
    value = value.full_tensor() if isinstance(value, DTensor) else value
    whole, cut = [Replicate()] * mesh.ndim, [Shard(0)] * mesh.ndim
    before, after = (whole, cut) if is_cut else (cut, whole)
    return DTensor.from_local(value, mesh, before, run_check=False).redistribute(placements=after).to_local()


def compute_own_samples(module: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
    """Let a module compute this rank's samples, and give what it makes of those of all replicas to the others."""
    over = mesh[setup.replica_axes]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = laid_out(args, setup.batch, over, True), laid_out(kwargs, setup.batch, over, True)
        pairs = zip((*args, *kwargs.values()), (*given[0], *given[1].values()), strict=True)
        if all(one is other for one, other in pairs):
            raise ValueError(f"{type(module).__name__} gets no tensor with {setup.batch} samples first")
        return given

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return laid_out(output, setup.batch // setup.replicas, over, False)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, with_kwargs=True)


class SumOverReplicas(torch.autograd.Function):
    """The sum of what all replicas have. Its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, groups: list[Any]) -> torch.Tensor:
        ctx.groups = groups
        total = own.clone(memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(total, group=group)
        return total, None


def norm_over_replicas(module: Any, forward: Any, groups: list[Any], x: torch.Tensor) -> torch.Tensor:
    """A batch norm with the mean and variance of the samples of all replicas."""
    if not module.training and module.running_mean is not None:
        return forward(x)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    count = SumOverReplicas.apply(x.new_tensor([float(math.prod(x.shape[dim] for dim in dims))]), groups)
    mean = SumOverReplicas.apply(x.sum(dims), groups) / count
    centred = x - mean.view(shape)
    variance = SumOverReplicas.apply(centred.square().sum(dims), groups) / count
    if module.training and module.running_mean is not None:
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
            module.running_var.lerp_((variance * count / (count - 1)).to(module.running_var.dtype), share)
    normed = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is None:
        return normed
    return normed * module.weight.view(shape) + module.bias.view(shape)


def synchronise_statistics(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
    """Let batch norms take statistics over all replicas: by torch's own kernels on GPUs, elsewhere by all-reduces."""
    if mesh.device_type == "cuda" and len(setup.replica_axes) == 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("dp"))
        return
    groups = [mesh.get_group(axis) for axis in setup.replica_axes]
    norms: list[Any] = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for module in norms:
        module.forward = functools.partial(norm_over_replicas, module, module.forward, groups)
