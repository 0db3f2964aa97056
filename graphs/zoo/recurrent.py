"""Recurrent networks unrolled by cell, so that the wavefront over layers and time steps is in the graph.

`rnnlm`: R. Jozefowicz et al., "Exploring the limits of language modeling", 2016, with the sizes that A. Mirhoseini et
al., "A hierarchical model for device placement", 2018, use (2 layers, hidden 2048, batch 64); 40 steps, and the 10,000
words of the Penn Treebank. `s2vt`: S. Venugopalan et al., "Sequence to sequence - video to text", 2015, section 3
(fc7 features of 4096, embedded to 500; LSTMs of 1000; 80 steps in all); batch of D. Narayanan et al., "PipeDream",
2019, section 5.1. How many of the 80 steps are frames (60), and the size of the vocabulary (13,000), are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.registry import ZooModel, in_batches

State = tuple[Tensor, Tensor]  # hidden and cell state, [N, H] each


class LSTMCell(nn.Module):
    """One step of an LSTM layer: input [N, D] and state to the new state; no state means zeros.

    The product with the input (`i2h`) stands apart from the one with the state (`h2h`): it does not wait for the
    step before. The gates lie in the order input, forget, output, candidate.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.sizes = [3 * hidden_size, hidden_size]
        self.i2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, x: Tensor, state: State | None) -> State:
        preactivations: Tensor = self.i2h(x)
        if state is not None:
            preactivations = preactivations + self.h2h(state[0])
        gates, candidate = torch.split(preactivations, self.sizes, dim=1)
        keep, forget, show = gates.sigmoid().chunk(3, dim=1)
        cell = keep * candidate.tanh()
        if state is not None:
            cell = forget * state[1] + cell
        return show * cell.tanh(), cell


class LSTMStack(nn.Module):
    """One step of stacked LSTM layers: input [N, D] and one state per layer to the new states.

    From layer ``residual_from`` on (counted from 0) a layer's input is added to its output on the way up; the state
    stays without it.
    """

    def __init__(self, input_size: int, hidden_size: int, layers: int, residual_from: int | None = None) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * (layers - 1)
        self.layers = nn.ModuleList(LSTMCell(size, hidden_size) for size in sizes)
        self.residual_from = layers if residual_from is None else residual_from

    def forward(self, x: Tensor, states: Sequence[State | None]) -> tuple[Tensor, list[State]]:
        new_states: list[State] = []
        for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
            new_states.append(cell(x, state))
            hidden = new_states[-1][0]
            x = hidden + x if number >= self.residual_from else hidden
        return x, new_states


def logits_or_loss(logits: Sequence[Tensor], labels: Tensor | None) -> tuple[Tensor, ...] | Tensor:
    """The logits of each step, T times [N, V], or with labels [N, T] their mean cross-entropy.

    The steps stay apart so that a step's output layer and loss can run while later steps are still being computed.
    """
    if labels is None:
        return tuple(logits)
    losses = [F.cross_entropy(step, label) for step, label in zip(logits, labels.unbind(1), strict=True)]
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class RNNLMConfig:
    """``steps`` words in a sequence, unrolled; ``hidden`` is the width of every LSTM layer."""

    batch_size: int = 64
    steps: int = 40
    layers: int = 2
    hidden: int = 2048
    vocabulary: int = 10_000


class RNNLM(nn.Module):
    """Words [N, T] to the logits of each step, T times [N, V]; with labels [N, T], to the mean cross-entropy."""

    def __init__(self, config: RNNLMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.lstm = LSTMStack(config.hidden, config.hidden, config.layers)
        self.output = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        states: Sequence[State | None] = [None] * len(self.lstm.layers)
        logits: list[Tensor] = []
        for x in self.embedding(words).unbind(1):
            top, states = self.lstm(x, states)
            logits.append(self.output(top))
        return logits_or_loss(logits, labels)


def rnnlm(small: bool, batch_size: int | None) -> ZooModel:
    """A language model of 2 LSTM layers, unrolled over 40 words."""
    config = RNNLMConfig(2, steps=5, hidden=8, vocabulary=20) if small else RNNLMConfig()
    config = in_batches(config, batch_size)
    words = torch.randint(config.vocabulary, (config.batch_size, config.steps))
    return ZooModel(RNNLM(config), (words,), (words, torch.randint_like(words, config.vocabulary)))


@dataclass(frozen=True)
class S2VTConfig:
    """``frames`` of ``frame_features`` each, then ``words``; all of them are steps of the LSTMs."""

    batch_size: int = 80
    frames: int = 60
    words: int = 20
    frame_features: int = 4096
    embedded: int = 500
    hidden: int = 1000
    vocabulary: int = 13_000


class S2VT(nn.Module):
    """Frames [N, F, features] and words [N, W] to the logits of each word, W times [N, V]; with labels, to the loss.

    The first LSTM reads frames, then padding; the second reads padding beside the first one's output, then words
    beside it (figure 2 of the paper).
    """

    def __init__(self, config: S2VTConfig) -> None:
        super().__init__()
        self.frame_embedding = nn.Linear(config.frame_features, config.embedded)
        self.word_embedding = nn.Embedding(config.vocabulary, config.embedded)
        self.video_lstm = LSTMCell(config.embedded, config.hidden)
        self.text_lstm = LSTMCell(config.hidden + config.embedded, config.hidden)
        self.output = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, frames: Tensor, words: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        padding = frames.new_zeros(frames.shape[0], self.word_embedding.embedding_dim)
        video: State | None = None
        text: State | None = None
        for frame in frames.unbind(1):
            video = self.video_lstm(self.frame_embedding(frame), video)
            text = self.text_lstm(torch.cat([padding, video[0]], dim=1), text)
        logits: list[Tensor] = []
        for word in self.word_embedding(words).unbind(1):
            video = self.video_lstm(padding, video)
            text = self.text_lstm(torch.cat([word, video[0]], dim=1), text)
            logits.append(self.output(text[0]))
        return logits_or_loss(logits, labels)


def s2vt(small: bool, batch_size: int | None) -> ZooModel:
    """Video to text: LSTMs over 60 frames, then 20 words."""
    config = S2VTConfig()
    if small:
        config = S2VTConfig(2, frames=3, words=2, frame_features=12, embedded=6, hidden=8, vocabulary=20)
    config = in_batches(config, batch_size)
    frames = torch.randn(config.batch_size, config.frames, config.frame_features)
    words = torch.randint(config.vocabulary, (config.batch_size, config.words))
    return ZooModel(S2VT(config), (frames, words), (frames, words, torch.randint_like(words, config.vocabulary)))
