"""Rows of an index that takes one entry for each sample: ``x[torch.arange(n), position]``.

A part of the samples looks up its own ones, if their numbers are cut as the samples are. Which integers are the numbers
of all entries of a dimension, in their order, is followed through the graph.
"""

from __future__ import annotations

from graphs.capture.drafts import DraftCall, Root
from graphs.capture.rows.letters import Call, Cut, Letter, Slot

_MAKES, _CONVERTS = "arange", ("to", "_to_copy", "clone", "contiguous")
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


class Counted:
    """Follows through the calls of a step which tensors hold 0, 1, 2 ... n - 1."""

    def __init__(self) -> None:
        self._roots: set[Root] = set()

    def letters(self, draft: DraftCall, call: Call, found: tuple[Letter, ...]) -> tuple[Letter, ...]:
        """The letters of a call, with the one that holds because it looks up entries by numbers counted out."""
        results = [out for out in draft.outputs if out is not None]
        known = [root in self._roots for root, _, _ in draft.inputs]
        if (call.name == _MAKES and _is_from_zero(call)) or (call.name in _CONVERTS and known[:1] == [True]):
            self._roots.update(out.root for out in results)
        own = _looked_up(call, known) if call.name in ("index", *_PUTS) and any(known) else None
        if own is None:
            return found
        slots = {slot.number for slot in call["indices"] if isinstance(slot, Slot)}
        return own, *(letter for letter in found if not any(cut.slot in slots for cut in letter.cuts))


def _is_from_zero(call: Call) -> bool:
    return call["start"] in (None, 0) and call["step"] in (None, 1)


def _looked_up(call: Call, known: list[bool]) -> Letter | None:
    """All index tensors are vectors, and the first of them counts the entries of the dimension that it indexes."""
    x, given, out = call.first(), call["indices"], call.output
    indices = [index for index in given if isinstance(index, Slot)]
    places = [d for d, index in enumerate(given) if isinstance(index, Slot)]
    first = places[0]
    if any(index.shape != (x.shape[first],) for index in indices) or places != list(range(first, first + len(places))):
        return None
    if not known[indices[0].number] or any(known[index.number] for index in indices[1:]):
        return None
    cuts = [Cut(x.number, (first,)), *(Cut(index.number, (0,)) for index in indices), Cut(out.number, (first,))]
    values = call["values"] if call.name in _PUTS else None
    if isinstance(values, Slot):
        if values.ndim != x.ndim - len(places) + 1 or values.shape[first] != x.shape[first]:
            return None
        cuts.insert(-1, Cut(values.number, (first,)))
    return Letter(x.shape[first], tuple(cuts))
