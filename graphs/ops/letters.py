"""Letters: what may be split of one call, as the letters of an einsum, one dimension of several tensors each.

``mm`` is ``ik,kj->ij``. Any subset of the indices of *one* letter, taken in every tensor that has it, gives a part of
the result: a stretch of the outputs that have the letter, a summand of the outputs that do not. Rules know calls and
shapes; views, memory and the graph come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Slot(NamedTuple):
    """A tensor of a call: arguments are numbered first, in order, then results."""

    number: int
    shape: tuple[int, ...]
    is_float: bool = True
    is_mask: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Cut(NamedTuple):
    """Dimensions of a tensor that a letter stands for.

    Attributes:
        slot: number of the tensor.
        dims: its dimensions, from the outermost; several where they count as one.
        unit: entries for each index of the letter.
        halo: entries that a part needs of each neighbour beside its own.
    """

    slot: int
    dims: tuple[int, ...]
    unit: int = 1
    halo: int = 0


@dataclass(frozen=True)
class Letter:
    """A dimension that tensors of a call share, or, without cuts, a sum that the call hands on.

    Attributes:
        size: how many indices it has.
        cuts: where it stands.
        partial: numbers of the tensors that are sums over it.
        word: what it is, where the call says so: ``"heads"``, ``"channels"`` ...
        is_named: it is that and nothing else, whatever its dimensions are elsewhere.
        is_wide: an argument that is cut may be read in full where others that are not are slices of the same tensor:
            query, key and value of one product.
        sums_bytes: as in `graphs.records.SplitRow`; the dimension is then none of samples, whatever it is elsewhere.
    """

    size: int
    cuts: tuple[Cut, ...] = ()
    partial: tuple[int, ...] = ()
    word: str = ""
    is_named: bool = False
    is_wide: bool = False
    sums_bytes: float = 0.0


@dataclass(frozen=True)
class Call:
    """A call as rules see it.

    Attributes:
        name: of the operator, e.g. ``"conv2d"``.
        arguments: what is given, by the name in the schema; a `Slot` for each tensor.
        outputs: a `Slot` for each result that is a tensor, else None.
    """

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Slot | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def first(self) -> Slot:
        """The first tensor argument."""
        return self.inputs[0]

    @property
    def inputs(self) -> list[Slot]:
        return [value for value in _leaves(tuple(self.arguments.values())) if isinstance(value, Slot)]

    @property
    def output(self) -> Slot:
        """The first result."""
        return next(slot for slot in self.outputs if slot is not None)


def einsum(
    *terms: tuple[Slot | None, str], into: Sequence[tuple[Slot | None, str]], words: Mapping[str, str] | None = None
) -> list[Letter]:
    """Letters of an einsum-like call; ``.`` marks a dimension that is not split.

    Args:
        terms: arguments with a letter for each of their dimensions; what is None or missing is left out.
        into: results likewise; one that lacks a letter is a sum over it.
        words: what letters are called.
    """
    given = [(slot, letters) for slot, letters in terms if isinstance(slot, Slot)]
    made = [(slot, letters) for slot, letters in into if isinstance(slot, Slot)]
    found = []
    for letter in dict.fromkeys("".join(letters for _, letters in (*given, *made))):
        if letter == ".":
            continue
        places = [(slot, i) for slot, letters in (*given, *made) for i, c in enumerate(letters) if c == letter]
        size = max(slot.shape[i] for slot, i in places)
        cuts = tuple(Cut(slot.number, (i,)) for slot, i in places if slot.shape[i] == size)
        held = {cut.slot for cut in cuts}
        partial = tuple(slot.number for slot, _ in made if slot.number not in held)
        found.append(Letter(size, cuts, partial, (words or {}).get(letter, "")))
    return found


def aligned(inputs: Iterable[Slot], outputs: Iterable[Slot], fixed: Iterable[int] = ()) -> list[Letter]:
    """Letters of a call that works entry by entry, with broadcasting; not of the ``fixed`` dimensions."""
    outputs = list(outputs)
    shape = outputs[0].shape
    left_out = {dim % len(shape) for dim in fixed} if shape else set()
    found = []
    for i, size in enumerate(shape):
        if i in left_out:
            continue
        slots = [*inputs, *(out for out in outputs if out.ndim == len(shape))]
        places = [(slot, i - len(shape) + slot.ndim) for slot in slots]
        cuts = tuple(Cut(slot.number, (d,)) for slot, d in places if d >= 0 and slot.shape[d] == size)
        found.append(Letter(size, cuts))
    return found


def handed_on(inputs: Iterable[Slot], outputs: Iterable[Slot]) -> Letter:
    """The call is linear in these arguments together: of summands of them it makes a summand of its results."""
    return Letter(0, partial=tuple(slot.number for slot in (*inputs, *outputs)))


def summed(letter: Letter, *slots: Slot) -> Letter:
    """The letter with more tensors that are sums over it."""
    return replace(letter, partial=(*letter.partial, *(slot.number for slot in slots)))


def _leaves(value: Any) -> Iterable[Any]:
    if type(value) is Slot or not isinstance(value, tuple):
        yield value
    else:
        for item in value:
            yield from _leaves(item)
