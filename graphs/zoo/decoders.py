"""Decoders of today, of any sizes: Llama 3 and Mixtral among them. Attention is one fused op.

Papers: A. Grattafiori et al., "The Llama 3 herd of models", 2024, section 3.2 and Table 3 (sizes, grouped-query
attention with 8 key-value heads, rotary embedding of base 500,000, SwiGLU, RMSNorm of B. Zhang and R. Sennrich,
2019); A. Jiang et al., "Mixtral of experts", 2024, section 2 and Table 1 (8 experts, of which every token asks two,
weighted by the softmax over both logits). Mixtral drops no token; here an expert has seats for an even share of each
sequence's requests, as in GShard (D. Lepikhin et al., 2021), so that every shape is static. Weights and activations
are bfloat16, as the weights were published, the loss is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.errors import GraphError, UnknownNameError
from graphs.zoo.registry import ZooModel, in_batches
from graphs.zoo.transformers import init_normal, split_heads

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned", "none")


@dataclass(frozen=True)
class DecoderConfig:
    """``tokens`` in a sequence; with ``experts`` each layer has so many feed-forward networks of ``inner_width``.

    Attributes:
        experts_asked: by each token.
        capacity_factor: seats of all experts, over what the tokens ask for.
        weights_sum_to_1: a token's weights of the experts it asks, else they are their shares among all experts.
        epsilon: of norms.
        head_width: of a head; 0: the width over the heads.
        gated: feed-forward networks have three products, of which one gates another; else two.
        activation, norm, positions: of `ACTIVATIONS`, `NORMS` and `POSITIONS`.
        biases: all products have them but the last one and those of experts.
        input_biases: the products to queries, keys and values have them, whatever `biases` says.
        tied: the last product has the weights of the embedding.
        head_norms: queries and keys are normalised, each head by itself.
        dropout: share that is dropped of the embedding and of what each layer adds; 0: no dropout.
        shared_width: of a network that every token asks beside its experts; 0: there is none.
        dense_layers: the first ones, that have one network of `dense_width` and no experts.

    Raises:
        UnknownNameError: no such activation, norm or positions.
        GraphError: sizes that do not divide, or experts without a gate.
    """

    batch_size: int
    tokens: int
    layers: int
    width: int
    heads: int
    key_value_heads: int
    inner_width: int
    vocabulary: int
    rotary_base: float = 500_000.0
    experts: int = 0
    balance_weight: float = 0.02
    dtype: torch.dtype = torch.bfloat16
    experts_asked: int = 2
    capacity_factor: float = 1.0
    weights_sum_to_1: bool = True
    epsilon: float = 1e-5
    head_width: int = 0
    gated: bool = True
    activation: str = "silu"
    norm: str = "rms"
    positions: str = "rotary"
    biases: bool = False
    input_biases: bool = False
    tied: bool = False
    head_norms: bool = False
    dropout: float = 0.0
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0

    def __post_init__(self) -> None:
        for kind, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("positions", POSITIONS)):
            if getattr(self, kind) not in known:
                raise UnknownNameError(kind, getattr(self, kind), known)
        for name in (
            "batch_size",
            "tokens",
            "layers",
            "width",
            "heads",
            "key_value_heads",
            "inner_width",
            "vocabulary",
        ):
            if getattr(self, name) < 1:
                raise GraphError(f"got a decoder with {name}={getattr(self, name)}; expected 1 or more.")
        if self.heads % self.key_value_heads or (self.width % self.heads and not self.head_width):
            raise GraphError(
                f"got a decoder of width {self.width} with {self.heads} heads and {self.key_value_heads} of keys and "
                "values; expected the heads to divide the width, and those of keys and values to divide the heads."
            )
        if self.experts and (not self.gated or self.activation != "silu"):
            raise GraphError(
                "experts are gated by silu here; give gated=True and activation='silu' (--swiglu), or no experts."
            )
        if self.experts and not 1 <= self.experts_asked <= self.experts:
            raise GraphError(
                f"each token asks {self.experts_asked} of {self.experts} experts; expected at least 1, and at most all."
            )

    @property
    def numbers_of_head(self) -> int:
        """Width of a head's query, key and value."""
        return self.head_width or self.width // self.heads

    @property
    def table_width(self) -> int:
        """Numbers of a head that have positions."""
        return self.numbers_of_head

    def attention(self) -> nn.Module:
        """Attention of a layer: called with x [N, T, D] and the tables of positions."""
        return GroupedAttention(self)

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that one expert takes: an even share of what is asked, times the capacity factor."""
        return int(self.capacity_factor * self.experts_asked * self.tokens) // self.experts


def rotary_tables(tokens: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, width / 2] of position times frequency, for heads of `width`."""
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(tokens).unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding: x [N, heads, T, d], each pair (i, i + d / 2) turned by its position's angle."""
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=3)


class GroupedAttention(nn.Module):
    """Causal self-attention whose query heads share fewer key and value heads; [N, T, D] to the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        head, biases = config.numbers_of_head, config.biases or config.input_biases
        self.heads, self.key_value_heads = config.heads, config.key_value_heads
        self.is_rotary = config.positions == "rotary"
        self.query = nn.Linear(config.width, config.heads * head, bias=biases)
        self.key = nn.Linear(config.width, config.key_value_heads * head, bias=biases)
        self.value = nn.Linear(config.width, config.key_value_heads * head, bias=biases)
        self.project = nn.Linear(config.heads * head, config.width, bias=config.biases)
        self.query_norm = _norm(config, head) if config.head_norms else nn.Identity()
        self.key_norm = _norm(config, head) if config.head_norms else nn.Identity()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query = self.query_norm(split_heads(self.query(x), self.heads))
        query = rotate(query, cosine, sine) if self.is_rotary else query
        key = self.key_norm(split_heads(self.key(x), self.key_value_heads))
        key = rotate(key, cosine, sine) if self.is_rotary else key
        value = split_heads(self.value(x), self.key_value_heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Products to `inner_width` and back with an activation between them; [N, T, D] to the same.

    Gated by SiLU it is the SwiGLU of N. Shazeer, "GLU variants improve transformer", 2020.
    """

    def __init__(self, config: DecoderConfig, inner_width: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.width, inner_width, bias=config.biases) if config.gated else None
        self.expand = nn.Linear(config.width, inner_width, bias=config.biases)
        self.contract = nn.Linear(inner_width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        inner = activation(self.expand(x)) if self.gate is None else activation(self.gate(x)) * self.expand(x)
        result: Tensor = self.contract(inner)
        return result


class SparseMixture(nn.Module):
    """Top-k routing over SwiGLU experts whose weights are stacked, so that all run as batched matrix products.

    x [N, T, D] to the weighted sum of the k experts' outputs [N, T, D] and the load-balancing loss (a scalar). A token
    that finds its expert's seats taken gets nothing from that expert; first choices are seated before second ones.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        experts, width, inner = config.experts, config.width, config.inner_width
        self.experts, self.capacity, self.asked = experts, config.capacity, config.experts_asked
        self.weights_sum_to_1 = config.weights_sum_to_1
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, width, inner))
        self.expand = nn.Parameter(torch.empty(experts, width, inner))
        self.contract = nn.Parameter(torch.empty(experts, inner, width))
        for weight in (self.gate, self.expand, self.contract):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(x).float().softmax(2)
        weights, chosen = gates.topk(self.asked, dim=2)
        if self.weights_sum_to_1:
            weights = weights / weights.sum(2, keepdim=True)
        asked = F.one_hot(chosen.transpose(1, 2).flatten(1), self.experts)
        slots = self._slots(asked)
        answers = self._computed(x, slots) * weights.transpose(1, 2).flatten(1).unsqueeze(2).to(x.dtype)
        total, *others = answers.chunk(self.asked, dim=1)
        for answer in others:
            total = total + answer
        share = asked.chunk(self.asked, dim=1)[0].to(gates.dtype).mean(1)
        return total, (gates.mean(1) * share).mean() * self.experts**2

    def _slots(self, asked: Tensor) -> Tensor:
        """Requests [N, k T, E], 0 or 1, to the seat [N, k T] of each, counted over all experts; E * C without one."""
        seat = (asked.cumsum(1) * asked).sum(2) - 1
        expert = asked.argmax(2)
        return torch.where(seat < self.capacity, expert * self.capacity + seat, self.experts * self.capacity)

    def _computed(self, x: Tensor, slots: Tensor) -> Tensor:
        """Tokens [N, T, D] to what the expert of each request answers [N, k T, D]; zero without a seat."""
        batch, _, width = x.shape
        index = slots.unsqueeze(2).expand(-1, -1, width)
        empty = x.new_zeros(batch, self.experts * self.capacity + 1, width)
        seated = empty.scatter(1, index, x.repeat(1, self.asked, 1))[:, :-1]
        rows = seated.reshape(batch, self.experts, self.capacity, width).transpose(0, 1).flatten(1, 2)
        inner = F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.expand)
        answers = torch.bmm(inner, self.contract).reshape(self.experts, batch, self.capacity, width)
        return F.pad(answers.transpose(0, 1).flatten(1, 2), (0, 0, 0, 1)).gather(1, index)


class SharedMixture(nn.Module):
    """Routed experts, and beside them a shared one, which needs nothing of the routing.

    x [N, T, D] to the sum of both [N, T, D] and the load-balancing loss (a scalar).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.routed = SparseMixture(config)
        self.shared = FeedForward(config, config.shared_width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routed, balance = self.routed(x)
        return self.shared(x) + routed, balance


class DecoderLayer(nn.Module):
    """Attention and a feed-forward network or a mixture, each on normalised inputs and added to them.

    x [N, T, D] to the same, and a mixture's load-balancing loss (a scalar) or None.
    """

    def __init__(self, config: DecoderConfig, attention: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm_attention = _norm(config, config.width)
        self.attention = attention
        self.norm_inner = _norm(config, config.width)
        self.inner = inner
        self.dropout = _dropout(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.dropout(self.attention(self.norm_attention(x), cosine, sine))
        normed = self.norm_inner(x)
        if isinstance(self.inner, FeedForward):
            return x + self.dropout(self.inner(normed)), None
        mixed, balance = self.inner(normed)
        return x + self.dropout(mixed), balance


class Decoder(nn.Module):
    """Words [N, T] to the logits of the next word [N, T, V].

    With labels [N, T], to the mean cross-entropy, plus the weighted load-balancing losses where layers are mixtures.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.balance_weight = config.balance_weight
        self.word_embedding = nn.Embedding(config.vocabulary, config.width)
        is_learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.tokens, config.width) if is_learned else None
        self.dropout = _dropout(config)
        self.layers = nn.ModuleList(self.layer(config, number) for number in range(config.layers))
        self.norm = _norm(config, config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        tables = rotary_tables(config.tokens, config.table_width, config.rotary_base)
        for name, table in zip(("cosine", "sine"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        init_normal(self)
        if config.tied:
            self.output.weight = self.word_embedding.weight
        self.to(config.dtype)

    def layer(self, config: DecoderConfig, number: int) -> DecoderLayer:
        """A layer by its number."""
        attention = config.attention()  # before, as its weights are drawn first
        if not config.experts or number < config.dense_layers:
            inner: nn.Module = FeedForward(config, config.dense_width if config.experts else config.inner_width)
        else:
            inner = SharedMixture(config) if config.shared_width else SparseMixture(config)
        return DecoderLayer(config, attention, inner)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.word_embedding(words)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: words.shape[1]]
        x = self.dropout(x)
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)  # tables are wide where numbers of layers are not
        balances: list[Tensor] = []
        for layer in self.layers:
            x, balance = layer(x, cosine, sine)
            balances += [] if balance is None else [balance]
        logits: Tensor = self.output(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss + self.balance_weight * torch.stack(balances).mean() if balances else loss


def _norm(config: DecoderConfig, width: int) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(width, eps=config.epsilon)


def _dropout(config: DecoderConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


def decoder(config: DecoderConfig) -> ZooModel:
    """A decoder of any sizes, with random words and labels."""
    words = torch.randint(config.vocabulary, (config.batch_size, config.tokens))
    return ZooModel(Decoder(config), (words,), (words, torch.randint_like(words, config.vocabulary)))


_SMALL = DecoderConfig(2, 16, 2, 16, heads=4, key_value_heads=2, inner_width=32, vocabulary=20, dtype=torch.float32)


def small_decoder(config: DecoderConfig, batch_size: int) -> ZooModel:
    """A decoder of the same form as another one, with the small sizes."""
    sizes = {
        name: getattr(_SMALL, name) for name in ("tokens", "layers", "width", "heads", "inner_width", "vocabulary")
    }
    same = config.key_value_heads == config.heads
    found = replace(
        config,
        **sizes,
        key_value_heads=_SMALL.heads if same else min(config.key_value_heads, _SMALL.key_value_heads),
        head_width=min(config.head_width, 4),
        experts=min(config.experts, 4),
        experts_asked=min(config.experts_asked, 2),
        shared_width=min(config.shared_width, 2 * _SMALL.inner_width),
        dense_layers=min(config.dense_layers, 1),
        dense_width=min(config.dense_width, 2 * _SMALL.inner_width),
        dropout=0.0,
        dtype=torch.float32,
        batch_size=batch_size,
    )
    return decoder(found)


def llama3_8b(small: bool, batch_size: int | None) -> ZooModel:
    """Llama 3 of 32 layers, on sequences of 8192 words."""
    config = DecoderConfig(8, 8192, 32, 4096, heads=32, key_value_heads=8, inner_width=14_336, vocabulary=128_256)
    return decoder(in_batches(_SMALL if small else config, batch_size))


def llama3_70b(small: bool, batch_size: int | None) -> ZooModel:
    """Llama 3 of 80 layers, on sequences of 8192 words."""
    config = DecoderConfig(8, 8192, 80, 8192, heads=64, key_value_heads=8, inner_width=28_672, vocabulary=128_256)
    return decoder(in_batches(_SMALL if small else config, batch_size))


def mixtral_8x7b(small: bool, batch_size: int | None) -> ZooModel:
    """Mixtral of 32 layers with 8 experts each, on sequences of 4096 words."""
    config = DecoderConfig(
        8,
        4096,
        32,
        4096,
        heads=32,
        key_value_heads=8,
        inner_width=14_336,
        vocabulary=32_000,
        rotary_base=1e6,
        experts=8,
    )
    return decoder(in_batches(replace(_SMALL, experts=4) if small else config, batch_size))
