"""Rules for products, sums, softmax, and what moves entries about."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from graphs.ops.letters import Call, Cut, Letter, Slot, aligned, einsum, handed_on, summed
from graphs.ops.table import (
    NO_FACTS,
    Arguments,
    WorkFacts,
    flops_of,
    product_work,
    rows_work,
    split_of,
    work_of,
)
from graphs.records import Work

# A sum of arguments, and what a number makes of it.
_LINEAR = {
    *("add", "add_", "sub", "sub_", "neg", "neg_", "clone", "_to_copy", "to", "contiguous", "copy_", "cat", "stack"),
    *("slice_backward", "select_backward", "reshape", "flatten", "sum", "mean", "constant_pad_nd"),
}
_LINEAR_COUNTS = {"to", "_to_copy", "cumsum"}
_SCALED = {"mul", "mul_", "div", "div_"}


def linear_letters(call: Call) -> Iterator[Letter]:
    """How a call hands on sums."""
    outputs = [slot for slot in call.outputs if slot is not None]
    if call.name in _LINEAR_COUNTS and len(call.inputs) == 1:  # sizes of groups are integers
        if _keeps_fractions(call.first(), call["dtype"]):
            yield handed_on(call.inputs, outputs)
        return
    inputs = [slot for slot in call.inputs if slot.is_float]
    if not inputs or not all(slot.is_float for slot in outputs):
        return
    if call.name in _LINEAR and len(inputs) == len(call.inputs):
        if not isinstance(call["other"], (int, float)) and not call["value"]:
            yield handed_on(inputs, outputs)
    elif call.name in _SCALED and call["rounding_mode"] is None:
        factors = [call["self"]] if call.name.startswith("div") else inputs
        yield from (handed_on([slot], outputs) for slot in factors if slot.is_float)


def _keeps_fractions(x: Slot, dtype: Any) -> bool:
    """Whether a conversion loses nothing that a sum of what it makes would have: no fractions, no counts."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return True
    return not x.is_float and str(dtype) != "torch.bool"


@split_of("mm")
def _mm(call: Call) -> list[Letter]:
    return einsum((call["self"], "ik"), (call["mat2"], "kj"), into=[(call.output, "ij")])


@split_of("bmm")
def _bmm(call: Call) -> list[Letter]:
    return einsum((call["self"], "bik"), (call["mat2"], "bkj"), into=[(call.output, "bij")], words={"b": "heads"})


@split_of("baddbmm")
def _baddbmm(call: Call) -> list[Letter]:
    terms = (call["batch1"], "bik"), (call["batch2"], "bkj")
    return _with_bias(call["self"], einsum(*terms, into=[(call.output, "bij")], words={"b": "heads"}), call.output)


@split_of("addmm")
def _addmm(call: Call) -> list[Letter]:
    letters = einsum((call["mat1"], "ik"), (call["mat2"], "kj"), into=[(call.output, "ij")])
    return _with_bias(call["self"], letters, call.output)


@split_of("linear")
def _linear(call: Call) -> list[Letter]:
    x = call["input"]
    before = ascii_lowercase[: x.ndim - 1]
    out = before + ("z" if call["weight"].ndim == 2 else "")
    letters = einsum((x, f"{before}y"), (call["weight"], "zy"[2 - call["weight"].ndim :]), into=[(call.output, out)])
    return _with_bias(call["bias"], letters, call.output)


@split_of("matmul", "mv", "dot")
def _matmul(call: Call) -> list[Letter]:
    x, y = call.inputs
    names = ascii_lowercase[: max(x.ndim, y.ndim)]
    left = ("" if x.ndim < 2 else names[len(names) - x.ndim : -2] + "y") + "x"
    right = "x" if y.ndim < 2 else names[len(names) - y.ndim : -2] + "xz"
    out = (names[:-2] if len(names) > 2 else "") + ("y" if x.ndim > 1 else "") + ("z" if y.ndim > 1 else "")
    words = dict.fromkeys(names[:-2], "heads") if min(x.ndim, y.ndim) > 2 else {}
    return einsum((x, left), (y, right), into=[(call.output, out)], words=words)


def _with_bias(bias: Slot | None, letters: list[Letter], out: Slot) -> list[Letter]:
    """A bias is added to the result: it has its letters, and is a summand where the result is one."""
    if bias is None:
        return letters
    found = []
    for letter in letters:
        dims = [cut.dims[0] - out.ndim + bias.ndim for cut in letter.cuts if cut.slot == out.number]
        if not dims:
            found.append(summed(letter, bias))
        elif dims[0] >= 0 and bias.shape[dims[0]] == letter.size:
            found.append(Letter(letter.size, (*letter.cuts, Cut(bias.number, (dims[0],))), letter.partial, letter.word))
        else:
            found.append(letter)
    return found


@work_of("mm", "bmm", "_int_mm", "_scaled_mm")
def _mm_work(call: Arguments) -> WorkFacts:
    return _of_factors(call["self"].shape, call["mat2"].shape)


@work_of("addmm", "_addmm_activation")
def _addmm_work(call: Arguments) -> WorkFacts:
    return _of_factors(call["mat1"].shape, call["mat2"].shape)


@work_of("baddbmm")
def _baddbmm_work(call: Arguments) -> WorkFacts:
    return _of_factors(call["batch1"].shape, call["batch2"].shape)


def _of_factors(one: Sequence[int], other: Sequence[int]) -> WorkFacts:
    """The work of a product [..., rows, depth] by [..., depth, columns]."""
    *before, rows, depth = one
    return product_work(math.prod(before), rows, other[-1], depth)


@split_of("_grouped_mm", "grouped_mm_fallback")
def _grouped_mm(call: Call) -> list[Letter]:
    """Rows of x [T, K] meet the matrix of their group in weights [G, K, N]; which rows a group has, offsets say."""
    x, y = call.inputs[:2]
    if x.ndim == 2 and y.ndim == 3:
        return einsum((x, "tk"), (y, ".kj"), into=[(call.output, "tj")])
    if x.ndim == 2 and y.ndim == 2:  # the weights' gradient
        return einsum((x, "it"), (y, "tj"), into=[(call.output, ".ij")])
    return einsum((x, "bik"), (y, "bkj"), into=[(call.output, "bij")]) if x.ndim == y.ndim == 3 else []


@split_of("grouped_mm_fallback_backward")
def _grouped_mm_backward(call: Call) -> list[Letter]:
    grad, x, y = call.inputs[:3]
    dx, dy = call.outputs[:2]
    return einsum((grad, "tj"), (x, "tk"), (y, ".kj"), into=[(dx, "tk"), (dy, ".kj")])


@work_of("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")
def _grouped_work(call: Arguments) -> WorkFacts:
    """Rows in groups times one matrix each, or groups of columns times as many groups of rows."""
    one, other = (
        (call[key] if key in call else call[name]).shape for key, name in (("self", "input"), ("mat2", "weight"))
    )
    ends = call.get("offs")
    groups = one[0] if len(one) == 3 else other[0] if len(other) == 3 else ends.shape[0]  # type: ignore[union-attr]
    rows, depth, columns = float(one[-2]), float(one[-1]), float(other[-1])
    shared = 0.0
    if len(one) == 2 and len(other) == 2:
        depth, shared = depth / groups, 3.0
    elif len(one) == 2:
        rows /= groups
    elif len(other) == 2:
        columns, shared = columns / groups, 2.0
    return WorkFacts(Work.GROUPED, (float(groups), rows, columns, depth, shared))


@work_of("grouped_mm_fallback_backward")
def _grouped_backward_work(call: Arguments) -> WorkFacts:
    """Both gradients: the sizes of the forward product."""
    (rows, columns), (groups, depth, _) = call["grad_output"].shape, call["weight"].shape
    return WorkFacts(Work.GROUPED, (float(groups), rows / groups, float(columns), float(depth), 0.0))


@flops_of("_grouped_mm", "grouped_mm_fallback")
def _grouped_flops(x: Any, weights: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Every row of one factor meets one matrix of the other, whichever group it is in."""
    return 2 * int(x.numel()) * int(weights.shape[-1])


@flops_of("grouped_mm_fallback_backward")
def _grouped_backward_flops(*args: Any, **kwargs: Any) -> int:
    return 2 * _grouped_flops(*args, **kwargs)


# -- along one dimension -----------------------------------------------------------------------------------------------

_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk")


@split_of("softmax", "_softmax", "_safe_softmax", *_ALONG)
def _along(call: Call) -> list[Letter]:
    x, dim = call.first(), call["dim"]
    fixed = [-1 if dim is None else dim]
    outputs = [slot for slot in call.outputs if slot is not None]
    letters = aligned([x], [x], fixed) if x.ndim else []
    return [Letter(one.size, tuple(Cut(slot.number, one.cuts[0].dims) for slot in (x, *outputs))) for one in letters]


@split_of("_softmax_backward_data")
def _softmax_backward(call: Call) -> list[Letter]:
    return aligned(call.inputs, [call.output], [call["dim"]])


_SUM_BYTES = 4.0  # of a number in the format in which sums are made


@split_of("_log_softmax", "log_softmax", "_log_softmax_backward_data")
def _log_softmax(call: Call) -> list[Letter]:
    """Classes too: each part gives to all others the sums of its own, one number a sample."""
    x, dim = call.first(), call["dim"]
    if not x.ndim or dim is None:
        return []
    samples = math.prod(x.shape) // max(x.shape[dim], 1)
    along = einsum(*((slot, _only(slot, dim)) for slot in call.inputs), into=[(call.output, _only(x, dim))])
    classes = [replace(letter, sums_bytes=_SUM_BYTES * samples) for letter in along]
    return [*aligned(call.inputs, [call.output], [dim]), *classes]


def _only(slot: Slot, dim: int) -> str:
    """The letters of a tensor of which one dimension alone is split."""
    return "".join("z" if d == dim % slot.ndim else "." for d in range(slot.ndim))


@work_of("_softmax", "_log_softmax", "_safe_softmax", "softmax.int", "log_softmax.int")
def _softmax_work(call: Arguments) -> WorkFacts:
    return _along_last(call, call["self"].shape)


@work_of("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward_work(call: Arguments) -> WorkFacts:
    return _along_last(call, call["output"].shape)


def _along_last(call: Arguments, shape: Sequence[int]) -> WorkFacts:
    """The work of a softmax along the last dimension; others have kernels of their own."""
    return rows_work(shape, shape[-1]) if shape and call["dim"] in (-1, len(shape) - 1) else NO_FACTS


@split_of("flip", "roll")
def _moved(call: Call) -> list[Letter]:
    fixed = call["dims"]
    dims = fixed if fixed else range(call.first().ndim)
    return aligned([call.first()], [call.output], dims)


@split_of("tril", "triu", "tril_", "triu_")
def _triangle(call: Call) -> list[Letter]:
    return aligned([call.first()], [call.output], (-1, -2))


@split_of("index_select", "select_backward", "slice_backward", "slice_scatter", "select_scatter", "repeat_interleave")
def _one_dimension(call: Call) -> list[Letter]:
    x, out = call.first(), call.output
    dim = (call["dim"] or 0) % max(out.ndim, 1)
    if call.name == "select_backward":
        names = ascii_lowercase[: out.ndim]
        return einsum((x, names[:dim] + names[dim + 1 :]), into=[(out, f"{names[:dim]}.{names[dim + 1 :]}")])
    if x.ndim != out.ndim:
        return []
    floats = [slot for slot in call.inputs if slot.ndim == out.ndim]
    return aligned(floats, [out], [dim])


@split_of("gather", "scatter", "scatter_add", "scatter_", "scatter_add_", "scatter_reduce", "take_along_dim")
def _gather(call: Call) -> list[Letter]:
    return [
        letter
        for letter in aligned(call.inputs, [call.output], [call["dim"] or 0])
        if len(letter.cuts) == len(call.inputs) + 1
    ]


@split_of("cat", "stack")
def _cat(call: Call) -> list[Letter]:
    parts = [slot for slot in call["tensors"] if math.prod(slot.shape)]
    out, dim = call.output, call["dim"] or 0
    names = ascii_lowercase[: out.ndim]
    dim %= out.ndim
    inner = names[:dim] + names[dim + 1 :] if call.name == "stack" else f"{names[:dim]}.{names[dim + 1 :]}"
    letters = einsum(*((part, inner) for part in parts), into=[(out, f"{names[:dim]}.{names[dim + 1 :]}")])
    return letters if call.name == "stack" else [*letters, *_blocks(out, parts, dim)]


def _blocks(whole: Slot, parts: list[Slot], dim: int) -> list[Letter]:
    """Equal blocks along a dimension, say query, key and value: all of them may be split in the same way."""
    sizes = {part.shape[dim] for part in parts}
    if len(sizes) != 1 or sum(part.shape[dim] for part in parts) != whole.shape[dim]:
        return []
    return [Letter(sizes.pop(), tuple(Cut(slot.number, (dim,)) for slot in (*parts, whole)))]


@split_of("split", "split_with_sizes", "chunk", "unbind", "split_with_sizes_copy")
def _split(call: Call) -> list[Letter]:
    x = call.first()
    dim = (call["dim"] or 0) % x.ndim
    names = ascii_lowercase[: x.ndim]
    outer = names[:dim] + ("" if call.name == "unbind" else ".") + names[dim + 1 :]
    letters = einsum((x, f"{names[:dim]}.{names[dim + 1 :]}"), into=[(out, outer) for out in call.outputs])
    parts = [out for out in call.outputs if out is not None]
    return letters if call.name == "unbind" else [*letters, *_blocks(x, parts, dim)]


@split_of("constant_pad_nd", "pad")
def _pad(call: Call) -> list[Letter]:
    x, padding = call.first(), call["pad"]
    changed = [x.ndim - 1 - i // 2 for i, size in enumerate(padding) if size]
    return aligned([x], [call.output], changed)


# -- sums over dimensions ----------------------------------------------------------------------------------------------

_SUMS = {"sum", "mean", "nansum"}


@split_of("sum", "mean", "nansum", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "logsumexp")
def _reduction(call: Call) -> list[Letter]:
    return _reduced(call, call["dim"], call.name in _SUMS)


@split_of("var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "median", "count_nonzero")
def _joint_reduction(call: Call) -> list[Letter]:
    return _reduced(call, call["dim"], is_sum=False)


@split_of("mode", "kthvalue", "cosine_similarity", "quantile", "nanquantile")
def _along_by_default(call: Call) -> list[Letter]:
    """Reductions along one dimension, of tensors of one shape."""
    x, out = call.first(), call.output
    dim = (1 if call.name == "cosine_similarity" else -1) if call["dim"] is None else call["dim"]
    is_all = call["dim"] is None and "quantile" in call.name
    if is_all or not x.ndim or any(slot.shape != x.shape for slot in call.inputs):
        return []
    names = ascii_lowercase[: x.ndim].replace(ascii_lowercase[dim % x.ndim], ".")
    left = names if out.ndim == x.ndim else names.replace(".", "")
    return einsum(*((slot, names) for slot in call.inputs), into=[(one, left) for one in call.outputs])


def _reduced(call: Call, dim: object, is_sum: bool) -> list[Letter]:
    x = call.first()
    dims = tuple(range(x.ndim)) if dim is None or dim == () else dim if isinstance(dim, tuple) else (dim,)
    gone = {d % x.ndim for d in dims} if x.ndim else set()
    keep = call["keepdim"]
    names = ascii_lowercase[: x.ndim]
    given = "".join("." if d in gone and not is_sum else c for d, c in enumerate(names))
    left = "".join(("." if keep else "") if d in gone else c for d, c in enumerate(names))
    return einsum((x, given), into=[(out, left) for out in call.outputs])


@work_of("sum.dim_IntList")
def _sum_work(call: Arguments) -> WorkFacts:
    """A sum over the first dimensions, whose columns are what it leaves."""
    shape = call["self"].shape
    summed = sorted(dim % len(shape) for dim in call["dim"] or ()) if shape else []
    is_first = 0 < len(summed) < len(shape) and summed == list(range(len(summed)))
    return rows_work(shape, math.prod(shape[len(summed) :])) if is_first else NO_FACTS


# -- tensors made of nothing, and copies in another shape --------------------------------------------------------------


@split_of("zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "new_zeros", "new_ones", "new_full")
def _made(call: Call) -> list[Letter]:
    inputs, out = call.inputs[:1], call.output
    if not inputs or inputs[0].shape == out.shape or not inputs[0].ndim or not out.ndim:
        return aligned(inputs, [out])
    # ``new_zeros`` only asks for the number format: any stretch of its argument will do for a stretch of its rows.
    size = min(inputs[0].shape[0], out.shape[0])
    if not size or max(inputs[0].shape[0], out.shape[0]) % size:  # it would leave both with fewer units than they have
        return aligned([], [out])
    shared = Letter(size, tuple(Cut(slot.number, (0,), slot.shape[0] // size) for slot in (inputs[0], out)))
    return [shared, *(letter for letter in aligned([], [out], [0]))]


@split_of("reshape", "flatten", "clone", "view_copy", "_reshape_copy", "unflatten", "_reshape_alias_copy")
def _reshaped(call: Call) -> list[Letter]:
    x, out = call.first(), call.output
    if x.shape == out.shape:
        return aligned([x], [out])
    cuts = (Cut(x.number, tuple(range(x.ndim))), Cut(out.number, tuple(range(out.ndim))))
    return [Letter(math.prod(x.shape), cuts)]


@split_of("repeat", "tile")
def _repeated(call: Call) -> list[Letter]:
    x, out = call.first(), call.output
    return [letter for letter in aligned([x], [out]) if len(letter.cuts) == 2 or x.ndim < out.ndim]


@split_of("one_hot")
def _one_hot(call: Call) -> list[Letter]:
    names = ascii_lowercase[: call.first().ndim]
    return einsum((call.first(), names), into=[(call.output, f"{names}.")])


@split_of("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index(call: Call) -> list[Letter]:
    """``x[i, j]`` with index tensors in a row: their dimensions take the place of those that they index.

    Where values are added to ``x`` at indices, both may be split, and the result is a sum over them.
    """
    x, out = call.first(), call.output
    given = call["indices"]
    places = [d for d, index in enumerate(given) if isinstance(index, Slot)]
    indices = [given[d] for d in places]
    if not places or places != list(range(places[0], places[-1] + 1)) or any(not index.ndim for index in indices):
        return []
    if any(index.is_mask for index in indices):
        return _masked(call, indices, places[0])
    rank, first = max(index.ndim for index in indices), places[0]
    names = ascii_lowercase[: x.ndim - len(places) + rank]
    of_x = names[:first] + "." * len(places) + names[first + rank :]
    terms = [(index, names[first + rank - index.ndim : first + rank]) for index in indices]
    if call.name == "index":
        return einsum((x, of_x), *terms, into=[(out, names)])
    values = call["values"]
    letters = einsum((x, of_x), *terms, (values, names[len(names) - values.ndim :]), into=[(out, of_x)])
    is_added = bool(call["accumulate"]) and x.is_float
    return [summed(one, x) if one.partial else one for one in letters if is_added or not one.partial]


def _masked(call: Call, masks: list[Slot], first: int) -> list[Letter]:
    """One number put where a mask says so; how many entries of other values a part takes, the data says."""
    x, (mask, *others), values = call.first(), masks, call["values"]
    if call.name == "index" or others or values.ndim:
        return []
    names = ascii_lowercase[: x.ndim]
    return einsum((x, names), (mask, names[first : first + mask.ndim]), into=[(call.output, names)])
