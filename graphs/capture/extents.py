"""Work and extents of one traced call, read off its arguments' shapes: sizes of products and attention, and rows.

Sources: shapes as torch's FLOP formulas read them (`torch.utils.flop_counter`); a convolution as the matrix product of
its unfolded windows and its filters (Chellapilla, Puri and Simard 2006, "High performance convolutional neural networks
for document processing").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch._ops import OpOverload

from graphs.records import NO_EXTENTS, Extents, Work


class WorkFacts(NamedTuple):
    """`Op.work` and `Op.extents` of a call."""

    work: Work = Work.OTHER
    extents: Extents = NO_EXTENTS


NO_FACTS = WorkFacts()
_OUTPUT = "-> "  # no name of an argument
# Calls whose mask is a program, so that nobody knows what it leaves out.
_FLEXIBLE = {"flex_attention": Work.ATTENTION, "flex_attention_backward": Work.ATTENTION_BACKWARD}
_Arguments = Mapping[str, Any]  # of a call, by the names in its schema; sizes are asked of `shape`


def facts_of(target: Any, args: Sequence[Any], kwargs: Any, output: Any) -> WorkFacts:
    """A call's work as one product or attention, or the rows it passes over; `NO_FACTS` of any other call.

    Args:
        target: what is called.
        args, kwargs, output: with `Layout` or tensors; `kwargs` a mapping, or its items.
    """
    if isinstance(target, OpOverload):
        rule = _rule(target)
        return NO_FACTS if rule is None else rule({**_bound(target, args, dict(kwargs)), _OUTPUT: output})
    work = _FLEXIBLE.get(getattr(target, "__name__", ""))
    if work is None or len(args) < 2:
        return NO_FACTS
    return WorkFacts(work, _attention({"query": args[0], "key": args[1]}))


def mirrored(facts: WorkFacts, weights_alone: bool) -> WorkFacts:
    """Facts of a call's backward pass in one op, for the gradients of all its inputs or of its weights alone."""
    if facts.work is Work.ATTENTION:
        return facts._replace(work=Work.ATTENTION_BACKWARD)
    if facts.work is not Work.PRODUCT or not weights_alone:
        return facts
    batch, rows, columns, depth, filters = facts.extents
    return WorkFacts(Work.WEIGHT_GRADIENT, (batch, columns, depth, rows, filters))


def _bound(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
    """Arguments by name, those not given with their defaults."""
    listed = target._schema.arguments
    given = dict(zip((each.name for each in listed), args, strict=False))
    rest = {each.name: each.default_value for each in listed[len(args) :]}
    return {**rest, **given, **kwargs}


@cache
def _rule(target: OpOverload) -> Callable[[_Arguments], WorkFacts] | None:
    name = target._schema.name.partition("::")[2]
    if "scaled_dot_product" in name and "attention" in name:
        work = Work.ATTENTION_BACKWARD if name.endswith("_backward") else Work.ATTENTION
        return lambda call: WorkFacts(work, _attention(call))
    return _RULES.get(name) or _RULES.get(f"{name}.{target._schema.overload_name}")


def _attention(call: _Arguments) -> Extents:
    """Extents for query [..., heads, queries, width] and key [..., heads, keys, width]."""
    query, key = call["query"].shape, call["key"].shape
    is_causal = bool(call.get("is_causal")) and query[-2] == key[-2]
    *before, queries, width = query
    return (float(math.prod(before)), float(queries), float(key[-2]), float(width), 0.5 if is_causal else 1.0)


def _product(left: str, right: str) -> Callable[[_Arguments], WorkFacts]:
    """Facts of a product of arguments [..., rows, depth] and [..., depth, columns], by their names."""

    def facts(call: _Arguments) -> WorkFacts:
        one, other = call[left].shape, call[right].shape
        *before, rows, depth = one
        return _facts(math.prod(before), rows, other[-1], depth)

    return facts


def _facts(batch: int, rows: int, columns: int, depth: int, filters: int = 0) -> WorkFacts:
    return WorkFacts(Work.PRODUCT, (float(batch), float(rows), float(columns), float(depth), float(filters)))


def _convolution(call: _Arguments) -> WorkFacts:
    x = call["input"] if "input" in call else call["self"]
    places = x if call.get("transposed") else call[_OUTPUT]
    return _unfolded(call, places.shape)


def _unfolded(call: _Arguments, places: Sequence[int]) -> WorkFacts:
    """A convolution as a product: a row for each place of each sample, which are given as [N, channels, ...]."""
    weight, groups = call["weight"].shape, int(call.get("groups") or 1)
    filters, rows = math.prod(weight[2:]), places[0] * math.prod(places[2:])
    if call.get("transposed"):  # whose filters are in the columns
        return _facts(groups, rows, weight[1] * filters, weight[0] // groups)
    return _facts(groups, rows, weight[0] // groups, weight[1] * filters, filters if groups == 1 else 0)


def _convolution_backward(call: _Arguments) -> WorkFacts:
    """One gradient alone is a product of its own; both have the sizes of the forward product."""
    is_transposed, (of_input, of_weight) = bool(call["transposed"]), call["output_mask"][:2]
    forward = _unfolded(call, call["input" if is_transposed else "grad_output"].shape)
    if of_input and of_weight:
        return forward
    batch, rows, columns, depth, places = forward.extents
    if of_weight:  # whose rows are the channels of the output, or of the input where it is transposed
        sizes = (depth, columns) if is_transposed else (columns, depth)
        return WorkFacts(Work.WEIGHT_GRADIENT, (batch, *sizes, rows, places))
    if not of_input:
        return NO_FACTS
    filters = math.prod(call["weight"].shape[2:])
    if is_transposed:
        return WorkFacts(Work.PRODUCT, (batch, rows, depth, columns, 0.0))
    return WorkFacts(Work.PRODUCT, (batch, rows, depth / filters, columns * filters, places))


def _grouped(call: _Arguments) -> WorkFacts:
    """Rows in groups times one matrix each, or groups of columns times as many groups of rows."""
    one, other = ((call[key] if key in call else call[name]).shape for key, name in _GROUPED)
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


def _grouped_backward(call: _Arguments) -> WorkFacts:
    """Both gradients: the sizes of the forward product."""
    (rows, columns), (groups, depth, _) = call["grad_output"].shape, call["weight"].shape
    return WorkFacts(Work.GROUPED, (float(groups), rows / groups, float(columns), float(depth), 0.0))


def _rows(shape: Sequence[int], columns: int) -> WorkFacts:
    """Facts of a call that passes over a tensor by rows of so many columns."""
    rows = math.prod(shape) / max(columns, 1)
    return WorkFacts(Work.OTHER, (0.0, rows, float(columns), 0.0, 0.0)) if rows and columns else NO_FACTS


def _softmax(argument: str) -> Callable[[_Arguments], WorkFacts]:
    """Facts of a softmax along the last dimension, or of its backward pass; others have kernels of their own."""

    def facts(call: _Arguments) -> WorkFacts:
        shape = call[argument].shape
        return _rows(shape, shape[-1]) if shape and call["dim"] in (-1, len(shape) - 1) else NO_FACTS

    return facts


def _layer_norm(call: _Arguments) -> WorkFacts:
    return _rows(call["input"].shape, math.prod(call["normalized_shape"]))


def _batch_norm(call: _Arguments) -> WorkFacts:
    """A column for each channel, with statistics of the batch; without, each number is by itself."""
    return _rows(call["input"].shape, call["input"].shape[1]) if call.get("training", call.get("train")) else NO_FACTS


def _sum(call: _Arguments) -> WorkFacts:
    """A sum over the first dimensions, whose columns are what it leaves."""
    shape = call["self"].shape
    summed = sorted(dim % len(shape) for dim in call["dim"] or ()) if shape else []
    is_first = 0 < len(summed) < len(shape) and summed == list(range(len(summed)))
    return _rows(shape, math.prod(shape[len(summed) :])) if is_first else NO_FACTS


def _last(call: _Arguments) -> WorkFacts:
    """Rows along the last dimension: of scores by class, of pictures."""
    shape = call["self"].shape
    return _rows(shape, shape[-1]) if shape else NO_FACTS


_GROUPED = (("self", "input"), ("mat2", "weight"))  # names of the factors, in torch and elsewhere
_RULES: dict[str, Callable[[_Arguments], WorkFacts]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), _product("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _product("mat1", "mat2")),
    "baddbmm": _product("batch1", "batch2"),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("convolution_overrideable", "_slow_conv2d_forward"), _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), _grouped),
    "grouped_mm_fallback_backward": _grouped_backward,
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax("self")),
    **dict.fromkeys(("softmax.int", "log_softmax.int"), _softmax("self")),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax("output")),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "native_layer_norm_backward"), _layer_norm),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm", "_fused_rms_norm_backward"), _layer_norm),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    "sum.dim_IntList": _sum,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _last),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _last),
}
