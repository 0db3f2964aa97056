"""Losses of which each rank has some of the classes: as of the model as it is, and no logits are exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parallel.sharded_models import check, check_inference
from torch import nn
from torch.nn import functional

from graphs.capture import capture
from graphs.transforms.splitting import split
from graphs.transforms.strategy import MeshRule, Strategy

WORDS, SAMPLES, TOKENS = 17, 4, 6


class Words(nn.Module):
    """A table, a layer and logits, of a table of their own unless ``tied``; other words are of the loss."""

    def __init__(self, tied: bool = False, **loss: Any) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head, self.loss = nn.Linear(8, WORDS, bias=False), loss
        if tied:
            self.head.weight = self.table.weight
        if loss.pop("weighted", False):
            self.register_buffer("weight", torch.rand(WORDS) + 0.1)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.table(words)).relu())
        weight = getattr(self, "weight", None)
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight, **self.loss)


def batch(ignored: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = torch.randint(0, WORDS, (2, SAMPLES, TOKENS))
    labels[1, 2:] = labels[3] = ignored
    return words, labels


LOSSES = [
    {},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"weighted": True},
    {"label_smoothing": 0.1},
    {"weighted": True, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("strategy", ["tp2", "tp3 sp", "dp2 | tp2 | mb2"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses_over_a_vocabulary_that_is_cut(loss: dict[str, Any], strategy: str) -> None:
    """Into parts of unlike size: 17 words."""
    check(Words(**loss), batch(loss.get("ignore_index", -100)), strategy)


def test_logits_stay_cut_where_labels_are_smoothed() -> None:
    """With sequence parallelism, too: no more goes all to all than without, which is the table's."""

    def exchanged(**loss: Any) -> int:
        graph = capture(Words(**loss), batch(), train=True)
        made = split(graph, [MeshRule("tp", 2, sequence=True).axis()]).collectives
        return sum(one.bytes for one in made if one.kind == "all_to_all")

    assert exchanged(label_smoothing=0.1) == exchanged()


@pytest.mark.parametrize(
    "strategy", ["tp3", "pp2 gpipe mb2 | tp2 sp", "dp2 zero3 | tp2", "tp2 | recompute=kind:*", "dp2 tp on table+head"]
)
def test_tables_that_are_cut_by_words_too(strategy: str) -> None:
    check(Words(tied=True), batch(), strategy)


class Scored(nn.Module):
    """Losses of other kinds: without a mean, over probabilities, of images, of one sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(8, 6), kind

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        if self.kind == "each":
            return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").square()
        if self.kind == "probabilities":
            return functional.cross_entropy(scores.flatten(0, 1), functional.one_hot(labels.flatten(), 6).float() * 0.9)
        if self.kind == "image":
            return functional.cross_entropy(scores.transpose(1, 2)[..., None], labels[..., None])
        return functional.nll_loss(scores.sum((0, 1)).log_softmax(0), labels[0, 0])


@pytest.mark.parametrize("strategy", ["tp2", "dp2 | tp2 sp"])
@pytest.mark.parametrize("kind", ["each", "probabilities", "image", "one"])
def test_other_losses(kind: str, strategy: str) -> None:
    check(Scored(kind), (torch.randn(4, 3, 8), torch.randint(0, 6, (4, 3))), strategy)


def test_outputs_of_inference() -> None:
    check_inference(Words(), batch(), "tp2 sp")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_formats(dtype: torch.dtype) -> None:
    """Sums are made in float32 or wider, like those of the operators."""
    check(Words().to(dtype), batch(), "tp2", tolerance=6e-2 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("strategy", ["tp2", "tp2 sp", "dp2 | tp2 sp | mb2"])
def test_no_logits_are_exchanged(strategy: str) -> None:
    """Of what the loss makes only one number a sample and part in each pass, and the loss itself."""
    graph, parsed = capture(Words(), batch(), train=True), Strategy.parse(strategy)
    made = split(graph, [rule.axis() for rule in parsed.mesh], parsed.micro_batches).collectives
    parts = 2 * (parsed.places // 2 * parsed.micro_batches if parsed.micro_batches > 1 else 1)
    sums = [one for one in made if one.members[0].what == "sums"]
    assert {(one.kind, one.axis) for one in sums} == {("all_gather", "tp")}
    assert sum(one.bytes for one in sums) == 2 * 2 * SAMPLES * TOKENS * 4
    assert len(sums) == parts
    logits = set(np.flatnonzero(graph.tensor_bytes == SAMPLES * TOKENS * WORDS * 4).tolist())
    assert len(logits) == 4
    assert not any(one.members[0].what == "tensor" and one.members[0].number in logits for one in made)
