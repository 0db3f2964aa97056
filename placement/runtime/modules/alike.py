"""What has to be the same on all ranks of a strategy: the model's values, the strategy, and the whole batch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.errors import MismatchError
from placement.runtime.ranks.group import RankGroup
from placement.runtime.torch_runner.setup import Setup

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
