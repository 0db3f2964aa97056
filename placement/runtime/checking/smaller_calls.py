"""Smaller calls of the same form: sizes are divided as far as the stretches that parts have stay whole numbers.

Equal sizes stay equal. Where a call needs it, as views do, a product of sizes is the product of the smaller ones, or
the sizes of images stay. Where parts are uneven, longer ones stay longer. Making a smaller call shows whether it can be
made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import TensorInfo, flat, value_of
from placement.runtime.checking.uses import Use, UsePart
from placement.runtime.parts.layouts import PartCut, PartLayout

_SMALL = 8  # sizes up to it stay as they are: kernels, strides, numbers of experts
_MEDIUM = 64  # up to which sizes stay, too, where a smaller call is none: images, heads
_QUICK, _MOST = 1 << 15, 1 << 21  # elements of all tensors: computed as it is at once, and where nothing smaller can be


@dataclass(frozen=True)
class Smaller:
    """A way to make a call smaller.

    Attributes:
        sizes: sizes -> smaller ones, or themselves.
        ends: of sizes that are cut unevenly, where parts begin and end -> where they do in the smaller one.
        products: whether what is a product of sizes stays one.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    products: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The smaller shape of a tensor."""
        return tuple(self.sizes.get(size, size) for size in shape)

    def argument(self, value: Any) -> Any:
        """An argument with smaller sizes in it."""
        if type(value) is int:
            return self.sizes.get(value, value)
        return type(value)(map(self.argument, value)) if isinstance(value, (list, tuple)) else value

    def part(self, part: PartLayout, shape: Sequence[int]) -> PartLayout:
        """The same part of a smaller tensor.

        Raises:
            ValueError: it is none.
        """
        if len(shape) != len(part.shape):
            raise ValueError("another number of dimensions")
        cuts = sorted((self._cut(cut, part.shape[cut.dim], shape[cut.dim]) for cut in part.coarse_cuts), key=_outer)
        return PartLayout(tuple(shape), tuple(cuts))

    def _cut(self, cut: PartCut, size: int, new: int) -> PartCut:
        ends = self.ends.get(size)
        if ends is not None and self.sizes.get(size) == new:
            low, high = (ends[end * cut.unit] for end in (cut.low, cut.high))
            return PartCut(cut.dim, 1, new, low, high, cut.is_mirrored)
        share = cut.period * new / size  # as large a one as before
        # A stretch in another one is a dimension elsewhere, and becomes what that becomes.
        period = self.sizes.get(cut.period, share) if self.products and cut.period != size else share
        if period and new % period == 0 and period % cut.extent == 0:
            return cut._replace(unit=int(period) // cut.extent)
        raise ValueError("a cut between two entries")

    def place(
        self,
        place: UsePart,
        nodes: Mapping[fx.Node, fx.Node],
        shapes: Mapping[fx.Node, Sequence[int]],
        made: Sequence[Sequence[int] | None],
    ) -> UsePart:
        """A place of the smaller call.

        Args:
            nodes: of the call -> those of the smaller one.
            shapes: of the arguments of the smaller one.
            made: shape of each of its flat results; None for no tensor.

        Raises:
            ValueError: there is none.
        """
        operands = {
            nodes[node]: operand._replace(part=self.part(operand.part, shapes[nodes[node]]))
            for node, operand in place.operands.items()
        }
        outputs = tuple(
            None if part is None or shape is None else self.part(part, shape)
            for part, shape in zip(place.outputs, made, strict=True)
        )
        halo = tuple((nodes[node], dim) for node, dim in place.halo)
        return replace(place, operands=operands, outputs=outputs, halo=halo)


def candidates(use: Use) -> Iterator[Smaller]:
    """Ways to make a use smaller, the smallest first; one that has no sizes leaves it as it is."""
    shapes = shapes_of(use)
    by_strides = use.node.target is torch.ops.aten.as_strided.default  # which no smaller call has
    n_elements = sum(map(math.prod, shapes))
    if n_elements > _QUICK and not by_strides:
        cuts: dict[int, set[PartCut]] = {size: set() for shape in shapes for size in shape}
        for place in use.places:
            for part in (*(operand.part for operand in place.operands.values()), *place.outputs):
                for cut in part.coarse_cuts if part is not None else ():
                    size = part.shape[cut.dim]  # type: ignore[union-attr]
                    for each in {size, cut.period} & {size, *cuts}:
                        cuts.setdefault(each, set()).add(cut._replace(dim=0))
        of_images = {size for shape in shapes if len(shape) > 3 for size in shape[2:]}
        small, medium = ({size for size in cuts if size <= limit} for limit in (_SMALL, _MEDIUM))
        if "attention" in str(use.node.target):  # kernels divide numbers of heads by each other unseen
            of_heads = slice(1, 2 if "scaled_dot_product" in str(use.node.target) else -1)
            small |= {size for shape in shapes if len(shape) > 2 for size in shape[of_heads]}
            medium |= small
        several = [_smaller(cuts, small), _smaller(cuts, small, products=True)]
        several += [_smaller(cuts, small | of_images), _smaller(cuts, medium, products=True)]
        for number, one in enumerate(several):
            if sum(math.prod(one.shape(shape)) for shape in shapes) <= _MOST and one not in several[:number]:
                yield one
    if n_elements <= _MOST:
        yield Smaller()


def _outer(cut: PartCut) -> tuple[int, int]:
    return cut.dim, -cut.period


def shapes_of(use: Use) -> list[tuple[int, ...]]:
    """Shapes of all tensors of a call."""
    infos = [leaf for node in (*use.node.all_input_nodes, use.node) for leaf in flat(value_of(node))]
    return [info.layout.shape for info in infos if type(info) is TensorInfo]


def _smaller(cuts: Mapping[int, set[PartCut]], fixed: set[int], *, products: bool = False) -> Smaller:
    """Sizes made smaller.

    Args:
        cuts: those of every size.
        fixed: sizes that stay.
        products: whether what is a product of sizes stays one.
    """
    found: dict[int, int] = {}
    ends: dict[int, dict[int, int]] = {}
    for size in sorted(cuts):
        # The unit of smaller sizes; as a product of others it leaves the stretches in it to them.
        unit = math.lcm(*(size // cut.unit for cut in cuts[size] if cut.period == size or not products))
        if size in fixed:
            found[size] = size
        elif unit > _MEDIUM and all(cut.period == size for cut in cuts[size]):
            ends[size] = _ends(cuts[size], size)
            found[size] = ends[size][size]
        else:
            of_others = _products(size, found) if products else iter(())
            new = next((product for product in of_others if product % unit == 0), 0)
            if not new:
                new = unit * math.ceil(4 / unit)
                while new in found.values():  # which another one has: those that differ go on to differ
                    new += unit
            found[size] = min(new, size)
    return Smaller(found, ends, products)


def _products(size: int, found: Mapping[int, int]) -> Iterator[int]:
    """Smaller values of a size that is the product of two or three others, or of a small number and another."""
    known = {1: 1} | dict(found)
    for one, two in itertools.combinations_with_replacement(sorted(known, reverse=True), 2):
        rest, remainder = divmod(size, one * two)
        if not remainder and rest in known and one < size:
            yield known[one] * known[two] * known[rest]
    for times in range(2, _SMALL + 1):
        if size % times == 0 and size // times in found:
            yield times * found[size // times]


def _ends(cuts: set[PartCut], size: int) -> dict[int, int]:
    """Where uneven parts begin and end -> where they do in a size in which the shortest have two entries."""
    ends = {end * cut.unit for cut in cuts for stretch in cut.stretches for end in stretch}
    bounds = sorted({0, size, *ends, *(size - end for cut in cuts if cut.is_mirrored for end in ends)})
    lengths = sorted({high - low for low, high in pairwise(bounds)})
    found = {0: 0}
    for low, high in pairwise(bounds):
        found[high] = found[low] + 2 + lengths.index(high - low)
    return found
