"""Models of the zoo: those that are larger or older kin of others, which slow tests go through; and small decoders."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

import placement
from graphs.opgraph import OpGraph
from graphs.zoo import MODELS
from graphs.zoo.decoders import Decoder, DecoderConfig

# Of the same kinds of layers as another model, in other sizes or other numbers.
LIKE_OTHERS = {
    *("rnnlm", "nmt2", "nmt4", "nmt8", "s2vt", "vgg16", "resnet152", "inception_v3", "vit_l16", "llama3_70b"),
    *("gpt2_medium", "gpt2_large", "gpt2_xl", "gpt_long"),
}


def each_model(names: Iterable[str] = MODELS) -> list[Any]:
    """Parameters of a test, one a model; a model that is like another one is slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in names]


@cache
def decoder_step(precision: str, layers: int = 4, width: int = 32) -> OpGraph:
    """A training step that nobody allocates, of eight samples of twice as many words as the width."""
    words = torch.zeros((8, 2 * width), dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Decoder(DecoderConfig(8, 2 * width, layers, width, 4, 4, 2 * width, 4 * width, dtype=torch.float32))
    return placement.capture(model, (words,), train=True, precision=precision)
