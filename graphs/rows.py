"""Split rows: the ways in which one op may be split along one axis of a mesh, in PyTorch's words for tensors on meshes.

A row says for each tensor that an op reads or writes how its parts lie on the devices of the axis: `Shard` (each has a
stretch of one dimension), `Replicate` (each has all of it) or `Partial` (each has a summand). It is written as one line
of text, inputs before outputs: ``"batch: S(0,32),R->S(0,32)"`` is a matrix product split by the 32 rows of its first
factor. Dimensions are those of a tensor as its producer writes it, whatever view of it an op reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from graphs.errors import GraphError
from graphs.op_kinds import op_kind

SEQUENCE = "sequence"
# Cuts of one dimension along these are no cuts along another of them: a flattened dimension holds several.
OWN_FAMILY = ("batch", SEQUENCE, "height", "width", "depth")

_SHARD = re.compile(r"S\((\d{1,3}),(\d{1,18})(?:,(\d{1,18}))?(?:,(\d{1,18}))?\)")
_GROUPS = re.compile(r"G\((\d{1,3}),(\d{1,18})(?:,(\d{1,6}(?:\.\d{1,18})?))?\)")
_ROW = re.compile(
    r"(?:([a-z][a-z_]*): )?([^ ]*)->([^ ]*)"
    r"(?: whole ([0-9.e+-]+)/([0-9.e+-]+)(?:/([0-9.e+-]+))?)?(?: sums ([0-9.e+-]+))?"
)


@dataclass(frozen=True)
class Shard:
    """Each device has a stretch of one dimension.

    Attributes:
        dim: number of the dimension.
        extent: units in which it may be cut; no more parts than that.
        halo: entries of each neighbour's stretch that a part needs beside its own.
        blocks: equal stretches of the dimension, each of which is cut: 3 where query, key and value lie side by side.
    """

    dim: int
    extent: int
    halo: int = 0
    blocks: int = 1

    def __str__(self) -> str:
        rest = f",{self.halo},{self.blocks}" if self.blocks > 1 else f",{self.halo}" if self.halo else ""
        return f"S({self.dim},{self.extent}{rest})"


@dataclass(frozen=True)
class ByGroups(Shard):
    """Each device has the entries of some groups, `extent` in all: tokens, dropless, at the devices of their experts.

    How many entries a group has, the data says.

    Attributes:
        load: entries of the device that has most, over an even share; 1 for even ones.
    """

    load: float = 1.0

    def __str__(self) -> str:
        return f"G({self.dim},{self.extent}{f',{self.load!r}' if self.load != 1.0 else ''})"


@dataclass(frozen=True)
class Replicate:
    """Each device has all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Each device has a summand: the tensor is the sum of all."""

    def __str__(self) -> str:
        return "P"


Part = Shard | Replicate | Partial


@dataclass(frozen=True)
class SplitRow:
    """One way to split an op.

    Attributes:
        inputs: of each tensor that the op reads, then of each `State` that it uses, both by number.
        outputs: of each tensor that it writes.
        axis: what is split, in a word: batch, sequence, heads, features, channels, height, width, experts ...; "" where
            nobody said.
        whole_flops, whole_bytes: FLOPs and bytes moved that every part has in full; the rest is divided.
        whole_time: share of an op's measured time, beside what is fixed, that every part takes although its work is
            divided, from 0 to 1: kernels use fewer channels less well.
        sums_bytes: of the sums that a part makes of its own entries of what is made last of the op's inputs, and gives
            to all other parts before the op runs: of a softmax along its classes one number a sample.
    """

    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    axis: str = ""
    whole_flops: float = 0.0
    whole_bytes: float = 0.0
    whole_time: float = 0.0
    sums_bytes: float = 0.0

    @cached_property
    def load(self) -> float:
        """Work of the part that has most, over an even share; above 1 where it has more of the tokens."""
        return max((part.load for part in (*self.inputs, *self.outputs) if isinstance(part, ByGroups)), default=1.0)

    @cached_property
    def is_by_groups(self) -> bool:
        """Whether parts have entries by groups whose sizes the data says."""
        return any(isinstance(part, ByGroups) for part in (*self.inputs, *self.outputs))

    @cached_property
    def extent(self) -> int:
        """The most parts it allows."""
        extents = [part.extent for part in (*self.inputs, *self.outputs) if isinstance(part, Shard)]
        return min(extents, default=1)

    def __str__(self) -> str:
        before, after = (",".join(map(str, parts)) for parts in (self.inputs, self.outputs))
        amounts = [self.whole_flops, self.whole_bytes, *([self.whole_time] if self.whole_time else [])]
        whole = f" whole {'/'.join(map(repr, amounts))}" if any(amounts) else ""
        sums = f" sums {self.sums_bytes!r}" if self.sums_bytes else ""
        return f"{f'{self.axis}: ' if self.axis else ''}{before}->{after}{whole}{sums}"

    @staticmethod
    def parse(text: str) -> SplitRow:
        """The row that ``str(row)`` wrote.

        Raises:
            GraphError: another text.
        """
        found = _ROW.fullmatch(text)
        if found is None:
            raise _unreadable(text)
        axis, before, after, *amounts = found.groups()
        try:
            whole = [float(amount or 0) for amount in amounts]
        except ValueError:
            raise _unreadable(text) from None
        if not 0 <= whole[2] <= 1:
            raise _unreadable(text)
        return SplitRow(_parts(before, text), _parts(after, text), axis or "", *whole)


def parts_statistics(kind: str, row: SplitRow) -> bool:
    """Whether parts that a row makes of an op have other statistics than the whole has, unless put together.

    Along channels they have the same: each writes its own of every vector, or nothing but its stretch of dimension 1.
    Samples may be among them, as in an instance norm, which is a batch norm of ``[1, N * C, ...]``.
    """
    if not op_kind(kind).has_statistics:
        return False
    along = [part.dim for part in row.outputs if isinstance(part, Shard)]
    return len(along) < len(row.outputs) or along == [0] or any(dim > 1 for dim in along)


def op_with_statistics(
    kinds: Iterable[str], rows: Iterable[tuple[SplitRow, ...]], words: Collection[str] = ("batch",)
) -> int | None:
    """The first op whose statistics change where it is split along one of these axes; None where there is none."""
    for number, (kind, of_op) in enumerate(zip(kinds, rows, strict=True)):
        if op_kind(kind).has_statistics and any(row.axis in words and parts_statistics(kind, row) for row in of_op):
            return number
    return None


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant that ops of a graph use; tied ones are one.

    Its bytes are counted among the kept bytes of the first op that uses it.

    Attributes:
        name: dotted path, e.g. ``"encoder.0.weight"``.
        users: names of the ops that read or write it, in op order.
        parameter_bytes, gradient_bytes, optimizer_bytes: as in `graphs.records.Op`.
        frozen: a parameter that no op of the step writes.
        dtype: number format, e.g. ``"uint8"``; "" where nobody said: that of its first user.
    """

    name: str
    users: tuple[str, ...]
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    frozen: bool = False
    dtype: str = ""


def _parts(listed: str, text: str) -> tuple[Part, ...]:
    words = re.findall(r"[^,(]+(?:\([^)]*\))?", listed)
    if ",".join(words) != listed:
        raise _unreadable(text)
    return tuple(_part(word, text) for word in words)


def _part(word: str, text: str) -> Part:
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial()
    grouped = _GROUPS.fullmatch(word)
    if grouped is not None:
        return ByGroups(int(grouped[1]), int(grouped[2]), load=float(grouped[3] or 1.0))
    found = _SHARD.fullmatch(word)
    if found is None:
        raise _unreadable(text)
    return Shard(int(found[1]), int(found[2]), int(found[3] or 0), int(found[4] or 1))


def _unreadable(text: str) -> GraphError:
    return GraphError(
        f"split row {text!r:.80} cannot be read; expected S(dimension,length), R or P for each input, '->', and the "
        "same for each output, e.g. 'S(0,32),R->S(0,32)'."
    )
