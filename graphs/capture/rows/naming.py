"""Stretches of dimensions: which belong together through a graph, and what they are called.

Letters tie dimensions of tensors together. Where one tensor is read as ``[B, S, 12, 64]`` and another call wrote it as
``[B * S, 768]``, both dimensions fall apart into the same stretches, here batch and sequence, heads and features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from graphs.capture.drafts import Operand, Root
from graphs.capture.rows.letters import Letter
from graphs.capture.rows.memory import REPEATED, Digit, insert
from graphs.rows import Replicate, Shard

# What a stretch is called if several words are given to it: the first.
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
    def segments(self) -> Iterator[tuple[int, int]]:
        """Stretches of the letter, from the innermost; all but those of one index."""
        return pairwise(self.marks)


class Dimensions:
    """All dimensions of all roots: where each falls apart, and what its stretches are called."""

    def __init__(self) -> None:
        self._marks: dict[tuple[Root, int], list[int]] = {}
        self._parent: dict[tuple[Root, int, int], tuple[Root, int, int]] = {}
        self._rank: dict[tuple[Root, int, int], int] = {}

    def refine(self, spelled: list[Spelled]) -> None:
        """Make the marks of letters and dimensions agree, sweeping through the graph until nothing changes.

        Not those of images: each layer has its own number of rows, and cuts them wherever they can be cut.
        """
        spelled = [one for one in spelled if one.letter.word not in _IMAGE and not one.letter.is_named]
        for one in spelled:
            for cut in one.cuts:
                for digit in cut.digits:
                    self._mark(cut.operand.root, digit.dim, digit.unit)
                    self._mark(cut.operand.root, digit.dim, digit.unit * digit.length)
        for sweep in range(_SWEEPS):
            changed = False
            for one in spelled if sweep % 2 == 0 else reversed(spelled):
                changed |= self._agree(one)
            if not changed:
                return

    def link(self, spelled: list[Spelled]) -> None:
        """Tie together what letters tie together, and give it the words that they know."""
        for one in spelled:
            for low, high in one.segments if not one.letter.is_named else ():
                atoms = [atom for cut in one.cuts for atom in self._atoms(cut, low, high)]
                for atom in atoms[1:]:
                    self._union(atoms[0], atom)
                if atoms and one.letter.word:
                    self._name(atoms[0], one.letter.word)

    def name(self, root: Root, dim: int, word: str) -> None:
        """Give all stretches of a dimension a word."""
        for low in self.marks_of(root, dim)[:-1]:
            self._name((root, dim, low), word)

    def word(self, one: Spelled, low: int, high: int) -> str:
        """What a stretch of a letter is called."""
        if one.letter.is_named:
            return one.letter.word
        atoms = [atom for cut in one.cuts for atom in self._atoms(cut, low, high)]
        return WORDS[min((self._rank.get(self._find(atom), len(WORDS) - 1) for atom in atoms), default=-1)]

    def atoms_of(self, root: Root) -> Iterator[tuple[str, Shard]]:
        """Every stretch of a tensor's dimensions, with its word."""
        for dim, length in enumerate(root.info.layout.shape):
            marks = self.marks_of(root, dim)
            for low, high in pairwise(marks):
                rank = self._rank.get(self._find((root, dim, low)), len(WORDS) - 1)
                yield WORDS[rank], Shard(dim, high // low, 0, length // high)

    def marks_of(self, root: Root, dim: int) -> list[int]:
        marks = self._marks.get((root, dim))
        if marks is None:
            length = root.info.layout.shape[dim]
            marks = self._marks[root, dim] = [1, length] if length > 1 else [1]
        return marks

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

    def _atoms(self, cut: MemoryCut, low: int, high: int) -> Iterator[tuple[Root, int, int]]:
        place = 1
        low, high = low * cut.unit, high * cut.unit
        for dim, unit, count in cut.digits:
            if dim != REPEATED:
                for mark in self.marks_of(cut.operand.root, dim)[:-1]:
                    if unit * max(low, place) <= mark * place < unit * min(high, place * count):
                        yield cut.operand.root, dim, mark
            place *= count

    def _find(self, atom: tuple[Root, int, int]) -> tuple[Root, int, int]:
        parent = self._parent
        while (above := parent.get(atom, atom)) is not atom:
            parent[atom] = parent.get(above, above)
            atom = above
        return atom

    def _union(self, one: tuple[Root, int, int], other: tuple[Root, int, int]) -> None:
        one, other = self._find(one), self._find(other)
        if one is not other and one != other:
            self._parent[other] = one
            rank = min(self._rank.get(one, len(WORDS)), self._rank.pop(other, len(WORDS)))
            if rank < len(WORDS):
                self._rank[one] = rank

    def _name(self, atom: tuple[Root, int, int], word: str) -> None:
        top = self._find(atom)
        self._rank[top] = min(self._rank.get(top, len(WORDS)), _RANK[word])


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
