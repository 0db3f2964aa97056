"""Optimizers of torch by the names that capture knows, with the settings that make them those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
}


def optimizer_of(model: torch.nn.Module, name: str, **settings: Any) -> Any:
    """The optimizer of a model's trained parameters; None where it has none here.

    A model under a strategy makes its own, which keeps its state where the strategy says.

    Args:
        model: plain, or this process's share.
        name: as in `OPTIMIZERS`.
        settings: of it.
    """
    kind, own = OPTIMIZERS[name]
    make = getattr(type(model), "optimizer", None)
    if make is not None:
        return make(model, kind, **own, **settings)
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(trained, **own, **settings) if trained else None
