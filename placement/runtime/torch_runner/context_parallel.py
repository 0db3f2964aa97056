"""Parts of each sequence: a rank computes some of its words, and attention exchanges what it needs of the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def part_of_sequence(inputs: dict[str, Any], mesh: DeviceMesh, setup: Setup) -> dict[str, Any]:
    """Inputs of which those along the sequence are this rank's words."""
    rank = mesh["dp"].get_local_rank() % setup.context
    found = dict(inputs)
    if setup.shifts_labels:
        # The model compares a word with the label behind it, which another rank may have.
        shifted = nn.functional.pad(found["labels"], (0, 1), value=-100)[:, 1:]
        found["shift_labels"] = shifted.tensor_split(setup.context, 1)[rank].contiguous()
    if setup.adds_positions:
        words = next(found[name] for name in setup.sequence_inputs if found.get(name) is not None)
        found["position_ids"] = torch.arange(words.shape[1], device=words.device).expand(len(words), -1)
        found["position_ids"] = found["position_ids"].tensor_split(setup.context, 1)[rank].contiguous()
    for name, dim in setup.sequence_inputs.items():
        if found.get(name) is not None:
            found[name] = found[name].tensor_split(setup.context, dim)[rank].contiguous()
    return found


def enable_context(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
    """Let a model compute this rank's words."""
    names = mesh.mesh_dim_names or ()
    dim = names.index("dp")
    shape = mesh.mesh.shape
    apart = mesh.mesh.view(*shape[:dim], -1, setup.context, *shape[dim + 1 :])
    parts = DeviceMesh(mesh.device_type, apart, mesh_dim_names=(*names[:dim], "dp", "cp", *names[dim + 1 :]))["cp"]
    for path in setup.context_modules:
        module = model.get_submodule(path)
        tables = tuple((name, dim) for reader, name, dim in setup.tables if reader == path)
        module.forward = functools.partial(in_context, module, module.forward, tables, parts, setup.context_variant)


def in_context(
    module: nn.Module,
    forward: Callable[..., Any],
    tables: tuple[tuple[str, int], ...],
    parts: DeviceMesh,
    variant: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A forward pass with attention and positions of the whole sequence, which finds its own rows of tables."""
    own = []
    for name, dim in tables:
        path, _, attribute = name.rpartition(".")
        holder = module.get_submodule(path)
        table = getattr(holder, attribute)
        words = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)).shape[1]
        vars(holder)[attribute] = table.narrow(dim, parts.get_local_rank() * words, words)  # found before the table
        own.append((holder, attribute))
    try:
        modes = _get_current_function_mode_stack()
        is_inside = any(isinstance(mode, Context) for mode in modes)
        with contextlib.nullcontext() if is_inside else Context(parts, variant):
            return forward(*args, **kwargs)
    finally:
        for holder, attribute in own:
            del vars(holder)[attribute]


class Context(TorchFunctionMode):
    """Lets fused attention read all words, and `torch.arange` count them, where tensors have a part of them."""

    def __init__(self, parts: DeviceMesh, variant: str) -> None:
        super().__init__()
        self.parts, self.variant = parts, variant

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.arange and len(args) == 1:
            first = args[0] * self.parts.get_local_rank()
            return function(first, first + args[0], **(kwargs or {}))
        if function is nn.functional.multi_head_attention_forward:
            raise ValueError("nn.MultiheadAttention computes no parts of a sequence; call scaled_dot_product_attention")
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self.attention(*args, **(kwargs or {}))

    def attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention of [batch, heads, own words, features] to the words of all ranks."""
        if isinstance(query, DTensor):  # with some of the heads
            own = [x.redistribute(placements=query.placements).to_local() for x in (query, key, value)]
            made = self.attention(own[0], own[1], own[2], attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return DTensor.from_local(made, query.device_mesh, query.placements, run_check=False)
        if attn_mask is not None:
            raise ValueError("attention of parts of a sequence has no mask but the causal one; leave the mask out")
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.variant == "ring":
            if dropout_p:
                raise ValueError("attention in a ring has no dropout; take another way, or a dropout of 0")
            ring: torch.Tensor = Ring.apply(query, key, value, self.parts.get_group(), is_causal, scale)
            return ring
        if self.variant == "ulysses":
            query, key, value = (by_heads(x, self.parts) for x in (query, key, value))
            made = nn.functional.scaled_dot_product_attention(
                query, key, value, None, dropout_p, is_causal, scale=scale
            )
            return by_words(made, self.parts)
        key, value = (all_gather_single_autograd(x.contiguous(), 2, self.parts.get_group()) for x in (key, value))
        mask = None
        if is_causal:
            words = query.shape[2]
            seen = (self.parts.get_local_rank() + 1) * words
            key, value = key[:, :, :seen], value[:, :, :seen]
            mask = torch.ones(words, seen, dtype=torch.bool, device=query.device).tril(seen - words)
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale)


def by_heads(x: torch.Tensor, parts: DeviceMesh) -> torch.Tensor:
    """All words of some heads, of some words of all heads."""
    apart = (
        x.reshape(len(x), parts.size(), -1, *x.shape[2:]).movedim(1, 0).contiguous()
    )  # [parts, batch, heads, words, features]
    return all_to_all_single_autograd(apart, None, None, parts.get_group()).movedim(0, 2).flatten(2, 3)


def by_words(x: torch.Tensor, parts: DeviceMesh) -> torch.Tensor:
    """Some words of all heads, of all words of some heads."""
    apart = x.reshape(*x.shape[:2], parts.size(), -1, x.shape[3]).movedim(2, 0).contiguous()
    return all_to_all_single_autograd(apart, None, None, parts.get_group()).movedim(0, 1).flatten(1, 2)


class Ring(torch.autograd.Function):
    """Attention to keys and values that go round, a rank's words at a time, so that none has those of all.

    Scores of a block are computed again in the backward pass, where gradients of keys and values go round with them
    (H. Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        query, key, value, group, is_causal, scale = args
        made = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32, device=query.device)
        total = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
        block = [key, value]
        for step in range(group.size()):
            scores = scores_of(query, block[0], group, step, is_causal, scale)
            if scores is not None:
                more = scores.logsumexp(3)
                both = torch.logaddexp(total, more)
                made = made * (total - both).exp().unsqueeze(3)
                made = made + (scores - both.unsqueeze(3)).exp() @ block[1].float()
                total = both
            block = handed_on(block, group)
        ctx.save_for_backward(query, key, value, made, total)
        ctx.how = group, is_causal, scale
        return made.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, made, total = ctx.saved_tensors
        group, is_causal, scale = ctx.how
        gradient = gradients[0].float()
        along = (gradient * made).sum(3, keepdim=True)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        block = [key, value, *(torch.zeros_like(x, dtype=torch.float32) for x in (key, value))]
        for step in range(group.size()):
            scores = scores_of(query, block[0], group, step, is_causal, scale)
            if scores is not None:
                weights = (scores - total.unsqueeze(3)).exp()
                of_scores = weights * (gradient @ block[1].float().transpose(2, 3) - along) * scale
                of_query += of_scores @ block[0].float()
                block[2] = block[2] + of_scores.transpose(2, 3) @ query.float()
                block[3] = block[3] + weights.transpose(2, 3) @ gradient
            block = handed_on(block, group)
        return of_query.to(query.dtype), block[2].to(key.dtype), block[3].to(value.dtype), None, None, None


def scores_of(
    query: torch.Tensor, key: torch.Tensor, group: Any, step: int, is_causal: bool, scale: float
) -> torch.Tensor | None:
    """Scores of the words of this rank and those that came in a step; None where all of these come later."""
    rank, words = group.rank(), query.shape[2]
    origin = (rank - step) % group.size()
    if is_causal and origin > rank:
        return None
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if is_causal and origin == rank:
        later = torch.ones(words, words, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def handed_on(block: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """What the rank before has, while the next one gets this rank's."""
    rank, size = group.rank(), group.size()
    block, got = [x.contiguous() for x in block], [torch.empty_like(x.contiguous()) for x in block]
    after, before = ((rank + way) % size for way in (1, -1))
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in block]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in got]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    return got
