"""A transformer layer, and what follows the last one, as Megatron-LM of 2022 computes them, captured without weights.

Attention is computed op by op, with dropout of its softmax; weights and activations are bfloat16. Two things are not
PyTorch's usual ones. Dropout keeps a mask of one byte for each number, as it does on a GPU; traced on other devices it
would keep one in the type of the activations. Queries, keys and values come from three matrix products, not from one.
Scores are scaled and masked in the one kernel of Megatron's softmax, so they are neither here; where that kernel cannot
be used, each of its steps is an op.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from graphs.capture import capture
from graphs.opgraph import OpGraph

DROPPED = 0.1


class MaskedDropout(nn.Module):
    """Dropout with a mask of bytes; any shape to the same."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.native_dropout(x, DROPPED, True)[0]
        return result


class UnfusedAttention(nn.Module):
    """Self-attention of `heads` heads, its core op by op; [N, T, D] to the same.

    Args:
        masked_tokens: T where scores are scaled and masked by ops of their own; 0: in the kernel of the softmax.
    """

    later: Tensor

    def __init__(self, width: int, heads: int, masked_tokens: int = 0) -> None:
        super().__init__()
        self.heads, self.drop = heads, MaskedDropout()
        self.register_buffer("later", torch.ones(masked_tokens, masked_tokens, dtype=torch.bool))
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.view(n, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        scores = torch.matmul(query, key.transpose(2, 3))
        if self.later.numel():  # in 32 bits, and back
            scores = (scores.float() * (d // self.heads) ** -0.5).masked_fill(self.later, -10000.0)
        weights = self.drop(torch.softmax(scores, 3).to(x.dtype))
        result: Tensor = self.project(torch.matmul(weights, value).transpose(1, 2).reshape(n, t, d))
        return result


class MegatronLayer(nn.Module):
    """One layer, norms first; [N, T, D] to the same."""

    def __init__(self, width: int, heads: int, masked_tokens: int = 0) -> None:
        super().__init__()
        self.attention = UnfusedAttention(width, heads, masked_tokens)
        self.norm, self.drop = nn.LayerNorm(width), MaskedDropout()
        self.norm_mlp, self.drop_mlp = nn.LayerNorm(width), MaskedDropout()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        result: Tensor = x + self.drop_mlp(self.mlp(self.norm_mlp(x)))
        return result


class MegatronHead(nn.Module):
    """From the last layer's output [N, T, D] and tokens [N, T] to the loss, which is computed in float32."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.logits(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Between(nn.Module):
    """A module of a model, ``layers.0``, after something that is trained: so its input's gradient is computed too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList([module])

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        result: Tensor = self.layers[0](x + self.before, *others)
        return result


@cache
def captured_layer(width: int, heads: int, tokens: int, micro_batch: int, fused_softmax: bool = True) -> OpGraph:
    """Forward and backward pass of one layer; what lies outside module ``layers.0`` is no part of it."""
    with torch.device("meta"):
        model = Between(MegatronLayer(width, heads, 0 if fused_softmax else tokens)).to(torch.bfloat16)
        x = torch.empty(micro_batch, tokens, width, dtype=torch.bfloat16)
    return capture(model, (x,), train=True, loss=lambda y: y.sum(), name="transformer layer")


@cache
def captured_head(width: int, tokens: int, micro_batch: int, vocabulary: int) -> OpGraph:
    """Forward and backward pass from the last layer's output to the loss; module ``layers.0``, as above."""
    with torch.device("meta"):
        model = Between(MegatronHead(width, vocabulary)).to(torch.bfloat16)
        x = torch.empty(micro_batch, tokens, width, dtype=torch.bfloat16)
        labels = torch.zeros(micro_batch, tokens, dtype=torch.long)
    return capture(model, (x, labels), train=True, name="head of a transformer")
