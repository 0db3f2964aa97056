"""Translation by stacked LSTMs with attention, unrolled by cell: `nmt2`, `nmt4`, `nmt8` and `gnmt`.

NMT: M.-T. Luong, H. Pham, C. D. Manning, "Effective approaches to attention-based neural machine translation", 2015,
section 3.1 (global attention, "general" score, without input feeding, so that decoder layers and time steps form a
wavefront). Depths, hidden size 1024 and batch 64: A. Mirhoseini et al., "A hierarchical model for device placement",
2018. GNMT: Y. Wu et al., "Google's neural machine translation system", 2016, section 3 (8 + 8 layers of 1024, the
first encoder layer bidirectional, residual connections from the third layer on, attention asked by the first decoder
layer); batch 64: D. Narayanan et al., "PipeDream", 2019, section 5.1. All use 32,000 word pieces. Sentences are
shorter than the papers' longest in the deep networks, which keeps the unrolled graphs at a few thousand ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphs.zoo.recurrent import LSTMCell, LSTMStack, State, logits_or_loss
from graphs.zoo.registry import ZooModel, in_batches


@dataclass(frozen=True)
class TranslationConfig:
    """``layers`` in the encoder, as many in the decoder; ``steps`` words in both sentences."""

    layers: int
    steps: int
    batch_size: int = 64
    hidden: int = 1024
    vocabulary: int = 32_000


class GeneralAttention(nn.Module):
    """Luong's "general" score: memory [N, S, H], keys [N, S, H] and query [N, H] to the context [N, H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(hidden, hidden, bias=False)

    def forward(self, memory: Tensor, keys: Tensor, query: Tensor) -> Tensor:
        weights = torch.bmm(keys, query.unsqueeze(2)).softmax(1)
        return torch.bmm(weights.transpose(1, 2), memory).squeeze(1)


class AdditiveAttention(nn.Module):
    """Bahdanau's score, a network with one hidden layer: memory, keys [N, S, H] and query [N, H] to context [N, H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, memory: Tensor, keys: Tensor, query: Tensor) -> Tensor:
        weights = self.score((keys + self.query(query).unsqueeze(1)).tanh()).softmax(1)
        return torch.bmm(weights.transpose(1, 2), memory).squeeze(1)


class NMT(nn.Module):
    """Source and previous target words, [N, T] each, to the logits of each step; with labels [N, T], to the loss.

    The decoder starts from the encoder's last states, layer by layer.
    """

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.source_embedding = nn.Embedding(config.vocabulary, hidden)
        self.target_embedding = nn.Embedding(config.vocabulary, hidden)
        self.encoder = LSTMStack(hidden, hidden, config.layers)
        self.decoder = LSTMStack(hidden, hidden, config.layers)
        self.attention = GeneralAttention(hidden)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, config.vocabulary)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        states: Sequence[State | None] = [None] * len(self.encoder.layers)
        encoded: list[Tensor] = []
        for x in self.source_embedding(source).unbind(1):
            top, states = self.encoder(x, states)
            encoded.append(top)
        memory = torch.stack(encoded, dim=1)
        keys = self.attention.key(memory)
        logits: list[Tensor] = []
        for x in self.target_embedding(target).unbind(1):
            top, states = self.decoder(x, states)
            context = self.attention(memory, keys, top)
            logits.append(self.output(self.combine(torch.cat([context, top], dim=1)).tanh()))
        return logits_or_loss(logits, labels)


class BidirectionalLayer(nn.Module):
    """Step inputs, T times [N, D], to step outputs, T times [N, 2 H]: one LSTM forwards, one backwards."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.forwards = LSTMCell(input_size, hidden_size)
        self.backwards = LSTMCell(input_size, hidden_size)

    def forward(self, steps: Sequence[Tensor]) -> list[Tensor]:
        left = _run(self.forwards, steps)
        right = _run(self.backwards, steps[::-1])[::-1]
        return [torch.cat(both, dim=1) for both in zip(left, right, strict=True)]


def _run(cell: LSTMCell, steps: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of an LSTM cell, one for each step, from a state of zeros."""
    state: State | None = None
    outputs: list[Tensor] = []
    for x in steps:
        state = cell(x, state)
        outputs.append(state[0])
    return outputs


class GNMTDecoder(nn.Module):
    """One step of the decoder; every layer reads the context, the layers from the third on are residual.

    The context is asked with the first layer's output of the step before, so that a step's first layer need not
    wait for the last layer of the step before.
    """

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LSTMCell(2 * hidden, hidden) for _ in range(layers))
        self.attention = AdditiveAttention(hidden)

    def forward(
        self, x: Tensor, states: Sequence[State | None], memory: Tensor, keys: Tensor
    ) -> tuple[Tensor, list[State]]:
        first = states[0]
        query = torch.zeros_like(x) if first is None else first[0]
        context = self.attention(memory, keys, query)
        new_states: list[State] = []
        for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
            new_states.append(cell(torch.cat([x, context], dim=1), state))
            hidden = new_states[-1][0]
            x = hidden + x if number >= 2 else hidden
        return x, new_states


class GNMT(nn.Module):
    """Source and previous target words, [N, T] each, to the logits of each step; with labels [N, T], to the loss."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.source_embedding = nn.Embedding(config.vocabulary, hidden)
        self.target_embedding = nn.Embedding(config.vocabulary, hidden)
        self.bidirectional = BidirectionalLayer(hidden, hidden)
        self.encoder = LSTMStack(2 * hidden, hidden, config.layers - 1, residual_from=1)
        self.decoder = GNMTDecoder(hidden, config.layers)
        self.output = nn.Linear(hidden, config.vocabulary)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        states: Sequence[State | None] = [None] * len(self.encoder.layers)
        encoded: list[Tensor] = []
        for x in self.bidirectional(self.source_embedding(source).unbind(1)):
            top, states = self.encoder(x, states)
            encoded.append(top)
        memory = torch.stack(encoded, dim=1)
        keys = self.decoder.attention.key(memory)
        states = [None] * len(self.decoder.layers)
        logits: list[Tensor] = []
        for x in self.target_embedding(target).unbind(1):
            top, states = self.decoder(x, states, memory, keys)
            logits.append(self.output(top))
        return logits_or_loss(logits, labels)


def nmt2(small: bool, batch_size: int | None) -> ZooModel:
    """Translation by 2 + 2 LSTM layers, 40 words each way."""
    return _translation(NMT, in_batches(_small(2) if small else TranslationConfig(layers=2, steps=40), batch_size))


def nmt4(small: bool, batch_size: int | None) -> ZooModel:
    """Translation by 4 + 4 LSTM layers, 24 words each way."""
    return _translation(NMT, in_batches(_small(4) if small else TranslationConfig(layers=4, steps=24), batch_size))


def nmt8(small: bool, batch_size: int | None) -> ZooModel:
    """Translation by 8 + 8 LSTM layers, 14 words each way."""
    return _translation(NMT, in_batches(_small(8) if small else TranslationConfig(layers=8, steps=14), batch_size))


def gnmt(small: bool, batch_size: int | None) -> ZooModel:
    """Google's translation system: 8 + 8 LSTM layers, 12 words each way."""
    return _translation(GNMT, in_batches(_small(8) if small else TranslationConfig(layers=8, steps=12), batch_size))


def _small(layers: int) -> TranslationConfig:
    """The configuration that tests use."""
    return TranslationConfig(layers, steps=3, batch_size=2, hidden=8, vocabulary=20)


def _translation(network: type[NMT] | type[GNMT], config: TranslationConfig) -> ZooModel:
    """A translation network and sentences of random words."""
    source, target, labels = torch.randint(config.vocabulary, (3, config.batch_size, config.steps)).unbind(0)
    args = (source, target)
    return ZooModel(network(config), args, (*args, labels))
