"""Attention on stretches of the queries: put together, results and gradients are those of the whole call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from parallel.local_calls import node_of, run
from parallel.row_numbers import RecordedCall
from torch import fx

from graphs.capture.trace import Layout, row_major
from placement.runtime.calls.attention_calls import CausalStretch, CausalStretchBackward
from placement.runtime.calls.local_calls import local_call
from placement.runtime.parts.layouts import PartCut, PartLayout, take, whole

aten = torch.ops.aten
Tensor = torch.Tensor
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LENGTH, ENDS = 9, (0, 1, 5, 9)  # stretches of 1, 4 and 4 words


def _drawn(key_heads: int) -> list[Tensor]:
    """Queries, keys, values and a gradient: four heads of queries."""
    torch.manual_seed(0)
    shapes = [(2, heads, LENGTH, 3) for heads in (4, key_heads, key_heads, 4)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def _node(target: Any, tensors: list[Tensor], made: Any, *rest: Any) -> fx.Node:
    layouts = tuple(Layout(tuple(one.shape), row_major(tuple(one.shape)), one.dtype) for one in tensors)
    outputs = tuple(Layout(tuple(one.shape), row_major(tuple(one.shape)), one.dtype) for one in made)
    return node_of(RecordedCall(target, (*layouts, *rest), (), outputs, ()))


def _stretch(tensor: Tensor, low: int, high: int) -> PartLayout:
    return PartLayout(tuple(tensor.shape), (PartCut(2, 1, LENGTH, low, high),))


def _on_stretches(node: fx.Node, tensors: list[Tensor], cut: set[int], made: list[Tensor], summed: set[int]) -> None:
    """Run a call on each stretch, and compare.

    Args:
        cut: numbers of the arguments that are cut, of which the last stretch's queries are here in full.
        summed: numbers of the results that are sums.
    """
    nodes, sums = node.all_input_nodes, {number: torch.zeros_like(made[number]) for number in summed}
    for low, high in pairwise(ENDS):
        parts = [_stretch(one, low, high) if i in cut else whole(one.shape) for i, one in enumerate(tensors)]
        outputs = [whole(one.shape) if i in summed else _stretch(one, low, high) for i, one in enumerate(made)]
        local = local_call(node, dict(zip(nodes, parts, strict=True)), outputs)
        given = dict(zip(nodes, (take(one, part) for one, part in zip(tensors, parts, strict=True)), strict=True))
        for number, one in enumerate(run(local, given)[: len(made)]):
            if number in summed:
                sums[number] += one
            else:
                torch.testing.assert_close(one, take(made[number], outputs[number]))
    for number, total in sums.items():
        torch.testing.assert_close(total, made[number])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_fused", [True, False])
def test_stretches_of_queries(is_causal: bool, key_heads: int, is_fused: bool) -> None:
    """Queries are in full where they are slices of the same tensor as keys and values."""
    query, key, value, gradient = _drawn(key_heads)
    settings = 0.0, is_causal
    made = list(FORWARD(query, key, value, *settings))
    node = _node(FORWARD, [query, key, value], made, *settings)
    _on_stretches(node, [query, key, value], set() if is_fused else {0}, made, set())
    tensors = [gradient, query, key, value, *made]
    gradients = list(BACKWARD(*tensors, *settings))
    node = _node(BACKWARD, tensors, gradients, *settings)
    _on_stretches(node, tensors, {0, 4, 5} if is_fused else {0, 1, 4, 5}, gradients, {1, 2})


@pytest.mark.parametrize("key_heads", [4, 2])
def test_without_log_sum_exps(key_heads: int) -> None:
    """The operator that inference has."""
    target = aten.scaled_dot_product_attention.default
    query, key, value, _ = _drawn(key_heads)
    settings = {"enable_gqa": True} if key_heads == 2 else {}
    made = target(query, key, value, None, 0.0, True, **settings)
    node = _node(target, [query, key, value], [made], None, 0.0, True)
    node.kwargs = settings
    node.meta["info"] = node.meta["info"][0] if isinstance(node.meta["info"], tuple) else node.meta["info"]
    _on_stretches(node, [query, key, value], {0}, [made], set())


def test_lengths_among_the_arguments_and_log_sum_exps_in_four_dimensions() -> None:
    """Kernels of GPUs are told lengths, or give log-sum-exps as ``[B, H, L, 1]``; here the CPU's stands in for them."""

    def forward(query: Tensor, key: Tensor, value: Tensor, compute_log_sumexp: bool, is_causal: bool) -> Any:
        assert compute_log_sumexp
        result, scores = FORWARD(query, key, value, 0.0, is_causal)
        return result, scores[..., None], None

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scores: Tensor,
        max_q: int, max_k: int, is_causal: bool,
    ) -> Any:  # fmt: skip
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        return BACKWARD(grad, query, key, value, out, scores[..., 0], 0.0, is_causal)

    query, key, value, gradient = _drawn(2)
    made = FORWARD(query, key, value, 0.0, True)
    expected = BACKWARD(gradient, query, key, value, *made, 0.0, True)
    names = "query", "key", "value", "compute_log_sumexp", "is_causal"
    of_backward = "grad", "query", "key", "value", "out", "scores", "max_q", "max_k", "is_causal"
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for low, high in pairwise(ENDS):
        mine = query[:, :, low:high]
        result, scores, _ = CausalStretch(forward, names, low, high)(mine, key, value, False, True)
        torch.testing.assert_close((result, scores[..., 0]), tuple(one[:, :, low:high] for one in made))
        call = CausalStretchBackward(backward, of_backward, low, high)
        found = call(gradient[:, :, low:high], mine, key, value, result, scores, LENGTH, LENGTH, True)
        torch.testing.assert_close(found[0], expected[0][:, :, low:high])
        for total, one in zip(sums, found[1:], strict=True):
            total += one
    torch.testing.assert_close(tuple(sums), expected[1:])


@pytest.mark.parametrize("is_causal", [True, False])
def test_stretches_of_both_halves(is_causal: bool) -> None:
    """A balanced part has a stretch of each half; its results lie side by side, sums are those of both."""
    query, key, value, gradient = (one[:, :, :8].contiguous() for one in _drawn(2))
    made = list(FORWARD(query, key, value, 0.0, is_causal))
    forward = _node(FORWARD, [query, key, value], made, 0.0, is_causal)
    expected = BACKWARD(gradient, query, key, value, *made, 0.0, is_causal)
    given = [gradient, query, key, value, *made]
    backward = _node(BACKWARD, given, expected, 0.0, is_causal)
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for low, high in ((0, 2), (2, 4)):

        def part(tensor: Tensor, number: int, low: int = low, high: int = high) -> PartLayout:
            cut = PartCut(2, 1, 8, low, high, is_mirrored=True)
            return PartLayout(tuple(tensor.shape), () if number in (2, 3) else (cut,))

        parts = [part(one, number) for number, one in enumerate(given)]
        taken = [take(one, where) for one, where in zip(given, parts, strict=True)]
        outputs = [part(one, 0) for one in made]
        local = local_call(forward, dict(zip(forward.all_input_nodes, parts[1:4], strict=True)), outputs)
        found = run(local, dict(zip(forward.all_input_nodes, taken[1:4], strict=True)))
        torch.testing.assert_close(
            list(found[:2]), [take(one, where) for one, where in zip(made, outputs, strict=True)]
        )
        outputs = [parts[0], whole(key.shape), whole(value.shape)]
        local = local_call(backward, dict(zip(backward.all_input_nodes, parts, strict=True)), outputs)
        of_query, *summands = run(local, dict(zip(backward.all_input_nodes, taken, strict=True)))
        torch.testing.assert_close(of_query, take(expected[0], parts[0]))
        for total, one in zip(sums, summands, strict=True):
            total += one
    torch.testing.assert_close(sums, list(expected[1:3]))
