"""Experts on several ranks: tokens go to the ranks that have the experts which they ask, and what these answer back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from placement.runtime.torch_runner.module_parallel import cut, with_own_parts

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup

# What leaves an expert's rows where they are.
BY_ENTRY = (
    *(nn.functional.silu, nn.functional.gelu, nn.functional.relu, torch.sigmoid, torch.tanh, torch.mul, torch.add),
    *(torch.Tensor.mul, torch.Tensor.add, torch.Tensor.__mul__, torch.Tensor.__add__),
)


def cut_experts(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> DeviceMesh:
    """Cut stacked weights by experts; returns the mesh of ranks with the same experts and of those with all.

    The axis of replicas is both: so many ranks in a row have all experts.
    """
    names = mesh.mesh_dim_names or ()
    dim = names.index("dp")
    axes = (*names[:dim], "alike", "experts", *names[dim + 1 :])
    shape = mesh.mesh.shape
    ranks = mesh.mesh.view(*shape[:dim], -1, setup.experts, *shape[dim + 1 :])
    apart = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=axes)
    for path, is_asked in setup.expert_modules.items():
        module: Any = model.get_submodule(path)
        parts = apart["experts"]
        if next(module.parameters(), None) is None:
            continue  # of another stage
        cut(module, parts, {name: Shard(0) for name, _ in module.named_parameters(recurse=False)})
        if is_asked:
            if hasattr(module, "num_experts"):
                module.num_experts //= setup.experts
            module.forward = functools.partial(asked, module, module.forward, parts)
        else:
            module.forward = functools.partial(with_rows, module.forward, parts)
        if not setup.shards_experts and apart["alike"].size() > 1:
            for p in module.parameters(recurse=False):
                p.register_hook(functools.partial(of_alike, group=apart.get_group("alike")))
    return apart


def of_alike(gradient: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean of a gradient over ranks with the same experts."""
    own = gradient.to_local().contiguous()
    dist.all_reduce(own, group=group)
    return DTensor.from_local(own / group.size(), gradient.device_mesh, gradient.placements, run_check=False)


class Mean(torch.autograd.Function):
    """A weight whose gradient is a sum over the samples of several replicas, made a mean as those of others are."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        weight, ctx.replicas = args
        same: torch.Tensor = weight.view_as(weight)
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] / ctx.replicas, None


def mean(weight: torch.Tensor, replicas: int) -> torch.Tensor:
    made: torch.Tensor = Mean.apply(weight, replicas)
    return made


def asked(
    module: Any,
    forward: Callable[..., torch.Tensor],
    parts: DeviceMesh,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What experts make of tokens [tokens, features], each of which asks some [tokens, asked], with weights."""
    group, size = parts.get_group(), parts.size()
    own = next(module.parameters()).to_local().shape[0]  # experts of this rank
    order = top_k_index.flatten().argsort(stable=True)
    experts = top_k_index.flatten()[order]
    sent = (experts // own).bincount(minlength=size)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    sends, gets = sent.tolist(), got.tolist()
    tokens = all_to_all_single_autograd(hidden_states[order // top_k_index.shape[1]], gets, sends, group)
    numbers = experts.new_empty(sum(gets))
    dist.all_to_all_single(numbers, experts % own, gets, sends, group=group)
    one = top_k_weights.new_ones(len(numbers), 1)
    made = with_own_parts(module, forward, tokens, numbers.unsqueeze(1), one, changed=lambda p: mean(p, size))
    answers = all_to_all_single_autograd(made.contiguous(), sends, gets, group)
    by_token = torch.zeros_like(answers).index_copy(0, order, answers).reshape(*top_k_index.shape, -1)
    return (by_token * top_k_weights.unsqueeze(2)).sum(1).to(hidden_states.dtype)


def with_rows(forward: Callable[..., Any], parts: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """A forward pass whose batched products [experts, rows, features] are computed where the experts are."""
    with RowsOfExperts(parts):
        return forward(*args, **kwargs)


class RowsOfExperts(TorchFunctionMode):
    """Sends rows to their experts before a product with a weight that is cut, and back before they are mixed."""

    def __init__(self, parts: DeviceMesh) -> None:
        super().__init__()
        self.parts = parts
        self.sent: tuple[Any, Any] = (None, None)  # rows that several products read, and where they are

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.bmm and isinstance(args[1], DTensor):
            return function(self.at_experts(args[0]), mean(args[1], self.parts.size()))
        if function not in BY_ENTRY:
            args, kwargs = tree_map(self.at_home, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def at_experts(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(rows, DTensor):
            return rows
        if self.sent[0] is not rows:
            whole = DTensor.from_local(rows.contiguous(), self.parts, [Shard(1)], run_check=False)
            self.sent = rows, whole.redistribute(placements=[Shard(0)])
        moved: torch.Tensor = self.sent[1]
        return moved

    def at_home(self, value: Any) -> Any:
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and value.placements == (Shard(0),):
            return value.redistribute(placements=[Shard(1)]).to_local().contiguous()  # as products are
        return value
