"""The parameters and buffers of a model by name, whether they have values, and their twins on ``meta``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from graphs.errors import MismatchError


class Unfilled(NamedTuple):
    """A tensor that was on ``meta``: its name, its new memory, and how often that had been written then."""

    name: str
    made: torch.Tensor
    version: int


def outlines_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A twin on ``meta`` of every parameter and buffer, by dotted name; tied ones have one."""
    made: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in entries(model):
        if id(tensor) not in made:
            made[id(tensor)] = tensor if tensor.is_meta else _like(tensor, torch.device("meta"))
        found[name] = made[id(tensor)]
    return found


@contextmanager
def lent(model: nn.Module, outlines: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While the block runs, the model has all its parameters and buffers again, on ``meta``, so as to be captured."""
    slots = [(*slot_of(model, name), outline) for name, outline in outlines.items()]
    own = [owner.__dict__[kind][last] for owner, kind, last, _ in slots]
    try:
        for owner, kind, last, outline in slots:
            owner.__dict__[kind][last] = outline
        yield
    finally:
        for (owner, kind, last, _), tensor in zip(slots, own, strict=True):
            owner.__dict__[kind][last] = tensor


def check_filled(model: nn.Module, new: Sequence[Unfilled]) -> None:
    """Refuse parameters and buffers that were on ``meta`` and got no values since.

    Raises:
        MismatchError: names one of them.
    """
    tensors = dict(entries(model))
    for name, made, version in new:
        if tensors.get(name) is not made or made._version != version or not made.numel():
            continue
        # A write through `.data` counts no version, and only NaN tells.
        if not made.is_floating_point() or math.isnan(float(made.detach().flatten()[0])):
            raise without_values(name)


def without_values(name: str) -> MismatchError:
    """The error of a tensor that was on ``meta`` and got no values since."""
    return MismatchError(
        f"{name!r} was on meta and has no values yet; before the first step load a checkpoint, call "
        "reset_parameters() for new ones, or write them yourself."
    )


def entries(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of every parameter and buffer, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def slot_of(model: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The module that has a tensor, the dictionary it is in and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner, "_parameters" if last in owner._parameters else "_buffers", last


def _like(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Another tensor of the same layout, a parameter if it is one."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is in."""
    return int(tensor.untyped_storage()._cdata)
