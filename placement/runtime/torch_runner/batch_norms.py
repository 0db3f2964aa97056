"""Batch norms whose statistics are those of the whole batch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


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
