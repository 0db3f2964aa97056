"""Mixtures of experts and latent attention as Megatron-LM runs them, for the transformers of `truth_models`.

Tokens are sorted by their expert, multiplied in groups, weighted within the activation and put back, so that nothing of
an expert's result is kept (megatron/core/transformer/moe: router.py, token_dispatcher.py, experts.py of TEGroupedMLP).
Keys and values are made of one narrow tensor (megatron/core/transformer/multi_latent_attention.py; DeepSeek-AI,
"DeepSeek-V2", 2024, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Experts:
    """The networks of which each token asks a few.

    Attributes:
        number, asked: how many there are in a layer, and how many of them a token asks.
        inner, shared: width of one, and of the network that all tokens ask beside them; 0 for none.
        dense_layers: first layers of the model that have one network instead.
        is_wide: the router's logits are computed in float32 (``--moe-router-dtype fp32``).
    """

    number: int
    asked: int
    inner: int
    shared: int = 0
    dense_layers: int = 0
    is_wide: bool = False


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    Attributes:
        query, keys: widths of what queries, and keys and values, are made of; 0: queries are made directly.
        plain, turned, value: of a head's key without and with positions, and of its value.
        has_norms: what queries, and keys and values, are made of is normalised (``--qk-layernorm``).
    """

    query: int
    keys: int
    plain: int = 128
    turned: int = 64
    value: int = 128
    has_norms: bool = True

    def parameters(self, hidden: int, heads: int) -> int:
        """Of the products of a layer's attention, the last one among them."""
        wide = heads * (self.plain + self.turned)
        queries = self.query * (hidden + wide) if self.query else hidden * wide
        keys = hidden * (self.keys + self.turned) + self.keys * heads * (self.plain + self.value)
        return queries + keys + heads * self.value * hidden

    def attended(self, heads: int) -> int:
        """Of all heads together, the mean width of keys and values."""
        return heads * (self.plain + self.turned + self.value) // 2


class Mixture(nn.Module):
    """Routed experts and, where there are, shared ones: [N, T, D] to the same.

    Args:
        shared: the network that all tokens ask, or None.
    """

    def __init__(self, hidden: int, experts: Experts, gate: bool, shared: nn.Module | None) -> None:
        super().__init__()
        self.experts, self.has_gate, self.shared = experts, gate, shared
        self.router = nn.Linear(hidden, experts.number, bias=False)
        self.expand = nn.Parameter(torch.empty(experts.number, hidden, (1 + gate) * experts.inner))
        self.contract = nn.Parameter(torch.empty(experts.number, experts.inner, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens, asked = x.flatten(0, 1), self.experts.asked
        gates = self._gates(tokens).softmax(1)
        weights, chosen = gates.topk(asked, dim=1)
        of_place, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(of_place.float(), bins=self.experts.number, min=0, max=self.experts.number - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        seated = tokens[order // asked]
        inner = self._activated(torch._grouped_mm(seated, self.expand, ends))
        inner = inner * weights.reshape(-1)[order].to(x.dtype).unsqueeze(1)
        answers = torch._grouped_mm(inner, self.contract, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        routed = answers[back].view(-1, asked, x.shape[2]).sum(1).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)

    def _gates(self, tokens: Tensor) -> Tensor:
        if self.experts.is_wide:
            return F.linear(tokens.float(), self.router.weight.float())
        result: Tensor = self.router(tokens).float()
        return result

    def _activated(self, x: Tensor) -> Tensor:
        if not self.has_gate:
            return F.gelu(x)
        gate, expand = x.chunk(2, dim=1)
        return F.silu(gate) * expand


class LatentAttention(nn.Module):
    """Causal self-attention [N, T, D] to its heads' results [N, T, heads * value], without the last product.

    Args:
        core: attention of queries, keys, values [N, heads, T, d] and a mask.
    """

    def __init__(self, hidden: int, heads: int, latent: Latent, core: nn.Module) -> None:
        super().__init__()
        self.heads, self.latent, self.core = heads, latent, core
        wide = heads * (latent.plain + latent.turned)
        self.query_down = nn.Linear(hidden, latent.query, bias=False) if latent.query else None
        self.query_norm = nn.RMSNorm(latent.query) if latent.query and latent.has_norms else nn.Identity()
        self.query = nn.Linear(latent.query or hidden, wide, bias=False)
        self.down = nn.Linear(hidden, latent.keys + latent.turned, bias=False)
        self.norm = nn.RMSNorm(latent.keys) if latent.has_norms else nn.Identity()
        self.up = nn.Linear(latent.keys, heads * (latent.plain + latent.value), bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        sizes, cosine, sine = self.latent, tables[0], tables[1]
        narrow = x if self.query_down is None else self.query_norm(self.query_down(x))
        query = self.query(narrow).unflatten(2, (self.heads, -1))
        plain_query, turned_query = query.split((sizes.plain, sizes.turned), dim=3)
        keys, turned_key = self.down(x).split((sizes.keys, sizes.turned), dim=2)
        expanded = self.up(self.norm(keys)).unflatten(2, (self.heads, -1))
        plain_key, value = expanded.split((sizes.plain, sizes.value), dim=3)
        turned_key = _turned(turned_key.unsqueeze(2), cosine, sine).expand(-1, -1, self.heads, -1)
        query = torch.cat([plain_query, _turned(turned_query, cosine, sine)], dim=3).transpose(1, 2)
        key = torch.cat([plain_key, turned_key], dim=3).transpose(1, 2)
        value = value.transpose(1, 2).contiguous()
        attended: Tensor = self.core(query, key, value, tables[2])
        return attended.transpose(1, 2).flatten(2)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=3)
