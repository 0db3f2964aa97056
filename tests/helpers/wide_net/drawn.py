"""`Drawn`: a small model as one line of text, drawn from a grammar of pieces that keep the shape of what they take."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.helpers.wide_net.features import FEATURES, LAYERS
from tests.helpers.wide_net.images import CHANNELS, OF_IMAGES, OF_SIGNALS, SIDE, SPAN
from tests.helpers.wide_net.losses import CLASSES, LOSSES
from tests.helpers.wide_net.pieces import ANYWHERE, BATCH, LENGTH, WIDTH, Table
from tests.helpers.wide_net.words import ATTENTION, WORDS

# What a model takes -> the categories of its pieces, and that of pieces which have weights for certain.
GRAMMAR: dict[str, dict[str, Table]] = {
    "rows": FEATURES,
    "words": FEATURES | WORDS,
    "tokens": FEATURES | WORDS,
    "images": ANYWHERE | {"of_images": OF_IMAGES, "more_of_images": OF_IMAGES},
    "signals": ANYWHERE | {"of_signals": OF_SIGNALS, "more_of_signals": OF_SIGNALS},
}
_WITH_WEIGHTS = {
    "rows": LAYERS,
    "words": LAYERS | ATTENTION,
    "tokens": LAYERS | ATTENTION,
    "images": {name: make for name, make in OF_IMAGES.items() if name.startswith("conv")},
    "signals": {name: make for name, make in OF_SIGNALS.items() if name.startswith("conv")},
}
_SHAPES = {
    "rows": (WIDTH,),
    "words": (LENGTH, WIDTH),
    "images": (CHANNELS, SIDE, SIDE),
    "signals": (CHANNELS, SPAN),
}
_PLAIN_LOSS = "mean_square"
MOST_PIECES = 4


class Body(nn.Module):
    """Pieces one after the other, and a loss; outputs, too, in inference."""

    def __init__(self, pieces: list[nn.Module], loss: str) -> None:
        super().__init__()
        self.body, self.loss = nn.Sequential(*pieces), loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(x)
        loss = LOSSES[self.loss](h, y, self)
        return loss if self.training else (h, loss)


@dataclass(frozen=True)
class Drawn:
    """A model of the grammar.

    Attributes:
        takes: a key of `GRAMMAR`.
        pieces: names in one of its tables each.
        loss: a name in `LOSSES`.
    """

    takes: str
    pieces: tuple[str, ...]
    loss: str

    @property
    def text(self) -> str:
        return f"{self.takes}: {', '.join(self.pieces)} -> {self.loss}"

    @classmethod
    def parse(cls, text: str) -> Drawn:
        """The model of a `text`."""
        takes, _, rest = text.partition(":")
        pieces, _, loss = rest.partition("->")
        return cls(takes.strip(), tuple(piece.strip() for piece in pieces.split(",") if piece.strip()), loss.strip())

    def build(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model in double precision, with weights that are the same each time, and a batch of inputs and labels."""
        makers = {name: make for table in GRAMMAR[self.takes].values() for name, make in table.items()}
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some pieces are old on purpose
            made = [makers[piece]() for piece in self.pieces]
        if self.takes == "tokens":
            made.insert(0, nn.Embedding(11, WIDTH))
        model = Body(made, self.loss).double()
        labels = torch.randint(CLASSES, (BATCH,))
        if self.takes == "tokens":
            return model, (torch.randint(11, (BATCH, LENGTH)), labels)
        return model, (torch.randn(BATCH, *_SHAPES[self.takes], dtype=torch.float64), labels)

    def is_part_of(self, other: Drawn) -> bool:
        """Whether another model has all of its pieces, and its loss unless that is the plain one."""
        return (
            self.takes == other.takes
            and set(self.pieces) <= set(other.pieces)
            and self.loss in (other.loss, _PLAIN_LOSS)
        )

    def smaller(self) -> Iterator[Drawn]:
        """Models with one piece less, or with the plain loss."""
        if len(self.pieces) > 1:
            for i in range(len(self.pieces)):
                yield replace(self, pieces=self.pieces[:i] + self.pieces[i + 1 :])
        if self.loss != _PLAIN_LOSS:
            yield replace(self, loss=_PLAIN_LOSS)
        if self.takes == "tokens":
            yield replace(self, takes="words")


def draw(random: np.random.Generator) -> Drawn:
    """A model: a piece with weights, then others of any category, and a loss; the plain one every other time."""
    takes = str(random.choice(list(GRAMMAR), p=(0.2, 0.25, 0.15, 0.25, 0.15)))
    categories = GRAMMAR[takes]
    others = [str(random.choice(list(categories))) for _ in range(int(random.integers(1, MOST_PIECES + 1)))]
    pieces = [_one_of(table, random) for table in (_WITH_WEIGHTS[takes], *(categories[other] for other in others))]
    if random.random() < 0.4:
        pieces.append(_one_of(_WITH_WEIGHTS[takes], random))
    loss = _PLAIN_LOSS if random.random() < 0.3 else str(random.choice(list(LOSSES)))
    return Drawn(takes, tuple(pieces), loss)


def each_alone() -> Iterator[Drawn]:
    """Every piece behind and before a layer, and every loss behind one: what is wrong here is wrong by itself."""
    layer = {takes: next(iter(table)) for takes, table in _WITH_WEIGHTS.items()}
    for takes, categories in GRAMMAR.items():
        if takes != "tokens":
            for name in dict.fromkeys(name for table in categories.values() for name in table):
                yield Drawn(takes, (layer[takes], name, layer[takes]), _PLAIN_LOSS)
    for takes in ("rows", "words"):
        for loss in LOSSES:
            yield Drawn(takes, (layer[takes],), loss)


def _one_of(table: Table, random: np.random.Generator) -> str:
    return str(random.choice(list(table)))
