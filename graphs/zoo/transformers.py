"""Transformers: BERT-base and GPT-2, with attention as plain matrix products that any device runs the same way; for
long sequences it is one fused op.

Papers: J. Devlin, M.-W. Chang, K. Lee, K. Toutanova, "BERT: pre-training of deep bidirectional transformers", 2019,
section 3 (12 layers, hidden 768, 12 heads) and appendix A.2 (sequences of 128 with 20 masked words for most steps);
A. Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3 and Table 2 (12 layers
of width 768 to 48 of 1600, context 1024). Both papers train with larger batches spread over many devices; the batches
here are one device's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.convnets import logits_or_loss, with_images
from graphs.zoo.registry import ZooModel, in_batches


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[N, T, D] to [N, heads, T, D / heads]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Dropout) -> Tensor:
    """Scaled dot-product attention, [N, heads, T, d] three times to [N, T, heads * d]; mask is added to the scores."""
    scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[3])
    if mask is not None:
        scores = scores + mask.to(scores.dtype)  # FSDP casts parameters, not buffers
    return torch.matmul(dropout(scores.softmax(3)), value).transpose(1, 2).flatten(2)


def causal_mask(length: int) -> Tensor:
    """[T, T], minus infinity where the column lies in the row's future."""
    return torch.full((length, length), -math.inf).triu(1)


def init_normal(model: nn.Module, std: float = 0.02) -> None:
    """Weights of all linear and embedding layers from a normal distribution, biases zero, as both papers do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


@dataclass(frozen=True)
class BertConfig:
    """``tokens`` in a sequence, of which ``masked`` are to be guessed; ``positions`` it could have."""

    batch_size: int = 32
    tokens: int = 128
    masked: int = 20
    layers: int = 12
    width: int = 768
    heads: int = 12
    positions: int = 512
    vocabulary: int = 30_522
    dropout: float = 0.1


class BertLayer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and then normalised; [N, T, D] to the same."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.norm_attention = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.norm_output = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        attended = self.project(attend(query, key, value, None, self.dropout))
        x = self.norm_attention(x + self.dropout(attended))
        inner = self.contract(F.gelu(self.expand(x)))
        result: Tensor = self.norm_output(x + self.dropout(inner))
        return result


class Bert(nn.Module):
    """BERT with its two pre-training tasks.

    Words and segments [N, T] and masked positions [N, M] to the logits of the masked words [N, M, V] and of "is the
    next sentence" [N, 2]; with masked words [N, M] and next [N], to the sum of both mean cross-entropies.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.width
        self.word_embedding = nn.Embedding(config.vocabulary, width)
        self.position_embedding = nn.Embedding(config.positions, width)
        self.segment_embedding = nn.Embedding(2, width)
        self.norm_embedding = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(width, width)
        self.next_sentence = nn.Linear(width, 2)
        self.masked_transform = nn.Linear(width, width)
        self.masked_norm = nn.LayerNorm(width, eps=1e-12)
        self.masked_output = nn.Linear(width, config.vocabulary)
        init_normal(self)
        self.masked_output.weight = self.word_embedding.weight

    def forward(
        self,
        words: Tensor,
        segments: Tensor,
        masked_positions: Tensor,
        masked_words: Tensor | None = None,
        is_next: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        positions = self.position_embedding.weight[: words.shape[1]]
        x = self.word_embedding(words) + self.segment_embedding(segments) + positions
        x = self.dropout(self.norm_embedding(x))
        for layer in self.layers:
            x = layer(x)
        next_logits = self.next_sentence(self.pooler(x[:, 0]).tanh())
        masked = x.gather(1, masked_positions.unsqueeze(2).expand(-1, -1, x.shape[2]))
        masked_logits = self.masked_output(self.masked_norm(F.gelu(self.masked_transform(masked))))
        if masked_words is None or is_next is None:
            return masked_logits, next_logits
        masked_loss = F.cross_entropy(masked_logits.flatten(0, 1), masked_words.flatten())
        return masked_loss + F.cross_entropy(next_logits, is_next)


def bert_base(small: bool, batch_size: int | None) -> ZooModel:
    """BERT-base with its two pre-training tasks, on sequences of 128 words."""
    config = BertConfig()
    if small:
        config = BertConfig(2, tokens=8, masked=3, layers=2, width=16, heads=2, positions=16, vocabulary=20)
    config = in_batches(config, batch_size)
    words = torch.randint(config.vocabulary, (config.batch_size, config.tokens))
    segments = torch.randint_like(words, 2)
    masked_positions = torch.randint(config.tokens, (config.batch_size, config.masked))
    args = (words, segments, masked_positions)
    targets = (torch.randint_like(masked_positions, config.vocabulary), torch.randint(2, (config.batch_size,)))
    return ZooModel(Bert(config), args, (*args, *targets))


@dataclass(frozen=True)
class GPT2Config:
    """``tokens`` in a sequence of at most ``positions``; ``fused`` attention never has all scores in memory."""

    batch_size: int = 8
    tokens: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    dropout: float = 0.1
    fused: bool = False
    positions: int = 1024


class GPT2Layer(nn.Module):
    """Self-attention and a feed-forward network on normalised inputs, each added to its input.

    x [N, T, D] and mask [T, T] to the same shape as x; no mask asks for fused causal attention.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_inner = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        if mask is None:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        else:
            attended = attend(query, key, value, mask, self.dropout)
        x = x + self.dropout(self.project(attended))
        inner = self.contract(F.gelu(self.expand(self.norm_inner(x)), approximate="tanh"))
        result: Tensor = x + self.dropout(inner)
        return result


class GPT2(nn.Module):
    """Words [N, T] to the logits of the next word [N, T, V]; with labels [N, T], to the mean cross-entropy."""

    mask: Tensor | None

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(max(config.positions, config.tokens), config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(GPT2Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("mask", None if config.fused else causal_mask(config.tokens), persistent=False)
        init_normal(self)
        self.output.weight = self.word_embedding.weight

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.dropout(self.word_embedding(words) + self.position_embedding.weight[: words.shape[1]])
        for layer in self.layers:
            x = layer(x, self.mask)
        logits: Tensor = self.output(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


_SMALL_GPT2 = GPT2Config(2, tokens=6, layers=2, width=16, heads=2, vocabulary=20)


def gpt2(small: bool, batch_size: int | None) -> ZooModel:
    """GPT-2 of 12 layers, on sequences of 512 words, half of its context: a batch of 64 trains on one large GPU."""
    return _gpt2(replace(_SMALL_GPT2, fused=True) if small else GPT2Config(64, tokens=512, fused=True), batch_size)


def gpt2_medium(small: bool, batch_size: int | None) -> ZooModel:
    """GPT-2 of 24 layers, on sequences of 1024 words."""
    return _gpt2(_SMALL_GPT2 if small else GPT2Config(layers=24, width=1024, heads=16), batch_size)


def gpt2_large(small: bool, batch_size: int | None) -> ZooModel:
    """GPT-2 of 36 layers, on sequences of 1024 words."""
    return _gpt2(_SMALL_GPT2 if small else GPT2Config(layers=36, width=1280, heads=20), batch_size)


def gpt2_xl(small: bool, batch_size: int | None) -> ZooModel:
    """GPT-2 of 48 layers, on sequences of 1024 words."""
    return _gpt2(_SMALL_GPT2 if small else GPT2Config(layers=48, width=1600, heads=25), batch_size)


def gpt_long(small: bool, batch_size: int | None) -> ZooModel:
    """GPT-2 of 12 layers, on sequences of 32,768 words, with fused attention and no dropout inside it."""
    return _gpt2(replace(_SMALL_GPT2, fused=True) if small else GPT2Config(tokens=32_768, fused=True), batch_size)


def _gpt2(config: GPT2Config, batch_size: int | None) -> ZooModel:
    config = in_batches(config, batch_size)
    words = torch.randint(config.vocabulary, (config.batch_size, config.tokens))
    return ZooModel(GPT2(config), (words,), (words, torch.randint_like(words, config.vocabulary)))


# -- Vision transformers --------------------------------------------------------------------------------------------
# Vision transformers: images as sequences of patches.
#
# Paper: A. Dosovitskiy et al., "An image is worth 16x16 words: transformers for image recognition at scale", 2021:
# section 3.1, Table 1 (base: 12 layers of width 768; large: 24 of 1024) and Table 3 (dropout 0.1 on ImageNet).


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
