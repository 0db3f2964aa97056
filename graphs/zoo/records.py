"""Records of the zoo: `ModelSpec` describes a model, `ZooModel` is one, ready to capture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class ModelSpec:
    """One line of the registry; reading it loads no torch.

    Attributes:
        name: the registry name.
        summary: one line for people.
        source: paper and year.
        batch_size: samples in one step of the full configuration.
        build: ``"module:function"``; the function takes ``small`` and ``batch_size`` and returns a `ZooModel`.
    """

    name: str
    summary: str
    source: str
    batch_size: int
    build: str


@dataclass(frozen=True)
class ZooModel:
    """A model with inputs of the right shapes.

    Attributes:
        model: called with ``args`` it returns logits, called with ``train_args`` the scalar loss.
        args: inputs of one inference step.
        train_args: the same inputs followed by the targets.
    """

    model: nn.Module
    args: tuple[Any, ...]
    train_args: tuple[Any, ...]


def in_batches(config: ConfigT, batch_size: int | None) -> ConfigT:
    """The configuration with another batch size, its own for None."""
    return config if batch_size is None else dataclasses.replace(config, batch_size=batch_size)  # type: ignore[type-var]
