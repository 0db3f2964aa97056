"""Rules for attention in one call, forward and backward: samples, heads, and the queries of a sequence.

A stretch of the queries, with all keys and values, gives that stretch of the result; its gradients of keys and values
are summands. Causal attention is no exception: a stretch of queries needs the keys up to its own end.
"""

from __future__ import annotations

import math
from typing import Any

from graphs.ops.letters import Call, Cut, Letter, Slot
from graphs.ops.table import Arguments, WorkFacts, attention_extents, flops_of, split_of, work_of
from graphs.records import Work

_FORWARD = (
    *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps"),
)
_BACKWARD = (
    *("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward"),
    *("_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward"),
    *("_scaled_dot_product_fused_attention_overrideable_backward",),
)
# Calls whose blocks of keys can be put together by their log-sum-exps (`placement.runtime.calls`).
_CAUSAL = (
    *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
)


@split_of(*_FORWARD, *_BACKWARD)
def _attention(call: Call) -> list[Letter]:
    """Samples, heads and the queries of a sequence."""
    query, key = call["query"], call["key"]
    if query.ndim != 4:
        return []
    batch, heads = query.shape[:2]
    groups = math.gcd(heads, key.shape[1])
    by_batch, by_head = [], []
    for slot in (*call.inputs, *(out for out in call.outputs if out is not None)):
        if slot.ndim in (3, 4) and slot.shape[0] == batch:
            by_batch.append(Cut(slot.number, (0,)))
        if slot.ndim in (3, 4) and slot.shape[1] in (heads, key.shape[1]):
            by_head.append(Cut(slot.number, (1,), slot.shape[1] // groups))
    letters = [Letter(batch, tuple(by_batch)), Letter(groups, tuple(by_head), word="heads")]
    sequence = _sequence(call, query, key)
    return letters if sequence is None else [*letters, sequence]


def _sequence(call: Call, query: Slot, key: Slot) -> Letter | None:
    """Stretches of the queries, where nothing else depends on their places."""
    length, mask = query.shape[2], call["attn_mask"] or call["attn_bias"]
    is_backward = call.name.endswith("backward")
    has_mask = isinstance(mask, Slot) and mask.ndim > 1
    if call["is_causal"]:
        is_known = call.name.removesuffix("_backward") in _CAUSAL and not isinstance(mask, Slot)
        if not is_known or call["dropout_p"] or key.shape[2] != length:
            return None
    if is_backward and (call["dropout_p"] or (has_mask and call.outputs[3:] and call.outputs[3] is not None)):
        return None
    results = [out for out in call.outputs if out is not None and out.ndim > 2 and 0 not in out.shape]
    summands: list[Slot] = []
    given = [query]
    if is_backward:
        summands = [out for out in call.outputs[1:3] if out is not None]
        results = [out for out in call.outputs[:1] if out is not None]
        given += [call["grad_out"] or call["grad_out_"], call["out"], call["logsumexp"]]
    if any(slot.shape[2] != length for slot in (*given, *results)):
        return None  # log-sum-exps with padding
    cuts = [Cut(slot.number, (2,)) for slot in (*given, *results)]
    if has_mask and mask.shape[-2] == length:
        cuts.append(Cut(mask.number, (mask.ndim - 2,)))
    partial = tuple(slot.number for slot in summands)
    return Letter(length, tuple(cuts), partial, "sequence", is_wide=True)


@work_of(*_FORWARD, "_scaled_dot_product_attention_math")
def _forward_work(call: Arguments) -> WorkFacts:
    return WorkFacts(Work.ATTENTION, attention_extents(call))


@work_of(*_BACKWARD)
def _backward_work(call: Arguments) -> WorkFacts:
    return WorkFacts(Work.ATTENTION_BACKWARD, attention_extents(call))


# torch has formulas for every fused attention but the one it uses on the CPU.
@flops_of("_scaled_dot_product_flash_attention_for_cpu")
def _forward_flops(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(2 * _pairs(query, key) * (query.shape[-1] + value.shape[-1]))


@flops_of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    # The scores once more and the gradients of query and key, then those of the value and of the scores.
    return int(2 * _pairs(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _pairs(query: Any, key: Any) -> int:
    """Scores of attention. A head of keys may serve several of the queries, which torch before 2.12 does not count."""
    return int(math.prod(query.shape[:-1]) * key.shape[-2])
