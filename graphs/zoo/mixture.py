"""Mixtures of experts: a causal transformer whose experts are branches of their own, and DeepSeek-V2-Lite.

Paper of the first: D. Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic
sharding", 2021, section 2.2 and algorithm 1: top-2 gating within groups of tokens, each expert with a fixed capacity,
dispatch and combination as matrix products, so that every shape is static. Here every layer is a mixture, a group is
one sequence, and the second expert is not dropped at random. The sizes are ours: 8 layers of width 1024 with 8 experts
of 4096. At that size an expert takes 34 GFLOP per step for 8 MiB of tokens in and as many out, so that placing it pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.decoders import DecoderConfig, decoder, rotate
from graphs.zoo.registry import ZooModel, in_batches
from graphs.zoo.transformers import attend, causal_mask, init_normal, split_heads


@dataclass(frozen=True)
class MixtureConfig:
    """``tokens`` in a sequence, ``experts`` in each layer; ``balance_weight`` of the load-balancing loss."""

    batch_size: int = 16
    tokens: int = 512
    layers: int = 8
    width: int = 1024
    heads: int = 16
    experts: int = 8
    expert_width: int = 4096
    vocabulary: int = 32_000
    balance_weight: float = 0.01

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that one expert takes: twice an even share, as each token asks two experts."""
        return 2 * self.tokens // self.experts


class Router(nn.Module):
    """Top-2 gating: x [N, T, D] to the combination weights [N, T, E, C] and the load-balancing loss (a scalar).

    Weight [n, t, e, c] is that of expert e for token t, which sits in the expert's slot c; all zero where t does not
    go to e, or came too late for its capacity.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.experts, self.capacity = config.experts, config.capacity
        self.gate = nn.Linear(config.width, config.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(2)
        weights, chosen = gates.topk(2, dim=2)
        weights = weights / weights.sum(2, keepdim=True)
        first, second = (F.one_hot(choice, self.experts).to(x.dtype) for choice in chosen.unbind(2))
        # All first choices are seated before any second choice.
        seat_first = first.cumsum(1) - first
        seat_second = second.cumsum(1) - second + first.sum(1, keepdim=True)
        combine = self._seated(first * weights[..., :1], seat_first) + self._seated(
            second * weights[..., 1:], seat_second
        )
        balance = (gates.mean(1) * first.mean(1)).mean() * self.experts**2
        return combine, balance

    def _seated(self, weights: Tensor, seats: Tensor) -> Tensor:
        """Weights and seat numbers [N, T, E] to [N, T, E, C]; a seat beyond the capacity matches no slot."""
        slots = torch.arange(self.capacity, device=seats.device, dtype=seats.dtype)
        return weights.unsqueeze(3) * (seats.unsqueeze(3) == slots)


class Expert(nn.Module):
    """A feed-forward network, [N, C, D] to the same."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner_width)
        self.contract = nn.Linear(inner_width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.contract(F.relu(self.expand(x)))
        return result


class Mixture(nn.Module):
    """x [N, T, D] to the weighted sum of its tokens' experts [N, T, D] and the load-balancing loss."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = nn.ModuleList(Expert(config.width, config.expert_width) for _ in range(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, balance = self.router(x)
        total: Tensor | None = None
        for expert, weights in zip(self.experts, combine.unbind(2), strict=True):
            seated = torch.bmm((weights > 0).to(x.dtype).transpose(1, 2), x)
            returned = torch.bmm(weights, expert(seated))
            total = returned if total is None else total + returned
        assert total is not None, "a mixture has at least one expert"
        return total, balance


class MixtureLayer(nn.Module):
    """Self-attention and a mixture on normalised inputs, each added to its input.

    x [N, T, D] and mask [T, T] to the same shape as x and the load-balancing loss.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mixture = nn.LayerNorm(width)
        self.mixture = Mixture(config)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm_attention(x)
        query, key, value = (split_heads(linear(normed), self.heads) for linear in (self.query, self.key, self.value))
        x = x + self.dropout(self.project(attend(query, key, value, mask, self.dropout)))
        mixed, balance = self.mixture(self.norm_mixture(x))
        return x + self.dropout(mixed), balance


class MixtureTransformer(nn.Module):
    """Words [N, T] to the logits of the next word [N, T, V].

    With labels [N, T], to the mean cross-entropy plus the weighted load-balancing losses.
    """

    mask: Tensor

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.balance_weight = config.balance_weight
        self.word_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.tokens, config.width)
        self.layers = nn.ModuleList(MixtureLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("mask", causal_mask(config.tokens), persistent=False)
        init_normal(self)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.word_embedding(words) + self.position_embedding.weight
        balances: list[Tensor] = []
        for layer in self.layers:
            x, balance = layer(x, self.mask)
            balances.append(balance)
        logits: Tensor = self.output(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + self.balance_weight * torch.stack(balances).mean()


def transformer_moe(small: bool, batch_size: int | None) -> ZooModel:
    """A transformer of 8 layers with 8 experts each, on sequences of 512 words."""
    config = MixtureConfig()
    if small:
        config = MixtureConfig(2, tokens=32, layers=2, width=16, heads=2, experts=4, expert_width=32, vocabulary=20)
    config = in_batches(config, batch_size)
    words = torch.randint(config.vocabulary, (config.batch_size, config.tokens))
    labels = torch.randint_like(words, config.vocabulary)
    return ZooModel(MixtureTransformer(config), (words,), (words, labels))


# -- DeepSeek -------------------------------------------------------------------------------------------------------
# DeepSeek-V2-Lite: many small experts, two that all tokens share, and attention from compressed keys and values.
#
# Papers: DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model", 2024,
# arXiv:2405.04434: section 2.1 (multi-head latent attention, decoupled rotary keys), section 2.2 (shared experts, and
# tokens dropped at a capacity factor of 1 in training), appendix B (sizes); D. Dai et al., "DeepSeekMoE", 2024,
# arXiv:2401.06066, for the shared experts. Each expert has seats for an even share of each sequence's requests, so that
# every shape is static. Values are padded to the width of keys, as FlashAttention-2 wants them.


@dataclass(frozen=True)
class DeepSeekConfig(DecoderConfig):
    """Attention has queries, keys and values of its own widths; ``inner_width`` is that of one expert.

    Attributes:
        latent_width: of the compressed keys and values.
        query_latent_width: of the compressed queries; 0: they are not compressed.
        plain_width, rotary_width, value_width: of a head's key without and with positions, and of its value.
    """

    latent_width: int = 512
    plain_width: int = 128
    rotary_width: int = 64
    value_width: int = 128
    epsilon: float = 1e-6
    query_latent_width: int = 0

    @property
    def table_width(self) -> int:
        return self.rotary_width

    def attention(self) -> nn.Module:
        return LatentAttention(self)


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made of one narrow tensor; [N, T, D] to the same."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.width, config.heads
        narrow, wide = config.query_latent_width, heads * (config.plain_width + config.rotary_width)
        self.query_compress = nn.Linear(width, narrow, bias=False) if narrow else nn.Identity()
        self.query_norm = nn.RMSNorm(narrow, eps=1e-6) if narrow else nn.Identity()
        self.query = nn.Linear(narrow or width, wide, bias=False)
        self.compress = nn.Linear(width, config.latent_width + config.rotary_width, bias=False)
        self.norm = nn.RMSNorm(config.latent_width, eps=1e-6)
        self.expand = nn.Linear(config.latent_width, heads * (config.plain_width + config.value_width), bias=False)
        self.project = nn.Linear(heads * config.value_width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        c = self.config
        query = self.query(self.query_norm(self.query_compress(x))).unflatten(2, (c.heads, -1)).transpose(1, 2)
        plain_query, turned_query = query.split((c.plain_width, c.rotary_width), dim=3)
        latent, turned_key = self.compress(x).split((c.latent_width, c.rotary_width), dim=2)
        expanded = self.expand(self.norm(latent)).unflatten(2, (c.heads, -1)).transpose(1, 2)
        plain_key, value = expanded.split((c.plain_width, c.value_width), dim=3)
        turned_key = rotate(turned_key.unsqueeze(1), cosine, sine).expand(-1, c.heads, -1, -1)
        query = torch.cat([plain_query, rotate(turned_query, cosine, sine)], dim=3)
        key = torch.cat([plain_key, turned_key], dim=3)
        padded = F.pad(value, (0, c.plain_width + c.rotary_width - c.value_width))
        attended = F.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., : c.value_width]
        result: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return result


_LITE = DeepSeekConfig(
    *(8, 4096, 27, 2048),
    heads=16,
    key_value_heads=16,
    inner_width=1408,
    vocabulary=102_400,
    rotary_base=10_000.0,
    experts=64,
    experts_asked=6,
    balance_weight=0.001,
    weights_sum_to_1=False,
    shared_width=2 * 1408,
    dense_layers=1,
    dense_width=10_944,
)
_SMALL = replace(
    *(_LITE,),
    **{"batch_size": 2, "tokens": 16, "layers": 2, "width": 16, "heads": 2, "key_value_heads": 2, "inner_width": 8},
    **{"vocabulary": 20, "experts": 8, "experts_asked": 3, "shared_width": 16, "dense_width": 32},
    **{"latent_width": 8, "plain_width": 8, "rotary_width": 4, "value_width": 8, "dtype": torch.float32},
)


def deepseek_v2_lite(small: bool, batch_size: int | None) -> ZooModel:
    """DeepSeek-V2-Lite of 27 layers with 64 experts of 1,408 each, on sequences of 4096 words."""
    return decoder(in_batches(_SMALL if small else _LITE, batch_size))
