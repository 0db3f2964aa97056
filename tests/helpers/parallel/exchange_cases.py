"""Exchanges of every kind over small tensors, and their results worked out on whole tensors."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from placement.runtime.exchanging.exchanges import KINDS, Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, take, whole

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool)


def parts(layout: PartLayout, dim: int, extent: int, weights: tuple[int, ...]) -> tuple[PartLayout, ...]:
    """A layout cut along a dimension, in shares; some may be empty."""
    ends = [round(extent * sum(weights[:k]) / sum(weights)) for k in range(len(weights) + 1)]
    unit = layout.shape[dim] // extent
    return tuple(PartLayout(layout.shape, (PartCut(dim, unit, extent, low, high),)) for low, high in pairwise(ends))


def member(
    kind: str,
    shape: tuple[int, ...],
    weights: tuple[int, ...],
    dtype: torch.dtype,
    is_flat: bool = False,
    in_place: bool = False,
) -> Member:
    """A member cut along its first dimension, and before an all-to-all along its last one."""
    layout = whole((math.prod(shape),) if is_flat else shape)
    first = parts(layout, 0, layout.shape[0], weights)
    before = parts(layout, len(layout.shape) - 1, layout.shape[-1], weights) if kind == "all_to_all" else first
    return Member(
        kind,
        layout,
        before if kind in ("all_gather", "all_to_all") else (),
        first if kind in ("reduce_scatter", "all_to_all") else (),
        dtype,
        is_flat,
        in_place and (kind == "all_reduce" or (is_flat and kind == "reduce_scatter")),
    )


def bucket(number: int, kind: str, ranks: tuple[int, ...], seed: int = 0) -> Exchange:
    """Tensors of several dtypes and shapes, in uneven parts."""
    weights = tuple(range(1, len(ranks) + 1))
    members = tuple(
        member(kind, shape, weights, dtype, is_flat, in_place)
        for dtype, shape, is_flat, in_place in zip(
            DTYPES,
            ((7, 5), (12,), (6, 9), (5, 6, 7), (8, 8), (9, 5)),
            (False, True, True, False, False, False),
            (False, False, True, True, False, True),
            strict=True,
        )
    )
    return Exchange(number, ranks, members, f"{kind} {number} of {len(ranks)} ranks (seed {seed})")


def tensors_of(exchange: Exchange, seed: int = 0) -> list[list[torch.Tensor]]:
    """For each member the whole tensor of each rank: their own ones for sums, else the same one. Sums are exact."""
    generator = torch.Generator().manual_seed(exchange.number * 1000 + seed)
    found = []
    for each in exchange.members:
        n_tensors = len(exchange.ranks) if each.is_sum else 1
        drawn = [torch.randint(0, 8, each.whole.shape, generator=generator).to(each.dtype) for _ in range(n_tensors)]
        found.append(drawn * (len(exchange.ranks) // n_tensors))
    return found


def given(exchange: Exchange, rank: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """What a rank gives."""
    place = exchange.ranks.index(rank)
    return tuple(
        take(tensors[place], each.given(place))
        for each, tensors in zip(exchange.members, tensors_of(exchange, seed), strict=True)
    )


def expected(exchange: Exchange, rank: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """What a rank gets."""
    place, found = exchange.ranks.index(rank), []
    for each, tensors in zip(exchange.members, tensors_of(exchange, seed), strict=True):
        everything = tensors[0]
        if each.is_sum:
            everything = tensors[0].clone()
            for tensor in tensors[1:]:
                everything += tensor
        found.append(take(everything, each.result(place)))
    return tuple(found)


def every_kind(ranks: tuple[int, ...], first: int = 0) -> list[Exchange]:
    """A bucket of each kind."""
    return [bucket(first + number, kind, ranks) for number, kind in enumerate(KINDS)]
