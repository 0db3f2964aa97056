"""Rows by experts of what lies between a dispatch to experts and the way back: tokens are where their experts are.

A product by groups gives each token to the matrix of its group. Devices that have some of the matrices need the tokens
of these alone: an all-to-all takes them there, and what follows entry by entry stays there until something reads the
tokens as their own devices have them. How many tokens a group has, the data says.
"""

from __future__ import annotations

from graphs.capture.drafts import DraftCall, DraftRow, Drafts, Operand
from graphs.capture.rows.dispatch import is_grouped
from graphs.capture.trace import flat
from graphs.op_kinds import op_kind
from graphs.rows import OWN_FAMILY, ByGroups, Part, Shard

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
