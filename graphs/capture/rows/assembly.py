"""From the calls of a captured step to the rows of its drafts."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from graphs.capture.drafts import DraftCall, DraftRow, Drafts, Operand, Root
from graphs.capture.rows.dispatch import Counted, Places, add_group_rows
from graphs.capture.rows.naming import Dimensions, Elsewhere, MemoryCut, Spelled, digits, part_of
from graphs.capture.trace import PARAMETER, Layout, flat
from graphs.ops.letters import Call, Cut, Letter, Slot, aligned
from graphs.ops.products import linear_letters
from graphs.ops.table import operator
from graphs.records import OWN_FAMILY, Part, Partial, Replicate, Shard


def add_rows(drafts: Drafts) -> None:
    """Enter into drafts and states the ways in which they may be split."""
    collects = gc.isenabled()
    gc.disable()  # many small records and no cycles: looking for some takes longer than making them
    try:
        _add_rows(drafts)
    finally:
        if collects:
            gc.enable()


def _add_rows(drafts: Drafts) -> None:
    places, counted = Places(), Counted()
    spelled = [one for number, call in enumerate(drafts.calls) for one in _spelled(number, call, places, counted)]
    first_update = len(drafts.calls)
    for number, (_, gradients, state) in enumerate(drafts.updates):
        operands = (*gradients, Operand(state, None, state.info))
        spelled += _spelled_all(first_update + number, _update_letters(operands), operands)
    dimensions = Dimensions()
    dimensions.refine([one for one in spelled if one.cuts])
    dimensions.link(spelled)
    _name_sources(drafts, dimensions)
    _write_rows(drafts, dimensions, spelled)
    add_group_rows(drafts)
    _place_gradients(drafts, spelled)
    for draft, operand in drafts.sources:
        value = drafts.ops[draft].outputs[0]
        drafts.ops[draft].rows = [DraftRow(word, {value: part}, {}) for word, part in _longest(dimensions, operand)]
    for use, root in zip(drafts.states, drafts.roots, strict=True):
        use.rows = list(dimensions.atoms_of(root))


def _longest(dimensions: Dimensions, operand: Operand) -> Iterator[tuple[str, Shard]]:
    """One stretch with each word in each dimension of an input: readers tell stretches apart by their words alone."""
    found: dict[tuple[str, int], tuple[str, Shard]] = {}
    for word, part in dimensions.atoms_of(operand.root):
        before = found.setdefault((word, part.dim), (word, part))
        if part.extent > before[1].extent:
            found[word, part.dim] = word, part
    return iter(found.values())


# -- letters of calls --------------------------------------------------------------------------------------------------


def _spelled(number: int, call: DraftCall, places: Places, counted: Counted) -> Iterator[Spelled]:
    outputs = tuple(None if out is None else out.info.layout for out in call.outputs)
    seen, letters = letters_of(call.target, call.args, call.kwargs, outputs)
    operands = (*call.inputs, *(out for out in call.outputs if out is not None))
    n_tensors = sum(out is not None for out in call.outputs)
    given = sum(type(leaf) is Layout for leaf in flat((call.args, call.kwargs)))
    if given == len(call.inputs) and len(operands) == len(call.inputs) + n_tensors:
        if seen is not None:
            letters = counted.letters(call, seen, places.letters(call, seen, letters))
        yield from _spelled_all(number, letters, operands, tuple(one.root for one in call.written))


def _spelled_all(
    number: int, letters: tuple[Letter, ...], operands: tuple[Operand, ...], written: tuple[Root, ...] = ()
) -> Iterator[Spelled]:
    for letter in letters:
        cuts = [_in_memory(cut, operands[cut.slot]) for cut in letter.cuts]
        placed = tuple(cut for cut in cuts if cut is not None)
        # A slice of a state that is no block of it: every part has the state, and takes its piece of the slice. Where
        # it is written, every part needs all that is written there.
        beyond = [operands[letter.cuts[i].slot].root for i, cut in enumerate(cuts) if cut is None]
        if all(root.state is not None and root not in written for root in beyond):
            partial = tuple(operands[slot] for slot in letter.partial)
            yield Spelled(number, letter, placed, partial, [1, letter.size] if letter.size > 1 else [1])


def _in_memory(cut: Cut, operand: Operand) -> MemoryCut | None:
    try:
        return MemoryCut(operand, digits(operand.info, cut.dims, operand.root.info), cut.unit, cut.halo)
    except Elsewhere:
        return None


def letters_of(target: Any, args: Any, kwargs: Any, outputs: Any) -> tuple[Call | None, tuple[Letter, ...]]:
    """A call as rules see it (None where it is no operator), and what may be split of it.

    Args:
        args, kwargs: its arguments with a `Layout` for each tensor, as `graphs.capture.trace.layouts` gives them.
        outputs: the `Layout` of each flat result; None for what is no tensor.
    """
    try:
        return _letters(target, args, kwargs, outputs)
    except TypeError as error:  # an argument that cannot be a cache key
        if "unhashable" not in str(error):
            raise
        found: tuple[Call | None, tuple[Letter, ...]] = _letters.__wrapped__(target, args, kwargs, outputs)
        return found


@lru_cache(maxsize=65536)
def _letters(target: Any, args: Any, kwargs: Any, outputs: Any) -> tuple[Call | None, tuple[Letter, ...]]:
    """A call as rules see it, and what may be split of it, by our rules or DTensor's."""
    if not isinstance(target, OpOverload):
        return None, ()
    name = target._schema.name.partition("::")[2]
    arguments, results = slots_of(args, kwargs, _names(target), outputs)
    call = Call(name, arguments, results)
    split = operator(name).split
    if split is not None:
        found = tuple(split(call))
    elif _is_pointwise(name):
        made = [slot for slot in results if slot is not None]
        found = tuple(aligned(call.inputs, made)) if made else ()
    else:
        found = tuple(dtensor_letters(target, args, kwargs, sum(out is not None for out in outputs)))
    return call, (*(letter for letter in found if letter.size > 1), *linear_letters(call))


@cache
def _names(target: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in target._schema.arguments)


# Entry by entry, though torch does not tag them so. Their backward passes are, too.
_POINTWISE = {
    *("_to_copy", "to", "type_as", "copy_", "copy", "masked_fill", "masked_fill_", "fill_", "zero_", "contiguous"),
    *("lift_fresh_copy", "bernoulli_", "bernoulli", "uniform_", "normal_", "exponential_", "native_dropout", "dropout"),
    *("dropout_", "alpha_dropout", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like", "empty_like"),
    *("randint_like", "clone", "nan_to_num", "log_sigmoid", "log_sigmoid_forward", "hardswish", "hardswish_"),
    *("rrelu_with_noise", "_prelu_kernel", "prelu", "complex", "polar", "masked_scale", "floor_divide", "remainder"),
    *("float", "half", "bool", "long", "int", "double", "mse_loss_backward", "smooth_l1_loss_backward"),
    *("binary_cross_entropy_backward", "huber_loss_backward", "soft_margin_loss_backward"),
}


@cache
def _is_pointwise(name: str) -> bool:
    """Whether an operator works entry by entry, or is the backward pass of one that does."""
    forward = name.removesuffix("_backward")
    return any(one in _POINTWISE or _is_tagged(one) for one in {name, name.rstrip("_"), forward})


def _is_tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def slots_of(args: Any, kwargs: Any, names: Sequence[str], outputs: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The arguments by name and the results of a call, with a `Slot` for every `Layout`.

    Args:
        args: positional arguments.
        kwargs: pairs of name and keyword argument.
        names: of the positional parameters.
        outputs: flat results.
    """
    count = 0

    def numbered(value: Any) -> Any:
        nonlocal count
        if type(value) is Layout:
            count += 1
            return Slot(count - 1, value.shape, value.dtype.is_floating_point, value.dtype == torch.bool)
        if isinstance(value, tuple):
            return tuple(numbered(item) for item in value)
        return value

    named = {name: numbered(value) for name, value in zip(names, args, strict=False)}
    named.update((name, numbered(value)) for name, value in kwargs)
    return named, tuple(numbered(value) if type(value) is Layout else None for value in outputs)


def _update_letters(operands: tuple[Operand, ...]) -> tuple[Letter, ...]:
    """An update works entry by entry: along any dimension of the parameter."""
    shape = operands[-1].info.layout.shape
    same = [i for i, operand in enumerate(operands) if operand.info.layout.shape == shape]
    return tuple(Letter(size, tuple(Cut(i, (dim,)) for i in same)) for dim, size in enumerate(shape) if size > 1)


# -- words -------------------------------------------------------------------------------------------------------------

_INPUT_WORDS = {2: ("sequence",), 3: ("sequence", "features"), 4: ("channels", "height", "width")}


def _name_sources(drafts: Drafts, dimensions: Dimensions) -> None:
    """Words for the dimensions of inputs, and of parameters that hold a matrix for each expert."""
    first = [operand.info.layout.shape[0] for _, operand in drafts.sources if operand.info.layout.shape]
    batch = max(set(first), key=first.count) if first else None
    for _, operand in drafts.sources:
        layout = operand.info.layout
        rest = _INPUT_WORDS.get(len(layout.shape), ())
        if layout.shape and layout.shape[0] == batch:
            dimensions.name(operand.root, 0, "batch")
        if len(layout.shape) == 2 and layout.dtype.is_floating_point:
            rest = ("features",)
        for dim, word in enumerate(rest, start=1):
            dimensions.name(operand.root, dim, word)
    for use, root in zip(drafts.states, drafts.roots, strict=True):
        if use.kind == PARAMETER and len(root.info.layout.shape) == 3 and min(root.info.layout.shape) > 1:
            dimensions.name(root, 0, "experts")


# -- rows --------------------------------------------------------------------------------------------------------------


def _write_rows(drafts: Drafts, dimensions: Dimensions, spelled: list[Spelled]) -> None:
    """Rows of each draft, in program order; ``sums`` follows which axes a tensor may be a sum over."""
    sums: dict[int, set[str]] = {}
    n_calls = len(drafts.calls)
    for one in spelled:
        if one.call >= n_calls:
            number, gradients, _ = drafts.updates[one.call - n_calls]
            call = None
            operands: tuple[Operand, ...] = gradients
        else:
            call = drafts.calls[one.call]
            number, operands = call.draft, call.inputs
        rows = drafts.ops[number].rows
        for row in _rows(one, call, operands, dimensions, sums):
            if not any((row.axis, row.values, row.states) == (r.axis, r.values, r.states) for r in rows):
                rows.append(row)


def _place_gradients(drafts: Drafts, spelled: list[Spelled]) -> None:
    """Let an op that writes a gradient use its parameter: a part of the one is kept beside that part of the other."""
    parts: dict[tuple[int, int, Part], Part] = {}
    for one in spelled:
        if one.call < len(drafts.calls):
            continue
        *written, own = one.cuts
        state = own.operand.root.state
        for low, high in one.segments:
            of_state = part_of(own, low, high)
            for cut in written:
                value, part = cut.operand.value, part_of(cut, low, high)
                if value is not None and state is not None and part is not None and of_state is not None:
                    parts[value, state, part] = of_state
    for _, gradients, root in drafts.updates:
        for value in [operand.value for operand in gradients if operand.value is not None]:
            if root.state is None:
                continue
            for row in drafts.ops[drafts.values[value].producer].rows:
                found = parts.get((value, root.state, row.values.get(value, Replicate())))
                if found is not None:
                    row.states.setdefault(root.state, found)


def _rows(
    one: Spelled, call: DraftCall | None, inputs: tuple[Operand, ...], dimensions: Dimensions, sums: dict[int, set[str]]
) -> Iterator[DraftRow]:
    """The rows of one letter of one call."""
    if not one.letter.cuts:
        yield from _sum_rows(one, inputs, sums)
        return
    longest: dict[str, tuple[int, int]] = {}
    for low, high in reversed(list(one.segments)):
        word = dimensions.word(one, low, high)
        before = longest.setdefault(word, (low, high))
        if high * before[0] > before[1] * low:
            longest[word] = low, high
    if "heads" in longest:
        longest.pop("features", None)  # entries of each head
    if one.letter.sums_bytes:
        longest = {word: stretch for word, stretch in longest.items() if word not in OWN_FAMILY}
    for word, (low, high) in longest.items():
        parts: list[tuple[Operand, Part]] = [(operand, Partial()) for operand in one.partial]
        for cut in one.cuts:
            part = part_of(cut, low, high)
            if part is None:
                break
            parts.append((cut.operand, part))
        else:
            row = _row(word, _widened(parts, inputs) if one.letter.is_wide else parts, call, inputs)
            if row is not None:
                row.sums_bytes = one.letter.sums_bytes
                for operand in one.partial if not one.letter.is_named else ():
                    if operand.value is not None and operand not in inputs:
                        sums.setdefault(operand.value, set()).add(word)
                yield row


def _sum_rows(one: Spelled, inputs: tuple[Operand, ...], sums: dict[int, set[str]]) -> Iterator[DraftRow]:
    """Rows of a call that hands sums on: for the axes over which all of its arguments may be sums.

    None where another argument is the same tensor or a view of it: of one tensor both would be read as summands, and
    what is linear in each of two arguments is not linear in both together.
    """
    summands = {id(operand) for operand in one.partial}
    given = [operand for operand in inputs if id(operand) in summands]
    others = {operand.value for operand in inputs if id(operand) not in summands}
    if any(operand.value in others for operand in given):
        return
    words = [sums.get(operand.value, set()) if operand.value is not None else set() for operand in given]
    for word in sorted(set.intersection(*words)) if words else []:
        values: dict[int, Part] = {o.value: Partial() for o in one.partial if o.value is not None}
        for operand in one.partial:
            if operand.value is not None:
                sums.setdefault(operand.value, set()).add(word)
        yield DraftRow(word, values, {}, is_whole=True)


def _widened(parts: list[tuple[Operand, Part]], inputs: tuple[Operand, ...]) -> list[tuple[Operand, Part]]:
    """The parts without cuts of arguments whose tensor another argument reads in full."""
    named = {id(operand) for operand, _ in parts}
    whole = {operand.value for operand in inputs if id(operand) not in named and operand.value is not None}
    given = {id(operand) for operand in inputs}
    return [(operand, part) for operand, part in parts if id(operand) not in given or operand.value not in whole]


def _row(
    word: str, parts: list[tuple[Operand, Part]], call: DraftCall | None, inputs: tuple[Operand, ...]
) -> DraftRow | None:
    """The row with these parts; None where a tensor that is read twice would be split in two ways."""
    values: dict[int, Part] = {}
    states: dict[int, Part] = {}
    split = {id(operand) for operand, part in parts if not isinstance(part, Replicate)}
    rest = [(operand, Replicate()) for operand in inputs if id(operand) not in split]
    of_root: dict[int, Part] = {}
    for operand, part in (*parts, *rest):
        root = operand.root
        of_root.setdefault(id(root), part)
        for number, table in ((operand.value, values), (root.state, states)):
            if number is not None and table.setdefault(number, part) != part:
                return None
    if not any(isinstance(part, Shard) for part in (*values.values(), *states.values())):
        return None
    for operand in call.written if call is not None else ():
        kept = None if operand.root.state is None else states.get(operand.root.state)
        if word in OWN_FAMILY and isinstance(kept, Shard) and kept.blocks > 1:
            return None  # such tables are kept whole, and each part would write its own samples alone
        if operand.value is not None:
            values.setdefault(operand.value, of_root[id(operand.root)])
    is_split = [isinstance(of_root[id(operand.root)], Shard) for operand in inputs]
    return DraftRow(word, values, states, _whole_bytes(call, inputs, is_split))


def _whole_bytes(call: DraftCall | None, inputs: tuple[Operand, ...], is_split: list[bool]) -> float:
    """Bytes of what is read in full by every part; a table that is only looked up in is not."""
    pieces: dict[int, int] = {}
    for i, operand in enumerate(inputs):
        if is_split[i]:
            continue
        size = operand.info.layout.distinct_bytes
        if i == 0 and call is not None and call.gathers:
            produced = sum(out.info.layout.size_bytes for out in call.outputs if out is not None)
            if size > produced:
                continue
        pieces[id(operand.root)] = max(size, pieces.get(id(operand.root), 0))
    return float(sum(pieces.values()))


# -- Rules of DTensor -----------------------------------------------------------------------------------------------
# The one place that reads the rules of torch's DTensor, which are private to it.
#
# Used where we have no rule of our own. A rule of DTensor is a function from a call's shapes to lists of placements,
# results first; each list is one letter. Checked by `tests/graphs/rows/test_rows.py`, which fails when torch moves
# them.


# Rules that computing with numbers has shown to be wrong, and why.
WRONG = {
    "aten.convolution.default": "channels and borders of a part are taken for those of the whole",
    "aten.convolution_backward.default": "as the convolution",
    "aten.native_batch_norm.default": "statistics of a part are taken for those of the batch",
}


@cache
def dtensor_strategies() -> Mapping[Any, Any]:
    """DTensor's rules for one dimension of a mesh by operator; none where this torch keeps them elsewhere."""
    try:
        from torch.distributed.tensor import DTensor

        found: Mapping[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    except (ImportError, AttributeError):
        return {}
    return found


def dtensor_letters(target: Any, args: Any, kwargs: Any, n_outputs: int) -> list[Letter]:
    """DTensor's letters for a call with `Layout` for each tensor; none where it has no rule, or one that fails."""
    strategy = dtensor_strategies().get(target)
    if strategy is None or str(target) in WRONG:
        return []
    shapes: list[tuple[int, ...]] = []
    try:
        listed = strategy(target, _metas(args, shapes), {name: _metas(value, shapes) for name, value in kwargs})
        found = [_letter(placements, shapes, n_outputs) for placements in listed]
    except Exception:  # a private function of another library: whatever it raises, there is no rule
        return []
    return [letter for letter in found if letter is not None]


def _metas(value: Any, shapes: list[tuple[int, ...]]) -> Any:
    if type(value) is Layout:
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        shapes.append(value.shape)
        return TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
    return tuple(_metas(item, shapes) for item in value) if isinstance(value, tuple) else value


def _letter(placements: Any, shapes: list[tuple[int, ...]], n_outputs: int) -> Letter | None:
    """One list of placements, results first; None where it splits nothing or is no plain split."""
    placements = list(placements)
    if len(placements) != n_outputs + len(shapes):
        return None
    ordered = placements[n_outputs:] + placements[:n_outputs]
    cuts, partial, size = [], [], 0
    for slot, placement in enumerate(ordered):
        if placement is None or type(placement).__name__ == "Replicate":
            continue
        if type(placement).__name__ in ("Shard", "_ShardingPlaceholder"):
            cuts.append(Cut(slot, (placement.dim,)))
            if slot < len(shapes):
                size = max(size, shapes[slot][placement.dim])
        elif type(placement).__name__ == "Partial" and placement.reduce_op == "sum":
            partial.append(slot)
        else:
            return None
    return Letter(size, tuple(cuts), tuple(partial)) if size > 1 else None
