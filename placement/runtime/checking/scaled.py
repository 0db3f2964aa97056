"""`scaled_down`: a strategy on two ranks for each of its axes, for a small model and few micro-batches."""

from __future__ import annotations

import re

from graphs.transforms.strategy import Strategy

_LEFT_OUT = ("cuts=", "devices=")
_OF_MODULES = ("recompute=", "offload=")
_NUMBERS = re.compile(r"\.[\d\[\]-]+(?=[.+@]|$)")  # of layers


def scaled_down(strategy: Strategy, batch: int) -> tuple[Strategy, int]:
    """The same strategy on 2 ranks for each axis that has more than one, and the samples of its batch.

    Stages are cut where they are by default.

    Args:
        batch: samples of the strategy's own; where parts of it are not of one size, neither are those of the result.
    """
    parts = [part for part in strategy.text.split(" | ") if not part.startswith(_LEFT_OUT)]
    for number, part in enumerate(parts):
        part = re.sub(r"^(dp|tp|cp|ep|pp|placed)\d+", r"\g<1>2", part)
        part = re.sub(r"\bmb\d+", "mb4" if part.startswith("pp") else "mb2", part)
        part = re.sub(r" v\d+", "", part)
        part = re.sub(r"shares=[\d:]+", "shares=5:3", part)
        parts[number] = _of_all_layers(part) if part.startswith(_OF_MODULES) else part
    small = Strategy.parse(" | ".join(parts))
    is_uneven = batch % (strategy.replicas * strategy.micro_batches) != 0
    has_shares = any(rule.shares for rule in strategy.mesh)
    return small, 8 if has_shares else max(8, small.replicas * small.micro_batches) + is_uneven


def _of_all_layers(part: str) -> str:
    """Patterns of some layers as those of all, of which a smaller model has fewer; without layers that are kept."""
    word, _, patterns = part.partition("=")
    kept = [
        one for one in patterns.split("+") if not (one.startswith("!") and "kind:" not in one and _NUMBERS.search(one))
    ]
    return f"{word}={'+'.join(dict.fromkeys(_NUMBERS.sub('.*', one) for one in kept))}"
