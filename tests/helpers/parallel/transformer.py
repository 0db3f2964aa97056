"""A small transformer with everything that parallel training cuts: embeddings, attention, two products, norms, loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, WORDS = 8, 16, 40


class Embedding(nn.Module):
    """Words [N, T] to [N, T, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(TOKENS, width))

    def forward(self, words: Tensor) -> Tensor:
        embedded: Tensor = self.words(words) + self.position
        return embedded


class Attention(nn.Module):
    """[N, T, D] to the same; as many heads as the local columns of the weights hold."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.depth = width // heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [linear(x).unflatten(-1, (-1, self.depth)) for linear in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        weights = (query @ key.transpose(2, 3) / self.depth**0.5).softmax(-1)
        result: Tensor = self.project((weights @ value).transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """[N, T, D] to the same: both halves work on normalised inputs and are added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        result: Tensor = x + self.contract(F.gelu(self.expand(self.norm_inner(x))))
        return result


class Transformer(nn.Module):
    """Words and labels, both [N, T], to the mean cross-entropy."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = Embedding(width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words and labels, the same whenever called."""
    generator = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(WORDS, (BATCH, TOKENS), generator=generator) for _ in range(2))
    return words, labels
