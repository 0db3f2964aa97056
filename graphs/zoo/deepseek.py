"""DeepSeek-V2-Lite: many small experts, two that all tokens share, and attention from compressed keys and values.

Papers: DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model", 2024,
arXiv:2405.04434: section 2.1 (multi-head latent attention, decoupled rotary keys), section 2.2 (shared experts, and
tokens dropped at a capacity factor of 1 in training), appendix B (sizes); D. Dai et al., "DeepSeekMoE", 2024,
arXiv:2401.06066, for the shared experts. Each expert has seats for an even share of each sequence's requests, so that
every shape is static. Values are padded to the width of keys, as FlashAttention-2 wants them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.decoders import Decoder, DecoderConfig, DecoderLayer, SparseMixture, SwiGLU, rotate
from graphs.zoo.records import ZooModel, in_batches


@dataclass(frozen=True)
class DeepSeekConfig(DecoderConfig):
    """``inner_width`` is that of one expert.

    Attributes:
        shared_experts: that every token asks, as one network so many times as wide.
        dense_layers: the first ones, that have a network of `dense_width` and no experts.
        latent_width: of the compressed keys and values.
        plain_width, rotary_width, value_width: of a head's key without and with positions, and of its value.
    """

    shared_experts: int = 2
    dense_layers: int = 1
    dense_width: int = 10_944
    latent_width: int = 512
    plain_width: int = 128
    rotary_width: int = 64
    value_width: int = 128
    epsilon: float = 1e-6

    @property
    def table_width(self) -> int:
        return self.rotary_width


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made of one narrow tensor; [N, T, D] to the same."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.width, config.heads
        self.query = nn.Linear(width, heads * (config.plain_width + config.rotary_width), bias=False)
        self.compress = nn.Linear(width, config.latent_width + config.rotary_width, bias=False)
        self.norm = nn.RMSNorm(config.latent_width, eps=1e-6)
        self.expand = nn.Linear(config.latent_width, heads * (config.plain_width + config.value_width), bias=False)
        self.project = nn.Linear(heads * config.value_width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        c = self.config
        query = self.query(x).unflatten(2, (c.heads, -1)).transpose(1, 2)
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


class SharedMixture(nn.Module):
    """Routed experts, and beside them shared ones, which need nothing of the routing.

    x [N, T, D] to the sum of both [N, T, D] and the load-balancing loss (a scalar).
    """

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.routed = SparseMixture(config)
        self.shared = SwiGLU(config.width, config.shared_experts * config.inner_width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routed, balance = self.routed(x)
        return self.shared(x) + routed, balance


class DeepSeek(Decoder):
    """A decoder with latent attention, whose first layers have dense networks and the others mixtures."""

    def layer(self, config: DeepSeekConfig, number: int) -> DecoderLayer:  # type: ignore[override]
        is_dense = number < config.dense_layers
        attention = LatentAttention(config)
        inner = SwiGLU(config.width, config.dense_width) if is_dense else SharedMixture(config)
        return DecoderLayer(config, attention, inner)


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
)
_SMALL = replace(
    *(_LITE,),
    **{"batch_size": 2, "tokens": 16, "layers": 2, "width": 16, "heads": 2, "key_value_heads": 2, "inner_width": 8},
    **{"vocabulary": 20, "experts": 8, "experts_asked": 3, "shared_experts": 2, "dense_width": 32},
    **{"latent_width": 8, "plain_width": 8, "rotary_width": 4, "value_width": 8, "dtype": torch.float32},
)


def deepseek_v2_lite(small: bool, batch_size: int | None) -> ZooModel:
    """DeepSeek-V2-Lite of 27 layers with 64 experts of 1,408 each, on sequences of 4096 words."""
    config = in_batches(_SMALL if small else _LITE, batch_size)
    words = torch.randint(config.vocabulary, (config.batch_size, config.tokens))
    return ZooModel(DeepSeek(config), (words,), (words, torch.randint_like(words, config.vocabulary)))
