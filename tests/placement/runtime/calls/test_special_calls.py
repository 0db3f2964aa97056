"""Calls for which a plain operator on parts does not do: labels that do not count, running statistics, windows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.local_calls import differing, node_of, run
from parallel.row_numbers import RecordedCall
from torch import fx

from graphs.capture.rows.assembly import letters_of
from graphs.capture.trace import Layout, TensorInfo, flat, row_major
from graphs.errors import StrategyError
from placement.runtime.calls.local_calls import Extras, local_call
from placement.runtime.calls.norm_calls import bn_backward, bn_backward_sums, bn_forward, bn_sums
from placement.runtime.parts.layouts import PartCut, PartLayout, whole

aten = torch.ops.aten


def recorded_call(target: Any, *args: Any) -> RecordedCall:
    """A call on given tensors, with its letters."""
    result = target(*(value.clone() if isinstance(value, torch.Tensor) else value for value in args))
    described = tuple(_layout(value) for value in args)
    outputs = tuple(_layout(value) if isinstance(value, torch.Tensor) else None for value in flat(result))
    return RecordedCall(target, described, (), outputs, letters_of(target, described, (), outputs)[1])


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Layout(tuple(value.shape), row_major(tuple(value.shape)), value.dtype)
    return tuple(map(_layout, value)) if isinstance(value, list) else value


def problems(target: Any, *args: Any, words: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """How many letters of a call were checked in parts, and what differs."""
    call = recorded_call(target, *args)
    node, tensors = node_of(call), [value for value in flat(args) if isinstance(value, torch.Tensor)]
    letters = [one for one in call.letters if one.cuts and (not words or one.word in words)]
    found = [
        differing(node, tensors, letter, n_parts)
        for letter in letters
        for n_parts in (2, 3)
        if letter.size >= max(n_parts, 4)
    ]
    return len(found), [one for one in found if one is not None]


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_that_do_not_count(reduction: int, weighted: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 5, dtype=torch.float64).log_softmax(1)
    target = torch.tensor([1, 4, 2, 2, 0, 2])  # the last part has hardly any label that counts
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    settings = weight, reduction, 2
    assert problems(aten.nll_loss_forward.default, scores, target, *settings) == (4, [])  # samples, and classes
    total = aten.nll_loss_forward.default(scores, target, *settings)[1]
    gradient = torch.rand(6 if reduction == 0 else (), dtype=torch.float64)
    assert problems(aten.nll_loss_backward.default, gradient, scores, target, *settings, total)[1] == []
    composite = aten.cross_entropy_loss.default, scores, target, *settings, 0.1
    assert problems(*composite) == (2, [])


def test_a_loss_over_probabilities_and_entrywise_losses() -> None:
    torch.manual_seed(0)
    scores, other = torch.randn(2, 6, 5, dtype=torch.float64)
    batch, classes = _half((6, 5), 0), _half((6, 5), 1)
    node = node_of(recorded_call(aten.cross_entropy_loss.default, scores, other.softmax(1), None, 1, -100, 0.0))
    local_call(node, dict.fromkeys(node.all_input_nodes, batch), [whole(())])
    with pytest.raises(StrategyError, match="takes dimension 1 of its argument 1 together"):
        local_call(node, dict.fromkeys(node.all_input_nodes, classes), [whole(())])
    assert problems(aten.mse_loss.default, scores, other, 1) == (4, [])
    assert problems(aten.smooth_l1_loss.default, scores, other, 1, 1.0) == (4, [])
    assert problems(aten.mse_loss_backward.default, torch.tensor(2.0, dtype=torch.float64), scores, other, 1) == (4, [])


def test_the_gradient_of_a_table_has_no_row_for_padding() -> None:
    gradient = torch.rand(7, 4, dtype=torch.float64)
    indices = torch.tensor([0, 5, 5, 2, 4, 1, 0])
    for padding in (-1, 0, 5):
        assert problems(aten.embedding_dense_backward.default, gradient, indices, 6, padding, False) == (6, [])


@pytest.mark.parametrize("mask_dims", [1, 2, 3])
def test_a_mask_is_cut_as_what_it_is_a_mask_of(mask_dims: int) -> None:
    """A number is put where the mask says so, ``x[mask] = 0.5``, in each part by the part of the mask."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    mask = torch.rand(x.shape[:mask_dims]) < 0.5
    value = torch.tensor(0.5, dtype=torch.float64)
    count, found = problems(aten.index_put.default, x, [mask], value)
    assert found == []
    assert count == 6  # halves and thirds of each dimension


# -- batch norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_with_the_statistics_of_all_parts(offset: float, affine: bool) -> None:
    """Running statistics too, and numbers far from zero in single precision."""
    torch.manual_seed(0)
    x, gradient = torch.randn(7, 4, 3, 3) + offset, torch.randn(7, 4, 3, 3)
    weight, bias = (torch.rand(4), torch.rand(4)) if affine else (None, None)
    expected_state = [torch.rand(4), torch.rand(4)]
    state = [tensor.clone() for tensor in expected_state]
    expected = aten.native_batch_norm.default(x, weight, bias, *expected_state, True, 0.1, 1e-5)
    pieces = x.split([1, 4, 2])
    sums = sum(map(bn_sums, pieces))
    made = [bn_forward(one, weight, bias, *(s.clone() for s in state), 0.1, 1e-5, sums) for one in pieces[1:]]
    made.insert(0, bn_forward(pieces[0], weight, bias, state[0], state[1], 0.1, 1e-5, sums))
    torch.testing.assert_close(torch.cat([one[0] for one in made]), expected[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(made[0][1:], expected[1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)
    mask = [True, affine, affine]
    settings = None, None, *expected[1:], True, 1e-5, mask
    expected = aten.native_batch_norm_backward.default(gradient, x, weight, *settings)
    both = list(zip(gradient.split([1, 4, 2]), pieces, strict=True))
    sums = sum(bn_backward_sums(g, one, weight, *made[0][1:]) for g, one in both)
    parts = [bn_backward(g, one, weight, *made[0][1:], mask, sums) for g, one in both]
    torch.testing.assert_close(torch.cat([one[0] for one in parts]), expected[0], atol=1e-4, rtol=1e-4)
    for i in (1, 2) if affine else ():
        torch.testing.assert_close(sum(one[i] for one in parts), expected[i], atol=1e-3, rtol=1e-3)


# -- windows -----------------------------------------------------------------------------------------------------------

_IMAGE = ("height", "width")


@settings(max_examples=30)
@given(
    kernel=st.sampled_from([1, 2, 3, 5]), stride=st.integers(1, 3), padding=st.integers(0, 2),
    dilation=st.integers(1, 2), groups=st.sampled_from([1, 2]),
)  # fmt: skip
def test_convolution_on_stretches(kernel: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    size = dilation * (kernel - 1) + 1
    if size > 12 + 2 * padding:
        return
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 12, 12, dtype=torch.float64), torch.randn(6, 4 // groups, kernel, kernel).double()
    window = [stride] * 2, [padding] * 2, [dilation] * 2
    assert problems(aten.conv2d.default, x, weight, None, *window, groups, words=_IMAGE)[1] == []
    gradient = torch.randn_like(aten.conv2d.default(x, weight, None, *window, groups))
    rest = False, [0, 0], groups, [True, True, True]
    backward = aten.convolution_backward.default
    assert problems(backward, gradient, x, weight, [6], *window, *rest, words=_IMAGE)[1] == []


def test_convolution_by_a_word_for_its_padding() -> None:
    x, weight = torch.randn(2, 2, 12, 8, dtype=torch.float64), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    for word in ("same", "valid"):
        settings = [1, 1], word, [1, 1], 1
        count, found = problems(aten.conv2d.padding, x, weight, None, *settings, words=("height",))
        assert found == []
        assert count == (2 if word == "same" else 0)
    with pytest.raises(StrategyError, match="unequal sides"):
        problems(aten.conv2d.padding, x, weight, None, [1, 1], "same", [1, 1], 1, words=("width",))


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize(("ceil", "counts"), list(itertools.product([False, True], [False, True])))
def test_pooling_on_stretches(kernel: int, ceil: bool, counts: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    checked = 0
    for stride, padding in itertools.product([1, 2, 3], [0, 1]):
        settings = [kernel] * 2, [stride] * 2, [padding] * 2
        count, found = problems(aten.avg_pool2d.default, x, *settings, ceil, counts, words=_IMAGE)
        assert found == []
        assert problems(aten.max_pool2d.default, x, *settings, [1, 1], ceil, words=_IMAGE)[1] == []
        checked += count
    assert checked > 2


# -- what cannot be done -----------------------------------------------------------------------------------------------


def _half(shape: tuple[int, ...], dim: int) -> PartLayout:
    return PartLayout(shape, (PartCut(dim, 1, shape[dim], 0, shape[dim] // 2),))


def test_calls_that_need_what_is_elsewhere_are_refused() -> None:
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    weight = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    node = node_of(recorded_call(aten.conv2d.default, x, weight, None, [1, 1], [1, 1], [1, 1], 1))
    top = _half((4, 4, 8, 8), 2)
    with pytest.raises(StrategyError, match="lacks entries of its neighbours"):
        local_call(node, dict(zip(node.all_input_nodes, (top, whole(weight.shape)), strict=True)), [top], Extras())
    node = node_of(recorded_call(aten.softmax.int, x, 1))
    part = _half((4, 4, 8, 8), 1)
    with pytest.raises(StrategyError, match=r"^aten.softmax.int cannot run on parts: it takes dimension 1 .* whole\.$"):
        local_call(node, {node.all_input_nodes[0]: part}, [part])
    node = node_of(recorded_call(aten.add.Tensor, x, x.clone()))
    first, second = (PartLayout((4, 4, 8, 8), (PartCut(0, 1, 4, low, low + 2),)) for low in (0, 2))
    with pytest.raises(StrategyError, match="cut at different places"):
        local_call(node, dict(zip(node.all_input_nodes, (first, second), strict=True)), [first])


def test_dropout_inside_of_another_operator_is_refused() -> None:
    x = torch.randn(4, 2, 8, 8)
    attention = aten.scaled_dot_product_attention.default
    for dropout in (0.0, 0.5):
        node = node_of(recorded_call(attention, x, x.clone(), x.clone(), None, dropout))
        half = _half((4, 2, 8, 8), 0)
        inputs = dict.fromkeys(node.all_input_nodes, half)
        if dropout:
            with pytest.raises(StrategyError, match="draws random numbers"):
                local_call(node, inputs, [half])
        else:
            assert local_call(node, inputs, [half]).target is attention


def test_a_call_that_makes_tensors_of_nothing_takes_its_part() -> None:
    node = node_of(recorded_call(aten.arange.default, 6))
    part = PartLayout((6,), (PartCut(0, 1, 3, 1, 2),))
    assert run(local_call(node, {}, [part]), {})[0].tolist() == [1, 4]
    node = node_of(recorded_call(aten.ones.default, [6, 2]))
    local = local_call(node, {}, [_half((6, 2), 0)])
    assert local.target is aten.ones.default
    assert run(local, {})[0].shape == (3, 2)


def test_an_argument_that_is_whole_is_read_in_part() -> None:
    """A mask made by ``expand`` lies nowhere in memory: its part is all of it."""
    x, mask = torch.randn(4, 3), torch.randn(4, 3)
    node = node_of(recorded_call(aten.mul.Tensor, x, mask))
    part = _half((4, 3), 0)
    a, b = node.all_input_nodes
    local = local_call(node, {a: part, b: whole((4, 3))}, [part])
    assert torch.equal(run(local, {a: x[:2], b: mask})[0], x[:2] * mask[:2])


def test_each_part_finds_its_tokens_in_its_own_list() -> None:
    """``inverse[order] = arange(n)`` of an order that each part has of its own tokens."""
    order = torch.tensor([2, 0, 1])
    graph = fx.Graph()
    inverse, whole_order = graph.placeholder("inverse"), graph.placeholder("order")
    places = graph.call_function(aten.arange.default, (6,))
    node = graph.call_function(aten.index_put.default, (inverse, [whole_order], places))
    for one in graph.nodes:
        one.meta["info"] = TensorInfo(Layout((6,), (1,), torch.int64), 0, 0)
    second = PartLayout((6,), (PartCut(0, 1, 6, 3, 6),))
    local = local_call(node, dict.fromkeys((inverse, whole_order, places), second), [second])
    tensors = {inverse: torch.zeros(3, dtype=torch.long), whole_order: order, places: torch.tensor([3, 4, 5])}
    assert run(local, tensors)[0].tolist() == order.argsort().tolist()
