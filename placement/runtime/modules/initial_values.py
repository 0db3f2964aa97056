"""Values of a model on ``meta``: those that its own modules give themselves, made module by module on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from placement.runtime.modules.local_tensors import entries, lent


def initial_values(model: nn.Module, outlines: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, whole tensor on the CPU) of the parameters and buffers for which the model says how they begin.

    A module's `reset_parameters` says so, or ``_init_weights`` of a model of transformers; there is memory for one
    module at a time. Where the model itself has `init_weights`, as those of torchtitan have, it is called on the whole
    of it, for which there must be memory. Tied tensors come under each of their names, and the last value counts.

    Args:
        model: parts of which may be gone.
        outlines: a twin on ``meta`` of each of its parameters and buffers, by name.
    """
    by_module = getattr(model, "_init_weights", None)  # of transformers, which has an init_weights of all beside it
    of_all = getattr(model, "init_weights", None)
    if by_module is None and callable(of_all):
        yield from _of_the_whole(model, outlines, of_all)
        return
    with lent(model, outlines):
        modules = [(path, module, _slots(module)) for path, module in model.named_modules()]
    for path, module, slots in modules:
        if not slots:
            continue
        twin = copy.copy(module)
        for kind in ("_parameters", "_buffers"):
            twin.__dict__[kind] = dict.fromkeys(module.__dict__[kind])
        for kind, name, outline in slots:
            twin.__dict__[kind][name] = _made(outline)
        if by_module is not None:
            by_module(twin)
        elif callable(getattr(twin, "reset_parameters", None)):
            twin.reset_parameters()
        else:
            continue
        prefix = f"{path}." if path else ""
        for kind, name, _ in slots:
            yield f"{prefix}{name}", twin.__dict__[kind][name]


def _of_the_whole(
    model: nn.Module, outlines: Mapping[str, torch.Tensor], fill: Callable[[], Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    made: dict[int, torch.Tensor] = {}
    for outline in outlines.values():
        if id(outline) not in made:
            made[id(outline)] = _made(outline)
    with lent(model, {name: made[id(outline)] for name, outline in outlines.items()}):
        fill()
        found = dict(entries(model))  # it may have made its buffers anew
    yield from found.items()


def _slots(module: nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """The parameters and buffers of a module's own: where they are, their names and the tensors."""
    return [
        (kind, name, tensor)
        for kind in ("_parameters", "_buffers")
        for name, tensor in module.__dict__[kind].items()
        if tensor is not None
    ]


def _made(outline: torch.Tensor) -> torch.Tensor:
    """Memory of the layout of a tensor on ``meta``."""
    data = torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype, device="cpu")
    return nn.Parameter(data, outline.requires_grad) if isinstance(outline, nn.Parameter) else data
