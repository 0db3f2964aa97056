"""Styles of tensor parallelism for modules that ``parallelize_module`` has none for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def gathered(x: Any, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """All of a tensor, of which each rank adds its own summand to the gradient.

    Args:
        layout: of the tensor, where it is no DTensor.
    """
    x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)
    whole: torch.Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole


def added_up(x: torch.Tensor, mesh: DeviceMesh, layout: Placement, is_local: bool) -> torch.Tensor:
    """The sum of what the ranks have, laid out so: the part as a plain tensor, or a DTensor."""
    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[layout])
    return total.to_local() if is_local else total


def summand(bias: Any, mesh: DeviceMesh) -> Any:
    """A bias that is whole on every rank, as what each adds of it to a sum over ranks."""
    return bias.to_local(grad_placements=[Partial()]) / mesh.size()


def cut(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make DTensors of a module's own parameters."""
    for name, p in list(module.named_parameters(recurse=False)):
        part = nn.Parameter(distribute_tensor(p, mesh, [placements[name]]), requires_grad=p.requires_grad)
        module.register_parameter(name, part)


class ModuleParallel(ParallelStyle):
    """Reads whole tensors, and writes the sum of what ranks make of their parts of the weights."""

    def __init__(
        self,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def gathered(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return gathered(x, mesh, self.input_layouts[0])

    def added_up(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return added_up(x, mesh, self.output_layouts[0], self.use_local_output)


class WholeParallel(ModuleParallel):
    """Lets a module read whole plain tensors, and cuts what it writes, as all ranks have it."""

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        def whole(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, DTensor) else value

        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            first = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
            first = first.redistribute(placements=self.output_layouts)
            return (first, *output[1:]) if isinstance(output, tuple) else first

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        return module


class AttentionParallel(ModuleParallel):
    """Cuts `nn.MultiheadAttention` by its heads."""

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        rows = {name: Shard(0) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
        in_blocks = {"in_proj_weight": _StridedShard(0, split_factor=3), "in_proj_bias": Replicate()}
        cut(module, mesh, {**rows, **in_blocks})
        cut(module.out_proj, mesh, {"weight": Shard(1), "bias": Replicate()})
        module.forward = functools.partial(self._forward, module, mesh)
        module._qkv_same_embed_dim = False  # keeps nn.TransformerEncoderLayer from kernels that read whole weights
        return module

    def _forward(
        self,
        module: Any,
        mesh: DeviceMesh,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole = {id(x): self.gathered(x, mesh) for x in (query, key, value)}
        is_batched = query.ndim == 3
        read = [whole[id(x)] if is_batched else whole[id(x)].unsqueeze(1) for x in (query, key, value)]
        if module.batch_first and is_batched:
            read = [x.transpose(0, 1) for x in read]
        q, k, v = (  # [batch, own heads, sequence, features of a head]
            heads_of(nn.functional.linear(x, weight, bias), module.head_dim)
            for x, weight, bias in zip(read, *self._projections(module, mesh), strict=True)
        )
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else self._mask(q, mesh, attn_mask, key_padding_mask)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(2, 3) / module.head_dim**0.5
            weights = nn.functional.dropout((scores if mask is None else scores + mask).softmax(3), dropout)
            made = weights @ v
            weights = self._told(weights if is_batched else weights.squeeze(0), mesh, average_attn_weights)
        else:
            made = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        out, bias = module.out_proj.weight.to_local(), module.out_proj.bias
        made = nn.functional.linear(made.permute(2, 0, 1, 3).flatten(2), out)
        made = made if bias is None else made + summand(bias, mesh)
        if not is_batched:
            made = made.squeeze(1)
        elif module.batch_first:
            made = made.transpose(0, 1)
        return self.added_up(made, mesh), weights

    @staticmethod
    def _projections(module: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        """This rank's rows of the weights, and of the biases, for query, key and value."""
        if module.in_proj_weight is None:
            weights = [p.to_local() for p in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
        else:
            weights = module.in_proj_weight.to_local().chunk(3)
        if module.in_proj_bias is None:
            return weights, (None, None, None)
        return weights, module.in_proj_bias.redistribute(
            placements=[_StridedShard(0, split_factor=3)]
        ).to_local().chunk(3)

    @staticmethod
    def _mask(
        q: torch.Tensor, mesh: DeviceMesh, attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What is added to the scores [batch, own heads, queries, keys], of those of all heads."""
        total = None
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[..., None, None, :]):
            if mask is None:
                continue
            if mask is attn_mask and mask.ndim == 3:
                mask = mask.view(len(q), -1, *mask.shape[1:]).tensor_split(mesh.size(), 1)[mesh.get_local_rank()]
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
            total = mask if total is None else total + mask
        return total

    @staticmethod
    def _told(weights: torch.Tensor, mesh: DeviceMesh, is_mean: bool) -> torch.Tensor:
        """The weights of all heads, or their mean."""
        if is_mean:
            return added_up(weights.mean(-3) / mesh.size(), mesh, Replicate(), True)
        heads = DTensor.from_local(weights, mesh, [Shard(weights.ndim - 3)], run_check=False)
        return heads.redistribute(placements=[Replicate()]).to_local()


def heads_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """[sequence, batch, features] as [batch, heads, sequence, features of a head]."""
    return x.reshape(*x.shape[:2], -1, width).permute(1, 2, 0, 3)


class SummedParallel(ModuleParallel):
    """Cuts a module's own parameters, such as stacked weights of experts, whose forward pass then makes a summand."""

    def __init__(self, placements: Mapping[str, Placement], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.placements = placements

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        cut(module, mesh, self.placements)
        module.forward = functools.partial(self._forward, module, module.forward, mesh)
        return module

    def _forward(
        self, module: nn.Module, forward: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        def whole(value: Any) -> Any:
            return self.gathered(value, mesh) if isinstance(value, torch.Tensor) else value

        made = with_own_parts(module, forward, *map(whole, args), **{name: whole(v) for name, v in kwargs.items()})
        return self.added_up(made, mesh)


def with_own_parts(
    module: Any,
    forward: Callable[..., torch.Tensor],
    *args: Any,
    changed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What a forward pass makes of a module whose own parameters are this rank's parts of them, as plain tensors.

    Args:
        changed: what is done to a part first.
    """
    parts = {name: p.to_local() for name, p in module.named_parameters(recurse=False)}
    if changed is not None:
        parts = {name: changed(part) for name, part in parts.items()}
    vars(module).update(parts)  # found before parameters of these names
    try:
        return forward(*args, **kwargs)
    finally:
        for name in parts:
            del vars(module)[name]


class TransposedParallel(ModuleParallel):
    """Cuts the weight [inputs, outputs] of a layer, such as `Conv1D` of transformers.

    Args:
        dimension: that is cut: 1, outputs, of which it hands on a part; or 0, inputs, of which it reads a part.
        blocks: of outputs, each of which is cut, such as query, key and value.
    """

    def __init__(
        self,
        dimension: int,
        blocks: int = 1,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        parts = Shard(-1)
        super().__init__(
            input_layouts or (Replicate() if dimension else parts),
            output_layouts or (parts if dimension else Replicate()),
            use_local_output,
        )
        self.dimension, self.blocks = dimension, blocks

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        of_outputs = self.dimension == 1 and self.blocks == 1
        part = Shard(self.dimension) if self.blocks == 1 else _StridedShard(1, split_factor=self.blocks)
        cut(module, mesh, {"weight": part, "bias": Shard(0) if of_outputs else Replicate()})
        module.forward = functools.partial(self._forward, module, mesh)
        return module

    def _forward(self, module: Any, mesh: DeviceMesh, x: Any) -> torch.Tensor:
        weight, bias = module.weight.to_local().t(), module.bias
        if self.dimension == 0:
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
            x = x.redistribute(placements=[Shard(x.ndim - 1)]).to_local()
            return self.added_up(nn.functional.linear(x, weight, summand(bias, mesh)), mesh)
        x = self.gathered(x, mesh)
        if self.blocks > 1:
            bias = bias.redistribute(placements=[_StridedShard(0, split_factor=self.blocks)])
            return in_blocks(nn.functional.linear(x, weight, bias.to_local()), self.blocks, mesh, self.use_local_output)
        made = nn.functional.linear(x, weight, bias.to_local())
        whole = torch.empty((*made.shape[:-1], module.weight.shape[1]), device="meta")
        parts = [Shard(made.ndim - 1)]
        made = DTensor.from_local(made, mesh, parts, run_check=False, shape=whole.shape, stride=whole.stride())
        layout = self.output_layouts[0]
        made = made if layout == Shard(-1) else made.redistribute(placements=[layout])
        return made.to_local() if self.use_local_output else made


class InBlocks(torch.Tensor):
    """This rank's part of each of several blocks of features, until the model takes them apart."""

    blocks: int
    mesh: DeviceMesh
    is_local: bool  # whether it is taken apart to plain tensors, not to DTensors

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        blocks, mesh, is_local, name = args[0].blocks, args[0].mesh, args[0].is_local, function.__name__
        own = args[0].as_subclass(torch.Tensor)
        shape = torch.Size((*own.shape[:-1], own.shape[-1] * mesh.size()))
        if name in ("chunk", "split", "view", "reshape", "unflatten"):
            # [..., blocks, features of each]: the last dimension is cut.
            apart = own.unflatten(-1, (blocks, -1))
            if not is_local:
                apart = DTensor.from_local(apart, mesh, [Shard(apart.ndim - 1)], run_check=False)
            elif name not in ("chunk", "split"):
                apart = own
            return apart.unbind(-2) if name in ("chunk", "split") else getattr(apart, name)(*args[1:], **(kwargs or {}))
        if (name == "__get__" and function.__self__ is torch.Tensor.shape) or name == "size":
            return shape if len(args) == 1 and not kwargs else torch.empty(shape, device="meta").size(*args[1:])
        if name == "__get__":
            return function(own)
        raise TypeError(f"{name} of features in blocks; expected chunk, split, view or reshape, which take them apart")


def in_blocks(made: torch.Tensor, blocks: int, mesh: DeviceMesh, is_local: bool) -> torch.Tensor:
    """A rank's part of each of several blocks of features, which knows how to be taken apart."""
    made = made.as_subclass(InBlocks)
    made.blocks, made.mesh, made.is_local = blocks, mesh, is_local
    return made


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
