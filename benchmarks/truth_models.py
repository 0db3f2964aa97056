"""Transformers of published training runs: one decoder, whose configuration says which.

It is captured without weights. Parts that frameworks run again are modules of their own: ``layers.*``,
``layers.*.post``, ``layers.*.inner.activation`` and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from truth_experts import Experts, Latent, LatentAttention, Mixture

import placement
from graphs.opgraph import OpGraph


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes and what it is made of.

    Attributes:
        layers, hidden, inner, heads, kv_heads, vocabulary, tokens: sizes; `tokens` of one sequence.
        gate: the activation is gated (SwiGLU); else there are two products and `activation`.
        activation: ``"gelu"``, ``"relu2"`` (squared) or ``"silu"``.
        norm: ``"rms"`` or ``"layer"``; ``"rms, torch 2.8"``: op by op, as torch ran it until then.
        positions: ``"rotary"``, ``"learned"`` or ``"alibi"``.
        biases: products have biases.
        tied: the head is the embedding.
        flash: attention is one kernel; else scores are written to memory and softmax reads them.
        precision: that it is trained in, as in docs/precision.md.
        autocast: parameters are float32, and products cast to bfloat16, as ``torch.autocast`` does, whatever
            `precision` says.
        head_norms: queries and keys are normalised, each head by itself.
        head: width of a head; 0: the hidden width over the heads.
        experts: of layers whose feed-forward network is a mixture.
        latent: of attention whose keys and values are made of one narrow tensor.
        adapters: rank of adapters (LoRA) beside all products of the layers, which alone are trained; 0: no adapters.
        dropout: share of numbers that are dropped of attention's weights, and of what each layer adds; 0: no dropout.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int
    gate: bool = True
    activation: str = "silu"
    norm: str = "rms"
    positions: str = "rotary"
    biases: bool = False
    tied: bool = False
    flash: bool = True
    precision: str = "bfloat16"
    autocast: bool = False
    head_norms: bool = False
    dropout: float = 0.0
    head: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    adapters: int = 0

    @property
    def head_width(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def used_parameters(self) -> int:
        """Of the products that a token goes through, the head among them, and nothing else."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_width
        if self.latent is not None:
            attention = self.latent.parameters(self.hidden, self.heads)
        each = (3 if self.gate else 2) * self.hidden
        dense, mixed = self.layers, 0
        if self.experts is not None:
            dense = self.experts.dense_layers
            mixed = (self.layers - dense) * (self.experts.asked * self.experts.inner + self.experts.shared)
        return self.layers * attention + each * (dense * self.inner + mixed) + self.hidden * self.vocabulary

    def model_flops(self, batch: int) -> float:
        """Of one training step: 6 for each parameter and token, 4 of one that is not trained, and 12 of attention for
        each pair of tokens."""
        width = self.heads * self.head_width if self.latent is None else self.latent.attended(self.heads)
        each = (4.0 if self.adapters else 6.0) * self.used_parameters + 12.0 * self.layers * width * self.tokens
        return each * batch * self.tokens


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys [N, T, heads, d]; tables [T, 1, d / 2]."""

    def forward(self, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        return _rotated(query, cosine, sine), _rotated(key, cosine, sine)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=3)


class Dropout(nn.Module):
    """Dropout that keeps a mask of bytes, as on a GPU; any shape to the same."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.native_dropout(x, self.share, True)[0] if self.share else x
        return result


class Adapted(nn.Linear):
    """A product that is not trained, and beside it two narrow ones that are (LoRA)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int) -> None:
        super().__init__(inputs, outputs, bias)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        adapted: Tensor = self.up(self.down(input))
        return super().forward(input) + adapted


def _linear(shape: Shape, inputs: int, outputs: int) -> nn.Module:
    if shape.adapters:
        return Adapted(inputs, outputs, shape.biases, shape.adapters)
    return nn.Linear(inputs, outputs, bias=shape.biases)


class Core(nn.Module):
    """Causal attention of queries, keys and values [N, heads, T, d]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.flash, self.grouped = shape.flash, shape.kv_heads < shape.heads
        self.scale = shape.head_width**-0.5
        self.drop = Dropout(shape.dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.flash and value.shape[3] != key.shape[3]:
            # cuDNN's kernel takes values that are narrower than keys; torch's others would spell attention out.
            kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
            attended: Tensor = kernel(query, key, value, None, True, 0.0, True)[0]
            return attended
        if self.flash:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale
        return torch.matmul(self.drop((scores + mask).softmax(3)), value)


class Attention(nn.Module):
    """Causal self-attention [N, T, D] to the same, without the last product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head = shape.head_width
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.query = _linear(shape, shape.hidden, shape.heads * head)
        self.key = _linear(shape, shape.hidden, shape.kv_heads * head)
        self.value = _linear(shape, shape.hidden, shape.kv_heads * head)
        self.rotary = Rotary() if shape.positions == "rotary" else None
        self.query_norm = _norm(shape, head) if shape.head_norms else None
        self.key_norm = _norm(shape, head) if shape.head_norms else None
        self.core = Core(shape)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        query, key, value = (
            each(x).unflatten(2, (heads, -1))
            for each, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, tables[0], tables[1])
        mask = None if self.core.flash else tables[2]
        result: Tensor = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        return result.transpose(1, 2).flatten(2)


class Post(nn.Module):
    """What follows attention: its last product, the sum with what came before, and the next norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        value = shape.head_width if shape.latent is None else shape.latent.value
        self.project = _linear(shape, shape.heads * value, shape.hidden)
        self.norm, self.drop = _norm(shape), Dropout(shape.dropout)

    def forward(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.drop(self.project(attended))
        return x, self.norm(x)


class Activation(nn.Module):
    """What stands between the products of the feed-forward network; a gated one has a product of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.activation
        self.expand = _linear(shape, shape.hidden, shape.inner) if shape.gate else None

    def forward(self, gated: Tensor, x: Tensor) -> Tensor:
        if self.kind == "relu2":
            result = F.relu(gated).square()
        else:
            result = F.gelu(gated) if self.kind == "gelu" else F.silu(gated)
        return result if self.expand is None else result * self.expand(x)


class Inner(nn.Module):
    """The feed-forward network [N, T, D] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = _linear(shape, shape.hidden, shape.inner)
        self.activation = Activation(shape)
        self.contract = _linear(shape, shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.contract(self.activation(self.gate(x), x))
        return result


class Layer(nn.Module):
    """Attention and a feed-forward network or a mixture, each on normalised inputs and added to them."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.attention: nn.Module = Attention(shape)
        if shape.latent is not None:
            self.attention = LatentAttention(shape.hidden, shape.heads, shape.latent, Core(shape))
        self.post, self.inner, self.drop = Post(shape), _inner(shape, number), Dropout(shape.dropout)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        x, normed = self.post(x, self.attention(self.norm(x), tables))
        result: Tensor = x + self.drop(self.inner(normed))
        return result


def _inner(shape: Shape, number: int) -> nn.Module:
    experts = shape.experts
    if experts is None or number < experts.dense_layers:
        return Inner(shape)
    shared = Inner(replace(shape, inner=experts.shared)) if experts.shared else None
    return Mixture(shape.hidden, experts, shape.gate, shared)


class Transformer(nn.Module):
    """Words and labels [N, T] to the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.word_embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        learned = shape.positions == "learned"
        self.position_embedding = nn.Embedding(shape.tokens, shape.hidden) if learned else None
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = _norm(shape)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.word_embedding.weight
        half = (shape.head_width if shape.latent is None else shape.latent.turned) // 2
        for name, table in (
            ("cosine", torch.zeros(shape.tokens, 1, half)),
            ("sine", torch.zeros(shape.tokens, 1, half)),
        ):
            self.register_buffer(name, table, persistent=False)
        mask = None if shape.flash else torch.zeros(shape.tokens, shape.tokens)
        self.register_buffer("mask", mask, persistent=False)
        if shape.adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".down." in name or ".up." in name)
        self.register_buffer("places", torch.arange(shape.tokens) if learned else None, persistent=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.shape.autocast):
            return self.loss(words, labels)

    def loss(self, words: Tensor, labels: Tensor) -> Tensor:
        """What `forward` computes, in the formats of the parameters unless autocast."""
        x = self.word_embedding(words)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self.places)
        tables = tuple(table if table is None else table.to(x.dtype) for table in (self.cosine, self.sine, self.mask))
        for layer in self.layers:
            x = layer(x, tables)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class _SpeltOut(nn.RMSNorm):
    """The norm as torch before 2.9 ran it on CUDA, op by op in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * self.weight).type_as(x)


def _norm(shape: Shape, size: int | None = None) -> nn.Module:
    size = shape.hidden if size is None else size
    if shape.norm == "rms, torch 2.8":
        return _SpeltOut(size, eps=1e-5)
    return nn.RMSNorm(size, eps=1e-5) if shape.norm == "rms" else nn.LayerNorm(size)


@lru_cache(maxsize=12)
def captured(shape: Shape, batch: int) -> OpGraph:
    """The graph of one training step on `batch` sequences, in the shape's precision, AdamW."""
    with torch.device("meta"):
        model = Transformer(shape)
        words = torch.empty(batch, shape.tokens, dtype=torch.long)
    precision = None if shape.autocast else shape.precision
    return placement.capture(model, (words, words), train=True, optimizer="adamw", precision=precision)
