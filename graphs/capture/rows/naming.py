"""Stretches of dimensions: which belong together through a graph, and what they are called.

Letters tie dimensions of tensors together. Where one tensor is read as ``[B, S, 12, 64]`` and another call wrote it as
``[B * S, 768]``, both dimensions fall apart into the same stretches, here batch and sequence, heads and features.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from graphs.capture.drafts import Operand, Root
from graphs.capture.trace import TensorInfo
from graphs.ops.letters import Letter
from graphs.records import Replicate, Shard

# Place of a view's dimension in the memory of the tensor that it is a view of.
#
# The memory of a tensor is a number system: each of its dimensions is a digit, or several. An index of a view's
# dimension
# counts with a stretch of these digits: of ``[B * S, H]`` read from ``[B, S, H]``, first those of S, then those of B.

REPEATED = -1  # a dimension made by ``expand``: it lies nowhere


class Digit(NamedTuple):
    """``length`` indices of a view, each of them ``unit`` entries further along a dimension of the memory."""

    dim: int
    unit: int
    length: int


class Elsewhere(Exception):
    """The dimension of the view lies across those of its memory."""


def digits(view: TensorInfo, dims: tuple[int, ...], memory: TensorInfo) -> tuple[Digit, ...]:
    """The digits of some dimensions of a view that count as one, from the innermost.

    Raises:
        Elsewhere: they are no digits of the memory.
    """
    if view is memory or (view.layout == memory.layout and view.offset == memory.offset):  # itself, as most are
        shape = memory.layout.shape
        strides = memory.layout.stride
        return tuple(Digit(d if strides[d] else REPEATED, 1, shape[d]) for d in reversed(dims) if shape[d] > 1)
    found: list[Digit] = []
    for dim in reversed(dims):
        size = view.layout.shape[dim]
        step = view.layout.stride[dim] * view.layout.dtype.itemsize
        if size > 1:
            found += [Digit(REPEATED, 1, size)] if step == 0 else _digits(view, size, step, memory)
    return tuple(found)


def _digits(view: TensorInfo, size: int, step: int, memory: TensorInfo) -> list[Digit]:
    """Digits of one dimension of ``size`` indices that lie ``step`` bytes apart."""
    item = memory.layout.dtype.itemsize
    offset = view.offset * view.layout.dtype.itemsize - memory.offset * item
    found = []
    while size > 1:
        dim, length, stride = _dimension_at(memory, step)
        unit = step // stride
        if length % unit:
            raise Elsewhere
        count = min(size, length // unit)
        # A slice must be one of equal blocks; a dimension that goes on in the next one must take all of this one.
        is_block = (length // unit) % count == 0 and (offset // stride) % (unit * count) < unit
        if size % count or not is_block:
            raise Elsewhere
        found.append(Digit(dim, unit, count))
        size //= count
        step = stride * length
    return found


def _dimension_at(memory: TensorInfo, step: int) -> tuple[int, int, int]:
    """The dimension along which entries ``step`` bytes apart lie, its length and its stride in bytes."""
    layout = memory.layout
    for dim, (length, stride) in enumerate(zip(layout.shape, layout.stride, strict=True)):
        stride_bytes = stride * layout.dtype.itemsize
        if length > 1 and stride and stride_bytes <= step < stride_bytes * length and step % stride_bytes == 0:
            return dim, length, stride_bytes
    raise Elsewhere


def insert(chain: list[int], mark: int) -> bool:
    """Enter a mark into a list in which each number divides the next; False if it is there, or does not fit."""
    place = bisect_left(chain, mark)
    if place == len(chain) or chain[place] == mark or mark % chain[place - 1] or chain[place] % mark:
        return False
    chain.insert(place, mark)
    return True


# A stretch that is given several words is called by the first.
WORDS = ("batch", "experts", "heads", "vocabulary", "channels", "height", "width", "depth", "sequence", "features")
_RANK = {word: i for i, word in enumerate(WORDS)}
_IMAGE = ("height", "width", "depth")
_SWEEPS = 6


class MemoryCut(NamedTuple):
    """A letter in the memory of one tensor."""

    operand: Operand
    digits: tuple[Digit, ...]
    unit: int
    halo: int


@dataclass(eq=False, slots=True)
class Spelled:
    """A letter of a call in memory.

    Attributes:
        call: number of the call.
        letter: as the rule gives it.
        cuts: where it lies.
        partial: the tensors that are sums over it.
        marks: where it falls apart: increasing, each divides the next, 1 and its size at the ends.
    """

    call: int
    letter: Letter
    cuts: tuple[MemoryCut, ...]
    partial: tuple[Operand, ...]
    marks: list[int]

    @property
    def is_plain(self) -> bool:
        """Each of its cuts takes all of one dimension."""
        for cut in self.cuts:
            if len(cut.digits) != 1 or cut.unit != 1:
                return False
            ((dim, unit, length),) = cut.digits
            if dim == REPEATED or unit != 1 or length != cut.operand.root.info.layout.shape[dim]:
                return False
        return bool(self.cuts)

    @property
    def segments(self) -> Iterator[tuple[int, int]]:
        """Stretches of the letter, from the innermost; all but those of one index."""
        return pairwise(self.marks)


@dataclass(eq=False, slots=True)
class _Dimension:
    """Dimensions of tensors that calls take as one; ``same`` leads to the one that stands for all of them."""

    marks: list[int]
    same: _Dimension | None = None


@dataclass(eq=False, slots=True)
class _Name:
    """The rank of the word of stretches that belong together; ``same`` leads to the one that stands for all of them."""

    rank: int = len(WORDS)
    same: _Name | None = None


class Dimensions:
    """All dimensions of all roots: where each falls apart, and what its stretches are called."""

    def __init__(self) -> None:
        self._dimensions: dict[tuple[Root, int], _Dimension] = {}
        self._names: dict[tuple[_Dimension, int], _Name] = {}

    def refine(self, spelled: list[Spelled]) -> None:
        """Make the marks of letters and dimensions agree, sweeping through the graph until nothing changes.

        Not those of images: each layer has its own number of rows, and cuts them wherever they can be cut.
        """
        spelled = [one for one in spelled if one.letter.word not in _IMAGE and not one.letter.is_named]
        split = [one for one in spelled if not self._unite(one)]
        for one in split:
            for cut in one.cuts:
                for digit in cut.digits:
                    self._mark(cut.operand.root, digit.dim, digit.unit)
                    self._mark(cut.operand.root, digit.dim, digit.unit * digit.length)
        for sweep in range(_SWEEPS):
            changed = False
            for one in split if sweep % 2 == 0 else reversed(split):
                changed |= self._agree(one)
            if not changed:
                break
        for one in spelled:
            if one.is_plain:
                one.marks = self.marks_of(one.cuts[0].operand.root, one.cuts[0].digits[0].dim)

    def link(self, spelled: list[Spelled]) -> None:
        """Tie together what letters tie together, and give it the words that they know."""
        for one in spelled:
            if one.letter.is_named or (one.is_plain and not one.letter.word):
                continue
            for low, high in one.segments:
                names = [name for cut in one.cuts for name in self._names_in(cut, low, high)]
                for name in names[1:]:
                    _unite_names(names[0], name)
                if names and one.letter.word:
                    _give(names[0], one.letter.word)

    def name(self, root: Root, dim: int, word: str) -> None:
        """Give all stretches of a dimension a word."""
        dimension = self._dimension(root, dim)
        for low in dimension.marks[:-1]:
            _give(self._name(dimension, low), word)

    def word(self, one: Spelled, low: int, high: int) -> str:
        """Name of a stretch of a letter."""
        if one.letter.is_named:
            return one.letter.word
        ranks = [_top(name).rank for cut in one.cuts for name in self._names_in(cut, low, high)]
        return WORDS[min(min(ranks, default=len(WORDS)), len(WORDS) - 1)]

    def atoms_of(self, root: Root) -> Iterator[tuple[str, Shard]]:
        """Every stretch of a tensor's dimensions, with its word."""
        for dim, length in enumerate(root.info.layout.shape):
            dimension = self._dimension(root, dim)
            for low, high in pairwise(dimension.marks):
                rank = min(_top(self._name(dimension, low)).rank, len(WORDS) - 1)
                yield WORDS[rank], Shard(dim, high // low, 0, length // high)

    def marks_of(self, root: Root, dim: int) -> list[int]:
        """Marks at which a dimension falls apart."""
        return self._dimension(root, dim).marks

    def _dimension(self, root: Root, dim: int) -> _Dimension:
        found = self._dimensions.get((root, dim))
        if found is None:
            length = root.info.layout.shape[dim]
            found = self._dimensions[root, dim] = _Dimension([1, length] if length > 1 else [1])
        while found.same is not None:
            found = found.same
        return found

    def _name(self, dimension: _Dimension, low: int) -> _Name:
        name = self._names.get((dimension, low))
        if name is None:
            name = self._names[dimension, low] = _Name()
        return name

    def _unite(self, one: Spelled) -> bool:
        """Take the dimensions of a letter as one, if it has all of each, as most letters have."""
        if not one.is_plain:
            return False
        first, *rest = (self._dimension(cut.operand.root, cut.digits[0].dim) for cut in one.cuts)
        for other in rest:
            if other is not first:
                other.same = first
        return True

    def _mark(self, root: Root, dim: int, mark: int) -> bool:
        return dim != REPEATED and insert(self.marks_of(root, dim), mark)

    def _agree(self, one: Spelled) -> bool:
        """Carry the marks of a letter's dimensions to the letter and back to all of them; whether any changed."""
        changed = False
        for cut in one.cuts:
            place = 1
            for dim, unit, count in cut.digits:
                if dim != REPEATED:
                    for mark in self.marks_of(cut.operand.root, dim):
                        x = place * mark // unit
                        if mark % unit == 0 and unit <= mark <= unit * count and x % cut.unit == 0:
                            changed |= insert(one.marks, x // cut.unit) if x >= cut.unit else False
                place *= count
                if place % cut.unit == 0 and place >= cut.unit:
                    changed |= insert(one.marks, place // cut.unit)
        for cut in one.cuts:
            place = 1
            for dim, unit, count in cut.digits:
                for mark in one.marks:
                    x = mark * cut.unit
                    if place <= x <= place * count and unit * x % place == 0:
                        changed |= self._mark(cut.operand.root, dim, unit * x // place)
                place *= count
        return changed

    def _names_in(self, cut: MemoryCut, low: int, high: int) -> Iterator[_Name]:
        """Names of the stretches of a tensor that lie in a stretch of a letter."""
        place = 1
        low, high = low * cut.unit, high * cut.unit
        for dim, unit, count in cut.digits:
            if dim != REPEATED:
                dimension = self._dimension(cut.operand.root, dim)
                for mark in dimension.marks[:-1]:
                    if unit * max(low, place) <= mark * place < unit * min(high, place * count):
                        yield self._name(dimension, mark)
            place *= count


def _top(name: _Name) -> _Name:
    while name.same is not None:
        name = name.same
    return name


def _unite_names(one: _Name, other: _Name) -> None:
    one, other = _top(one), _top(other)
    if one is not other:
        other.same = one
        one.rank = min(one.rank, other.rank)


def _give(name: _Name, word: str) -> None:
    top = _top(name)
    top.rank = min(top.rank, _RANK[word])


def part_of(cut: MemoryCut, low: int, high: int) -> Shard | Replicate | None:
    """The part of a tensor that a stretch of a letter splits; None where it is no stretch of one dimension."""
    place = 1
    first, last = low * cut.unit, high * cut.unit
    for dim, unit, count in cut.digits:
        if place <= first and last <= place * count and first % place == 0:
            if dim == REPEATED:
                return Replicate()
            length = cut.operand.root.info.layout.shape[dim]
            block = unit * last // place
            if length % block or (cut.halo and block != length):
                return None
            return Shard(dim, high // low, cut.halo, length // block)
        place *= count
    return None
