"""`PartLayout`: which part of a tensor a place has, as cuts of stretches of its dimensions.

A dimension may hold several stretches: ``[B * S, H]`` has batch and sequence in its first one, and a weight of query,
key and value side by side has three blocks of rows. A cut says which units of one stretch are here, in every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from graphs.capture.rows.memory import Elsewhere, digits
from graphs.capture.trace import TensorInfo
from graphs.errors import StrategyError
from graphs.rows import Shard
from graphs.transforms.splitting.sharding import shares

_PLACES = "take a size that divides both evenly"


class PartCut(NamedTuple):
    """Units ``low`` to ``high`` of a stretch of a dimension.

    Attributes:
        dim: the dimension.
        unit: entries for each unit.
        extent: units of the stretch; it repeats along the dimension every ``unit * extent`` entries.
        low, high: the units that are here, ``low <= i < high``.
        is_mirrored: whether those as far from the end are here, too: ``extent - high <= i < extent - low``. Then `high`
            is at most half of the extent.
    """

    dim: int
    unit: int
    extent: int
    low: int
    high: int
    is_mirrored: bool = False

    @property
    def period(self) -> int:
        """Entries after which the stretch begins again."""
        return self.unit * self.extent

    @property
    def n_units(self) -> int:
        """How many units are here."""
        return (self.high - self.low) * (2 if self.is_mirrored else 1)

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """The units that are here as ``(start, stop)``, increasing."""
        first = (self.low, self.high)
        return (first, (self.extent - self.high, self.extent - self.low)) if self.is_mirrored else (first,)

    @property
    def coarse(self) -> PartCut:
        """The same in the largest units."""
        times = math.gcd(self.extent, self.low, self.high)
        low, high = self.low // times, self.high // times
        return self._replace(unit=self.unit * times, extent=self.extent // times, low=low, high=high)

    def meets(self, unit: int, period: int) -> bool:
        """Whether it neither lies in one unit of another stretch of its dimension, nor has that in one unit."""
        return self.period > unit and period > self.coarse.unit

    def finer(self, unit: int) -> PartCut:
        """The same in units of fewer entries, of which each unit has a whole number."""
        times = self.unit // unit
        return self._replace(unit=unit, extent=self.extent * times, low=self.low * times, high=self.high * times)


@dataclass(frozen=True)
class PartLayout:
    """A part of a tensor.

    Attributes:
        shape: of the whole tensor.
        cuts: of its dimensions; those of one dimension are of different stretches. Empty: all of it.
    """

    shape: tuple[int, ...]
    cuts: tuple[PartCut, ...] = ()

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes of the part."""
        sizes = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = sizes[cut.dim] // cut.extent * cut.n_units
        return tuple(sizes)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def coarse_cuts(self) -> frozenset[PartCut]:
        """The cuts that leave something out, in their largest units; equal for equal parts."""
        return frozenset(cut.coarse for cut in self.cuts if cut.n_units < cut.extent)

    @property
    def n_elements(self) -> int:
        return math.prod(self.local_shape)

    @property
    def share(self) -> float:
        """Fraction of the whole tensor's elements."""
        return math.prod((cut.n_units / cut.extent for cut in self.cuts), start=1.0)

    def holds(self, other: PartLayout) -> bool:
        """Whether another part of the same tensor lies in this one."""
        return all(
            any(low <= start and stop <= high for low, high in mine)
            for dim in {cut.dim for cut in self.coarse_cuts}
            for mine in [_merged(self.runs(dim))]
            for start, stop in other.runs(dim)
        )

    def along(self, dim: int) -> tuple[PartCut, ...]:
        """The cuts of a dimension, the outermost stretch first."""
        return tuple(sorted((cut for cut in self.cuts if cut.dim == dim), key=lambda cut: -cut.period))

    def runs(self, dim: int) -> tuple[tuple[int, int], ...]:
        """The stretches of a dimension that are here, as ``(start, stop)`` in the whole tensor, increasing."""
        found = [(0, self.shape[dim])]
        for cut in self.along(dim):
            found = [
                (block + low * cut.unit, block + high * cut.unit)
                for start, stop in found
                for block in range(start, stop, cut.period)
                for low, high in cut.stretches
            ]
        return tuple((start, stop) for start, stop in found if stop > start)

    def cut_by(
        self, shard: Shard, size: int, number: int, weights: tuple[int, ...] = (), *, is_mirrored: bool = False
    ) -> PartLayout:
        """Part ``number`` of ``size`` of this part, cut further along the stretch of a row.

        Args:
            weights: the shares of the parts, one for each; empty for parts as even as can be.
            is_mirrored: whether a part is one of the first half of the stretch and the one as far from its end.

        Raises:
            StrategyError: the stretch overlaps another one that is cut.
        """
        unit = self.shape[shard.dim] // (shard.extent * shard.blocks)
        new = PartCut(shard.dim, unit, shard.extent, 0, shard.extent)
        if is_mirrored:
            new = new._replace(high=shard.extent // 2, is_mirrored=True)
        met = [cut for cut in self.along(shard.dim) if cut.meets(unit, new.period)]
        if met:  # what is here of the stretch is cut further, in the innermost of the stretches that it consists of
            inner = met[-1] if met[-1].unit >= unit else met[-1].coarse
            if met[0].period != new.period or inner.unit % unit:
                raise overlapping(self.shape, shard.dim)
            # Coarser units are never cut apart.
            new = inner
        ends = ends_of(new.high - new.low, size, weights)
        part = new._replace(low=new.low + ends[number], high=new.low + ends[number + 1])
        rest = [cut for cut in self.cuts if not met or cut is not met[-1]]
        return PartLayout(self.shape, (*rest, part))

    def viewed(self, view: TensorInfo, root: TensorInfo) -> PartLayout:
        """The same part of a view.

        Args:
            view: the view as a whole.
            root: the tensor that it views, of which this is a part.

        Raises:
            StrategyError: a stretch that is cut lies across dimensions of the view.
        """
        if view is root or not self.cuts:
            return PartLayout(tuple(view.layout.shape), self.cuts if view is root else ())
        cuts: list[PartCut] = []
        for dim in range(len(view.layout.shape)):
            try:
                cuts += self._cuts_seen(dim, view, root)
            except Elsewhere:
                for cut in [cut for cut in self.cuts if _meets(cut, dim, view, root)]:
                    if not _is_slice_of_periods(cut, dim, view, root):
                        raise _across(self, view) from None
                    cuts.append(cut._replace(dim=dim))
        # A view of one entry of a stretch has no dimension that says where its entry is, nor that it is here.
        if len(cuts) < sum(cut.n_units < cut.extent for cut in self.cuts) and view.layout.n_elements:
            raise _across(self, view)
        return PartLayout(tuple(view.layout.shape), tuple(cuts))

    def _cuts_seen(self, dim: int, view: TensorInfo, root: TensorInfo) -> Iterator[PartCut]:
        """The cuts of one dimension of a view."""
        place = 1
        for digit in digits(view, (dim,), root):
            for cut in self.cuts:
                found = _in_digit(cut, digit.dim, digit.unit, digit.length)
                if found is not None:
                    yield found._replace(dim=dim, unit=found.unit // digit.unit * place)
            place *= digit.length


def _meets(cut: PartCut, dim: int, view: TensorInfo, root: TensorInfo) -> bool:
    """Whether indices of a view's dimension that is no digit of the memory, such as a slice, meet a cut stretch."""
    item = root.layout.dtype.itemsize
    steps = [stride * view.layout.dtype.itemsize for stride in view.layout.stride]
    first, last = (root.layout.stride[cut.dim] * entries * item for entries in (cut.unit, cut.period))
    if not (steps[dim] < last and first < steps[dim] * view.layout.shape[dim]):
        return False
    small = [(step, length) for step, length in zip(steps, view.layout.shape, strict=True) if step < first]
    end = (view.offset * view.layout.dtype.itemsize - root.offset * item) % first
    end += sum(step * (length - 1) for step, length in small)
    return steps[dim] >= first or end >= first  # else it begins and ends in one unit


def _is_slice_of_periods(cut: PartCut, dim: int, view: TensorInfo, root: TensorInfo) -> bool:
    """Whether a view's dimension is a slice of the cut one, in which the stretch begins again and again."""
    layout, length = root.layout, view.layout.shape[dim]
    if view.layout.dtype.itemsize != layout.dtype.itemsize or view.layout.stride[dim] != layout.stride[cut.dim]:
        return False
    start = (view.offset - root.offset) // layout.stride[cut.dim] % layout.shape[cut.dim]
    return start % cut.period == length % cut.period == 0 and start + length <= layout.shape[cut.dim]


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches, of which those that touch are one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _in_digit(cut: PartCut, dim: int, unit: int, length: int) -> PartCut | None:
    """A cut of the memory as far as it lies in one digit of a view; None where it lies elsewhere."""
    if cut.dim != dim or cut.unit % (unit * length) == 0 or unit % cut.period == 0:
        return None
    if cut.unit % unit or unit * length % cut.period:
        raise Elsewhere
    return cut


def overlapping(shape: tuple[int, ...], dim: int) -> StrategyError:
    """Error for a dimension that is cut along two stretches of which neither lies in a unit of the other."""
    sizes = "x".join(map(str, shape))
    return StrategyError(f"dimension {dim} of a tensor of {sizes} is cut along two stretches that overlap; {_PLACES}.")


def _across(part: PartLayout, view: TensorInfo) -> StrategyError:
    whole_shape, shape = ("x".join(map(str, sizes)) for sizes in (part.shape, view.layout.shape))
    return StrategyError(
        f"a tensor of {whole_shape} is cut along a stretch that its view of {shape} divides; {_PLACES}."
    )


def ends_of(extent: int, size: int, weights: tuple[int, ...] = ()) -> list[int]:
    """Where the parts of an extent begin, and where the last one ends; parts of nothing are empty."""
    ends = [0]
    for share in shares(extent, size, weights).tolist() if extent else [0.0] * size:
        ends.append(ends[-1] + round(share * extent))
    return ends


def whole(shape: Iterable[int]) -> PartLayout:
    """All of a tensor."""
    return PartLayout(tuple(shape))


def take(tensor: torch.Tensor, part: PartLayout) -> torch.Tensor:
    """The part of a whole tensor; a view of it where it is one."""
    return take_from(tensor, PartLayout(part.shape), part)


def take_from(tensor: torch.Tensor, have: PartLayout, want: PartLayout) -> torch.Tensor:
    """The part ``want`` of a tensor of which the part ``have``, that holds it, is here; a view where it is one."""
    return _narrowed(tensor, have, want).reshape(want.local_shape)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A part without gaps between its entries.

    Some kernels read memory as if there were none: those of the backward pass of a layer norm its statistics, for one.
    A result of ``expand`` stays as it is, and so does a layout with channels last.
    """
    if tensor.is_contiguous() or 0 in tensor.stride():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def join(want: PartLayout, parts: Sequence[tuple[PartLayout, torch.Tensor]]) -> torch.Tensor:
    """A part put together from smaller parts that cover it."""
    return join_in(parts[0][1].new_empty(want.local_shape), want, parts)


def join_in(result: torch.Tensor, want: PartLayout, parts: Sequence[tuple[PartLayout, torch.Tensor]]) -> torch.Tensor:
    """Smaller parts put in their places in a part."""
    for part, tensor in parts:
        place = _narrowed(result, want, part)
        place.copy_(tensor.reshape(place.shape))
    return result


def _narrowed(tensor: torch.Tensor, have: PartLayout, want: PartLayout) -> torch.Tensor:
    """A view of the part, in which dimensions that are cut have fallen apart into blocks and units."""
    if not tensor.is_contiguous():
        return _taken_apart(tensor, have, want)
    size, stride, offset = _place(have, want)
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


# Steps take the same parts again and again, and small ones are sent sooner than views of views are made.
@lru_cache(maxsize=1 << 16)
def _place(have: PartLayout, want: PartLayout) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and offset of that view of a tensor without gaps."""
    found = _taken_apart(torch.empty(have.local_shape, device="meta"), have, want)
    return tuple(found.shape), found.stride(), int(found.storage_offset())


def _taken_apart(tensor: torch.Tensor, have: PartLayout, want: PartLayout) -> torch.Tensor:
    for dim in reversed(range(len(want.shape))):
        here, there = ({cut.period: cut.coarse for cut in part.along(dim)} for part in (have, want))
        if here == there:
            continue
        here, there = _nested(here, there), _nested(there, here)
        sizes: list[int] = []
        narrow: list[tuple[int, PartCut, PartCut]] = []
        length = want.shape[dim]
        for period in sorted({*here, *there}, reverse=True):
            known, wanted = (cuts.get(period, PartCut(dim, period, 1, 0, 1)) for cuts in (here, there))
            unit = math.gcd(known.coarse.unit, wanted.coarse.unit)  # as large as can be: other stretches lie in it
            known, wanted = known.coarse.finer(unit), wanted.coarse.finer(unit)
            if length % period:
                raise overlapping(want.shape, dim)
            sizes += [length // period, known.n_units]
            narrow.append((dim + len(sizes) - 1, known, wanted))
            length = unit
        tensor = tensor.unflatten(dim, (*sizes, length))  # type: ignore[no-untyped-call]
        for place, known, wanted in reversed(narrow):  # the last ones first, as dimensions may become two
            tensor = _units_of(tensor, place, known, wanted, want.shape)
    return tensor


def _units_of(tensor: torch.Tensor, dim: int, known: PartCut, wanted: PartCut, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of the units ``wanted`` of a dimension that has the units ``known``; of mirrored ones it becomes two.

    Raises:
        StrategyError: units that are wanted are not known, or do not lie in a view.
    """
    if not known.is_mirrored and not wanted.is_mirrored:
        return tensor.narrow(dim, wanted.low - known.low, wanted.n_units)
    if not wanted.is_mirrored:  # of one of the two stretches
        before = 0
        for start, stop in known.stretches:
            if start <= wanted.low and wanted.high <= stop:
                return tensor.narrow(dim, before + wanted.low - start, wanted.n_units)
            before += stop - start
        raise overlapping(shape, wanted.dim)
    # The known part is the whole stretch but as much at each end, or between the two that are known.
    first, count = wanted.low - known.low, wanted.high - wanted.low
    is_inside = wanted.high <= known.high if known.is_mirrored else known.high - wanted.stretches[1][1] >= 0
    if first < 0 or not is_inside:
        raise overlapping(shape, wanted.dim)
    second = known.n_units - first - count if known.is_mirrored else wanted.stretches[1][0] - known.low
    # Two stretches of one length, the second so many units behind the first.
    return tensor.narrow(dim, first, second + count - first).unfold(dim, count, second - first).movedim(-1, dim + 1)


def _nested(cuts: dict[int, PartCut], others: Iterable[int]) -> dict[int, PartCut]:
    """Cuts by their periods, those that lie in one period of other cuts as that period and a cut of it."""
    found = dict(cuts)
    for period in sorted(others, reverse=True):
        for cut in list(found.values()):
            if cut.is_mirrored:
                continue  # which reaches from one end of its stretch to the other
            first, last = cut.low * cut.unit // period, (cut.high * cut.unit - 1) // period
            if cut.unit < period < cut.period and cut.period % period == period % cut.unit == 0 and first == last:
                start = first * period // cut.unit
                inner = PartCut(cut.dim, cut.unit, period // cut.unit, cut.low - start, cut.high - start)
                found[cut.period] = PartCut(cut.dim, period, cut.period // period, first, first + 1)
                found[period] = inner
    return found
