"""Split rows: the ways in which one op may be split along one axis of a mesh, in PyTorch's words for tensors on meshes.

A row says for each tensor that an op reads or writes how its parts lie on the devices of the axis: `Shard` (each has a
stretch of one dimension), `Replicate` (each has all of it) or `Partial` (each has a summand). It is written as one line
of text, inputs before outputs: ``"S(0,32),R->S(0,32)"`` is a matrix product split by the 32 rows of its first factor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphs.errors import GraphError

_SHARD = re.compile(r"S\((\d{1,3}),(\d{1,18})(?:,(\d{1,18}))?\)")


@dataclass(frozen=True)
class Shard:
    """Each device has a stretch of one dimension.

    Attributes:
        dim: number of the dimension.
        extent: its length; no more parts than that.
        halo: entries of each neighbour's stretch that a part needs beside its own.
    """

    dim: int
    extent: int
    halo: int = 0

    def __str__(self) -> str:
        return f"S({self.dim},{self.extent}{f',{self.halo}' if self.halo else ''})"


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
        inputs: of each tensor that the op reads, then of each parameter or buffer.
        outputs: of each tensor that it writes.
    """

    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]

    def __str__(self) -> str:
        return "->".join(",".join(map(str, parts)) for parts in (self.inputs, self.outputs))

    @staticmethod
    def parse(text: str) -> SplitRow:
        """The row that ``str(row)`` wrote.

        Raises:
            GraphError: another text.
        """
        before, arrow, after = text.partition("->")
        if not arrow:
            raise _unreadable(text)
        return SplitRow(_parts(before, text), _parts(after, text))


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
    found = _SHARD.fullmatch(word)
    if found is None:
        raise _unreadable(text)
    return Shard(int(found[1]), int(found[2]), int(found[3] or 0))


def _unreadable(text: str) -> GraphError:
    return GraphError(
        f"split row {text!r:.80} cannot be read; expected S(dimension,length), R or P for each input, '->', and the "
        "same for each output, e.g. 'S(0,32),R->S(0,32)'."
    )
