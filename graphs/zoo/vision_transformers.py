"""Vision transformers: images as sequences of patches.

Paper: A. Dosovitskiy et al., "An image is worth 16x16 words: transformers for image recognition at scale", 2021:
section 3.1, Table 1 (base: 12 layers of width 768; large: 24 of 1024) and Table 3 (dropout 0.1 on ImageNet).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphs.zoo.classification import logits_or_loss, with_images
from graphs.zoo.records import ZooModel, in_batches
from graphs.zoo.transformers import attend, init_normal, split_heads


@dataclass(frozen=True)
class ViTConfig:
    """Square images of ``image_side`` pixels, cut into patches of ``patch_side``."""

    batch_size: int = 64
    image_side: int = 224
    patch_side: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    classes: int = 1000
    dropout: float = 0.1


class ViTLayer(nn.Module):
    """Self-attention and a feed-forward network, on normalised inputs, each added; [N, T, D] to the same."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width, eps=1e-6)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_inner = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        x = x + self.dropout(self.project(attend(query, key, value, None, self.dropout)))
        inner = self.contract(self.activation(self.expand(self.norm_inner(x))))
        result: Tensor = x + self.dropout(inner)
        return result


class ViT(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes], read from the class token; with labels [N], to the loss."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, patch = config.width, config.patch_side
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (config.image_side // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.output = nn.Linear(width, config.classes)
        init_normal(self)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        return logits_or_loss(self.output(self.norm(x)[:, 0]), labels)


_SMALL = ViTConfig(2, image_side=8, patch_side=4, layers=2, width=16, heads=2, classes=5)


def vit_b16(small: bool, batch_size: int | None) -> ZooModel:
    """ViT-B/16, 12 layers."""
    return _vit(_SMALL if small else ViTConfig(), batch_size)


def vit_l16(small: bool, batch_size: int | None) -> ZooModel:
    """ViT-L/16, 24 layers."""
    return _vit(_SMALL if small else ViTConfig(layers=24, width=1024, heads=16), batch_size)


def _vit(config: ViTConfig, batch_size: int | None) -> ZooModel:
    config = in_batches(config, batch_size)
    return with_images(ViT(config), config.batch_size, config.image_side, config.classes)
