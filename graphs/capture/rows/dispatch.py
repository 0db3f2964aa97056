"""Rows through a dispatch to experts: tokens are sorted by their expert, multiplied in groups, and put back.

Each part of a batch sorts its own tokens. Entries that it reads at places in its own list are its own too, and the
sizes of its groups are summands of those of the whole batch. Integers that are such places are followed through the
graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from torch._ops import OpOverload

from graphs.capture.drafts import DraftCall, Operand, Root
from graphs.ops.letters import Call, Cut, Letter, Slot, handed_on

_SORTS = ("sort", "argsort")
_COUNTS = ("histc", "bincount")
_CONVERTS = ("to", "_to_copy", *_COUNTS)
_SUMMED_COUNTS = ("to", "_to_copy", "cumsum")
_LOOKUPS = ("index", "_unsafe_index", "index_select", "gather")
_BACKWARD = "grouped_mm_fallback_backward"
_GROUPED = ("_grouped_mm", "grouped_mm_fallback", _BACKWARD)


def is_grouped(target: Any) -> bool:
    """Whether a call is a product of tokens in groups."""
    return isinstance(target, OpOverload) and target._schema.name.partition("::")[2] in _GROUPED


class Places:
    """Follows through the calls of a step which tensors hold places of tokens in a sorted list."""

    def __init__(self) -> None:
        self._units: dict[Root, int] = {}  # places that each token has in the list: one for each of its experts
        self._experts: set[Root] = set()  # those that hold, for each place, whose it is: no places themselves

    def letters(self, draft: DraftCall, call: Call, found: tuple[Letter, ...]) -> tuple[Letter, ...]:
        """The letters of a call, with those that hold because it works with places."""
        sorts = call.name in _SORTS and call.first().ndim == 1 and not call.first().is_float
        known = [root in self._units for root, _, _ in draft.inputs]
        if not sorts and not any(known):
            return found
        unit = max((self._units[root] for root, _, _ in draft.inputs if root in self._units), default=1)
        if sorts and not any(known):
            unit = _places_of_each(draft.inputs[0], call.first().shape[0])
        results = [out for out in draft.outputs if out is not None]
        stays = call.name in _CONVERTS
        places = [out.root for out in results if stays or not out.info.layout.dtype.is_floating_point]
        self._units.update(dict.fromkeys(places, unit))
        if self._tells_experts(draft, call):
            self._experts.update(places[:1] if sorts else places)
        if call.name in _GROUPED:
            return tuple(_grouped(call, found, unit))
        if call.name in _SUMMED_COUNTS:  # counts are whole numbers in every format
            return *found, handed_on(call.inputs, [slot for slot in call.outputs if slot is not None])
        is_place = [root in self._units and root not in self._experts for root, _, _ in draft.inputs]
        own = tuple(_of_tokens(letter, _length(call, known) // unit) for letter in _dispatched(call, is_place))
        return own or found if call.name in _SORTS else (*own, *_without_places(found, known, bool(own)))

    def _tells_experts(self, draft: DraftCall, call: Call) -> bool:
        """Whether the first result of a call says which expert a place is of, not which token lies there."""
        if call.name == "argsort":
            return False
        looked_up = draft.inputs[:1] if call.name in _LOOKUPS else draft.inputs
        return not any(root in self._units and root not in self._experts for root, _, _ in looked_up)


def _places_of_each(sorted_one: Operand, length: int) -> int:
    """Entries of each token, its experts, in a list [T * k] that is a view of [..., k]."""
    shape = sorted_one.root.info.layout.shape
    return shape[-1] if len(shape) > 1 and length % shape[-1] == 0 else 1


def _length(call: Call, known: list[bool]) -> int:
    """Length of the list that places refer to."""
    return max(
        (slot.shape[0] for slot in call.inputs if slot.ndim and (known[slot.number] or call.name in _SORTS)), default=1
    )


def _of_tokens(letter: Letter, tokens: int) -> Letter:
    """The letter in whole tokens: a token's places are not cut apart, for by them the token is known."""
    size = gcd(letter.size, tokens)
    times = letter.size // size
    return replace(letter, size=size, cuts=tuple(cut._replace(unit=cut.unit * times) for cut in letter.cuts))


def _without_places(found: tuple[Letter, ...], known: list[bool], is_own: bool) -> Iterator[Letter]:
    """Letters that do not split the places, where they are split with what they are places of."""
    for letter in found:
        if not is_own or not any(cut.slot < len(known) and known[cut.slot] for cut in letter.cuts):
            yield letter


def _dispatched(call: Call, is_place: list[bool]) -> Iterator[Letter]:
    outputs = [slot for slot in call.outputs if slot is not None]
    first = call.first()
    if call.name in _SORTS:
        yield Letter(first.shape[0], tuple(Cut(slot.number, (0,)) for slot in (first, *outputs)))
    elif call.name in _COUNTS:
        yield Letter(first.shape[0], (Cut(first.number, (0,)),), tuple(slot.number for slot in outputs))
    elif call.name.startswith(("index", "_index")) and call["indices"]:
        index = call["indices"][0]
        if isinstance(index, Slot) and index.ndim == 1 and is_place[index.number]:
            values = [call["values"]] if isinstance(call["values"], Slot) and call["values"].ndim else []
            yield _shared([slot for slot in (first, index, *values, *outputs) if slot.ndim])


def _shared(slots: list[Slot]) -> Letter:
    """The first dimension of tensors of which one has several entries for each of the other's."""
    size = gcd(*(slot.shape[0] for slot in slots))
    return Letter(size, tuple(Cut(slot.number, (0,), slot.shape[0] // size) for slot in slots))


def _grouped(call: Call, found: tuple[Letter, ...], unit: int) -> Iterator[Letter]:
    """A product by groups: tokens with the sizes of their own groups, or all tokens with some of the groups.

    How many tokens a group has, the data says. So whoever has some of the groups reads all tokens, and leaves a summand
    in which the tokens of the other groups are 0.
    """
    slots = call.inputs
    results = [slot for slot in call.outputs if slot is not None]
    sizes = slots[-1] if call.name != _BACKWARD else slots[2]
    weights = {slot.number for slot in (*slots, *results) if slot.ndim == 3}
    tokens = max((slot.shape[0] for slot in slots if slot.ndim == 2), default=0)
    for letter in found:
        is_token = not any(cut.slot in weights for cut in letter.cuts)
        if is_token:
            letter = _of_tokens(replace(letter, partial=(*letter.partial, sizes.number)), tokens // unit)
        yield letter
    experts = sizes.shape[0] if sizes.ndim == 1 else 0
    if experts > 1 and weights:
        matrices = tuple(Cut(number, (0,)) for number in sorted(weights))
        summands = tuple(slot.number for slot in results if slot.ndim == 2)
        yield Letter(experts, matrices, summands, word="experts", is_named=True)
