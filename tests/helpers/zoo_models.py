"""The models of the zoo that are larger or older kin of others, which slow tests go through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from graphs.zoo import MODELS

# Of the same kinds of layers as another model, in other sizes or other numbers.
LIKE_OTHERS = {
    *("rnnlm", "nmt2", "nmt4", "nmt8", "s2vt", "vgg16", "resnet152", "inception_v3", "vit_l16", "llama3_70b"),
    *("gpt2_medium", "gpt2_large", "gpt2_xl", "gpt_long"),
}


def each_model(names: Iterable[str] = MODELS) -> list[Any]:
    """Parameters of a test, one a model; a model that is like another one is slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in names]
