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

from graphs.capture.drafts import DraftCall, DraftRow, Drafts, Operand, Root
from graphs.capture.trace import flat
from graphs.op_kinds import op_kind
from graphs.ops.letters import Call, Cut, Letter, Slot, handed_on
from graphs.records import OWN_FAMILY, ByGroups, Part, Shard

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


# -- Rows by experts ------------------------------------------------------------------------------------------------
# Rows by experts of what lies between a dispatch to experts and the way back: tokens are where their experts are.
#
# A product by groups gives each token to the matrix of its group. Devices that have some of the matrices need the
# tokens
# of these alone: an all-to-all takes them there, and what follows entry by entry stays there until something reads the
# tokens as their own devices have them. How many tokens a group has, the data says.


_EXPERTS = "experts"


def add_group_rows(drafts: Drafts) -> None:
    """Enter the rows into drafts that have their other rows."""
    groups: dict[int, ByGroups] = {}  # of each value that lies by groups
    for call in drafts.calls:
        if is_grouped(call.target):
            _spread(drafts, call, groups)
        elif not op_kind(drafts.ops[call.draft].kind).reads_shape_only:
            draft = drafts.ops[call.draft]
            mirror = None if draft.mirror is None else drafts.ops[draft.mirror]
            is_second = mirror is not None and any(row.axis == _EXPERTS for row in mirror.rows)
            row = _alike(draft.rows, call, groups, is_second)
            if row is not None:
                draft.rows.append(row)
                groups.update((value, part) for value, part in row.values.items() if isinstance(part, ByGroups))


def _spread(drafts: Drafts, call: DraftCall, groups: dict[int, ByGroups]) -> None:
    """Have the row of experts of a product by groups read and write the tokens of its groups, in place of summands."""
    row = next((row for row in drafts.ops[call.draft].rows if row.axis == _EXPERTS), None)
    operands = [one for one in (*call.inputs, *call.outputs) if one is not None]
    lists = [one for one in operands if len(one.info.layout.shape) == 2]
    extents = [
        part.extent
        for part in (*(row.values if row else {}).values(), *(row.states if row else {}).values())
        if isinstance(part, Shard)
    ]
    if row is None or not extents or not lists or not all(_is_list(one, lists[-1]) for one in lists):
        return
    by_groups = ByGroups(0, min(extents))
    read = [one.info.layout.distinct_bytes for one in call.inputs if one in lists]
    row.whole_bytes = max(row.whole_bytes - float(sum(read)), 0.0)
    for one in lists:
        if one.value is not None:
            row.values[one.value] = groups[one.value] = by_groups


def _is_list(one: Operand, last: Operand) -> bool:
    """Whether an operand is a list of as many tokens as another, along the first dimension of its memory."""
    tokens = {one.info.layout.shape[0], one.info.layout.shape[1]}
    memory = one.root.info.layout.shape
    return one.root.state is None and bool(memory) and memory[0] in tokens & set(last.info.layout.shape)


def _alike(rows: list[DraftRow], call: DraftCall, groups: dict[int, ByGroups], is_second: bool) -> DraftRow | None:
    """The row of a call that works token by token on what lies by groups; None where most of what it reads does not.

    The rest, such as a weight for each token, goes to where the tokens are. So does, whatever it is, the gradient that
    a backward call reads whose forward call has such a row.
    """
    own = next((row for row in rows if row.axis in OWN_FAMILY), None)
    if own is None or own.states or not all(isinstance(part, Shard) and not part.dim for part in own.values.values()):
        return None
    of_values = [one for one in (*call.inputs, *call.outputs) if one is not None and one.value in own.values]
    read = {one.value: one.info.layout.distinct_bytes for one in call.inputs if one.value in own.values}
    found = {groups[value] for value in read if value in groups}
    lengths = {one.root.info.layout.shape[0] for one in of_values}
    if len(found) != 1 or len(lengths) != 1:
        return None
    others = [one for one in call.inputs if one.value in read and one.value not in groups]
    if not all(one.info.layout.dtype.is_floating_point for one in others):
        return None  # places in a list, in which the order of experts is left
    if not is_second and 2 * sum(size for value, size in read.items() if value in groups) <= sum(read.values()):
        return None
    if any(type(leaf) is int and leaf in lengths for leaf in flat((call.args, call.kwargs))):
        return None  # it is told how many there are in all
    (by_groups,) = found
    values: dict[int, Part] = dict.fromkeys(own.values, by_groups)
    return DraftRow(_EXPERTS, values, {}, own.whole_bytes)


# -- Entries counted out --------------------------------------------------------------------------------------------
# Rows of an index that takes one entry for each sample: ``x[torch.arange(n), position]``.
#
# A part of the samples looks up its own ones, if their numbers are cut as the samples are. Integers that number all
# entries of a dimension in order are followed through the graph.


_MAKES, _CONVERTS_entries = "arange", ("to", "_to_copy", "clone", "contiguous")
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
        if made or (call.name in _CONVERTS_entries and any(steps[:1])):
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
