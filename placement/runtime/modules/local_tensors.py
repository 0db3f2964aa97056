"""The parameters and buffers of a model by name, whether they have values, and their twins on ``meta``."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.errors import MismatchError
from placement.runtime.ranks.group import RankGroup
from placement.runtime.torch_runner.setup import Setup


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


# -- the same on all ranks ---------------------------------------------------------------------------------------------


_N_COMPARED = 256  # first entries of a tensor; made under another seed all entries differ


def check_alike(ranks: RankGroup, model: nn.Module, setup: Setup) -> None:
    """Refuse models that ranks have made with other values, and other strategies.

    Raises:
        MismatchError: on every rank; names a parameter.
    """
    facts = (dict(setup.mesh), setup.batch, setup.zero, setup.micro_batches, setup.stages, tuple(setup.styles))
    digests = ranks.told(zlib.crc32(repr(facts).encode()), "what is applied there")
    if len(set(digests)) > 1:
        raise MismatchError(
            "the ranks have different strategies or models; find one result, save it, and give every rank that file."
        )
    check_values(ranks, values_of(model), "the values of its model")


def values_of(model: nn.Module) -> dict[str, int]:
    """Numbers for the values of a model's parameters, by name; none for those on ``meta``."""
    return {name: first_entries(each) for name, each in model.named_parameters() if each.numel() and not each.is_meta}


def check_values(ranks: RankGroup, own: dict[str, int], what: str) -> None:
    """Refuse models that ranks have made with other values.

    Args:
        own: this rank's, as of `values_of`.
        what: the ranks tell each other, in words.

    Raises:
        MismatchError: on every rank; names a parameter.
    """
    found = _other(ranks.told(own, what))
    if found is not None:
        rank, first, name = found
        raise MismatchError(
            f"rank {rank} has other values of parameter {name!r} than rank {first}; make the model under one seed on "
            "all ranks (torch.manual_seed), or load one checkpoint."
        )


def check_batches(ranks: RankGroup, inputs: Mapping[str, Any], batch: int) -> None:
    """Refuse whole batches that differ from rank to rank.

    Args:
        batch: samples of the whole batch; 0 where every rank takes all that it is given.

    Raises:
        MismatchError: on every rank; names an argument.
    """
    own = {}
    for name, value in inputs.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors and all(leaf.ndim and len(leaf) == (batch or len(leaf)) for leaf in tensors):
            own[name] = sum(map(first_entries, tensors))
    found = _other(ranks.told(own, "its batch"))
    if found is not None:
        raise MismatchError(
            f"the ranks were given different batches: argument {found[-1]!r} differs; give all ranks the same whole "
            "batch, or each its own samples (placement.shard_of)."
        )


def _other(told: list[dict[str, int]]) -> tuple[int, int, str] | None:
    """A rank, an earlier one that has another number, and the name of what it is of."""
    first: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(told):
        for name, number in each.items():
            earlier, its = first.setdefault(name, (rank, number))
            if number != its:
                return rank, earlier, name
    return None


def first_entries(tensor: torch.Tensor) -> int:
    """A number that tells the first entries of a tensor from others."""
    part = tensor.detach().reshape(-1)[:_N_COMPARED].contiguous().cpu()
    return zlib.crc32(part.view(torch.uint8).numpy().tobytes()) if part.numel() else 0


# -- values that a model begins with -----------------------------------------------------------------------------------


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
