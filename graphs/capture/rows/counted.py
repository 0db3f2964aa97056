"""Rows of an index that takes one entry for each sample: ``x[torch.arange(n), position]``.

A part of the samples looks up its own ones, if their numbers are cut as the samples are. Integers that number all
entries of a dimension in order are followed through the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphs.capture.drafts import DraftCall, Root
from graphs.ops.letters import Call, Cut, Letter, Slot

_MAKES, _CONVERTS = "arange", ("to", "_to_copy", "clone", "contiguous")
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag", "_embedding_bag_backward")
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


class Counted:
    """Follows through the calls of a step which tensors hold 0, k, 2 k ... (n - 1) k, and their step k."""

    def __init__(self) -> None:
        self._steps: dict[Root, int] = {}

    def letters(self, draft: DraftCall, call: Call, found: tuple[Letter, ...]) -> tuple[Letter, ...]:
        """The letters of a call, with the one that holds because it looks up entries by numbers counted out."""
        steps = [self._steps.get(root, 0) for root, *_ in draft.inputs]
        made = (call["step"] or 1) if call.name == _MAKES and not call["start"] else 0
        if made or (call.name in _CONVERTS and any(steps[:1])):
            self._steps.update((out.root, made or steps[0]) for out in draft.outputs if out is not None)
        if call.name in _BAGS:
            return (*found, *_of_bags(call, steps))
        known = [step == 1 for step in steps]
        own = _looked_up(call, known) if call.name in ("index", *_PUTS) and any(known) else None
        if own is None:
            return found
        slots = {slot.number for slot in call["indices"] if isinstance(slot, Slot)}
        return own, *(letter for letter in found if not any(cut.slot in slots for cut in letter.cuts))


def _of_bags(call: Call, steps: list[int]) -> Iterator[Letter]:
    """Bags of equally many indices: each part has some of them, and the gradient of the table is a sum over them."""
    indices, offsets = call["indices"], call["offsets"]
    step = steps[offsets.number]
    count = offsets.shape[0]
    if not step or indices.shape != (count * step,) or call["scale_grad_by_freq"] or call["include_last_offset"]:
        return
    slots = [slot for slot in (*call.inputs, *call.outputs) if slot is not None and slot not in (call["weight"],)]
    table = [call.output] if call.name.endswith("backward") else []
    units = {count: 1, count * step: step}
    cuts = [Cut(slot.number, (0,), units[slot.shape[0]]) for slot in slots if slot not in table and slot.shape[0]]
    yield Letter(count, tuple(cuts), tuple(slot.number for slot in table))


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
