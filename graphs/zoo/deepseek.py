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

from graphs.zoo.decoders import DecoderConfig, decoder, rotate
from graphs.zoo.registry import ZooModel, in_batches


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
