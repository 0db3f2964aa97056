"""Facts that capture writes down of products and attention: what they are, and their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphs import OpGraph, Work
from graphs.capture import capture
from graphs.zoo import build

BOTH = ("aten.convolution_backward",)  # kinds of ops that make the gradients of both factors


class Called(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args, *self.weights)


def facts(graph: OpGraph, phase: int = 0) -> list[tuple[Work, list[float]]]:
    """Work and extents of the ops of a phase that have any, in order."""
    ops = np.flatnonzero((graph.work > 0) & (graph.phase == phase)).tolist()
    return [(Work(graph.work[op]), graph.extents[op].tolist()) for op in ops]


def flops_by_extents(graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Of every product FLOPs, and those of its extents."""
    ops = np.isin(graph.work, (Work.PRODUCT, Work.WEIGHT_GRADIENT, Work.GROUPED))
    factor = np.where(np.isin(graph.kinds, BOTH) & (graph.work == Work.PRODUCT), 4, 2)
    return graph.flops[ops], (factor * graph.extents[:, :4].prod(axis=1))[ops]


T = torch.zeros
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], Work, tuple[float, ...]]] = {
    "mm": (torch.mm, (T(3, 4), T(4, 5)), Work.PRODUCT, (1, 3, 5, 4, 0)),
    "linear of tokens": (F.linear, (T(2, 3, 4), T(5, 4)), Work.PRODUCT, (1, 6, 5, 4, 0)),
    "bmm": (torch.bmm, (T(7, 3, 4), T(7, 4, 5)), Work.PRODUCT, (7, 3, 5, 4, 0)),
    "baddbmm": (torch.baddbmm, (T(5), T(7, 3, 4), T(7, 4, 5)), Work.PRODUCT, (7, 3, 5, 4, 0)),
    "matmul of heads": (torch.matmul, (T(2, 7, 3, 4), T(2, 7, 4, 5)), Work.PRODUCT, (14, 3, 5, 4, 0)),
    "einsum": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        (T(7, 3, 4), T(7, 4, 5)),
        Work.PRODUCT,
        (7, 3, 5, 4, 0),
    ),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (T(2, 3, 9, 9), T(8, 3, 3, 3)), Work.PRODUCT, (1, 32, 8, 27, 9)),
    "conv1d in groups": (
        lambda x, w: F.conv1d(x, w, groups=4, padding=1),
        (T(2, 8, 10), T(16, 2, 3)),
        Work.PRODUCT,
        (4, 20, 4, 6, 0),
    ),
    "transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (T(2, 3, 5, 5), T(3, 8, 2, 2)),
        Work.PRODUCT,
        (1, 50, 32, 3, 0),
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (T(2, 4, 6, 8),) * 3,
        Work.ATTENTION,
        (8, 6, 6, 8, 0.5),
    ),
    "cross attention": (
        F.scaled_dot_product_attention,
        (T(2, 4, 6, 8), T(2, 4, 9, 8), T(2, 4, 9, 8)),
        Work.ATTENTION,
        (8, 6, 9, 8, 1),
    ),
    "grouped queries": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (T(2, 4, 6, 8), T(2, 2, 6, 8), T(2, 2, 6, 8)),
        Work.ATTENTION,
        (8, 6, 6, 8, 1),
    ),
    "grouped product": (
        lambda x, w: torch._grouped_mm(x, w, torch.tensor([16, 32, 48, 64], dtype=torch.int32)),
        (T(64, 32, dtype=torch.bfloat16), T(4, 32, 48, dtype=torch.bfloat16)),
        Work.GROUPED,
        (4, 16, 48, 32, 0),
    ),
    "grouped product over the rows": (
        lambda x, g: torch._grouped_mm(x.t(), g, torch.tensor([16, 32, 48, 64], dtype=torch.int32)),
        (T(64, 32, dtype=torch.bfloat16), T(64, 48, dtype=torch.bfloat16)),
        Work.GROUPED,
        (4, 32, 48, 16, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_of_one_call(name: str) -> None:
    function, args, work, extents = CASES[name]
    graph = capture(Called(function), args)
    assert facts(graph) == [(work, list(extents))]
    assert np.equal(*flops_by_extents(graph)).all()


def test_a_call_of_several_products_has_no_sizes() -> None:
    graph = capture(nn.LSTM(4, 4), (T(3, 2, 4),))
    assert facts(graph) == []


def test_a_weights_gradient_is_a_product_over_the_tokens() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)), (T(5, 3, 4),), train=True)
    assert facts(graph) == [(Work.PRODUCT, [1, 15, 8, 4, 0]), (Work.PRODUCT, [1, 15, 2, 8, 0])]
    found = facts(graph, phase=1)
    assert (Work.PRODUCT, [1, 15, 8, 2, 0]) in found
    assert [extents for work, extents in found if work == Work.WEIGHT_GRADIENT] == [[1, 2, 8, 15, 0], [1, 8, 4, 15, 0]]


def test_a_weights_gradient_is_known_through_sums_and_conversions() -> None:
    tied = Called(lambda x, w: F.linear(F.linear(x, w).relu(), w), T(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(tied, (T(3, 4),), train=True)
    assert Counter(work for work, _ in facts(graph, phase=1)) == {Work.WEIGHT_GRADIENT: 2, Work.PRODUCT: 1}


def test_the_backward_pass_of_a_convolution_says_which_gradients_it_makes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    graph = capture(model, (T(2, 3, 5, 5),), train=True)
    assert facts(graph, phase=1) == [
        (Work.PRODUCT, [1, 50, 4, 8, 1]),  # both: the sizes of the forward product
        (Work.WEIGHT_GRADIENT, [1, 8, 27, 50, 9]),
    ]
    model[1].weight.requires_grad_(False)
    of_input = facts(capture(model, (T(2, 3, 5, 5),), train=True), phase=1)[0]
    assert of_input == (Work.PRODUCT, [1, 50, 8, 4, 1])


def test_attention_in_training() -> None:
    model = Called(lambda x, w: F.scaled_dot_product_attention(x * w, x, x, is_causal=True), T(8))
    graph = capture(model, (T(2, 4, 6, 8),), train=True)
    assert facts(graph) == [(Work.ATTENTION, [8, 6, 6, 8, 0.5])]
    assert facts(graph, phase=1) == [(Work.ATTENTION_BACKWARD, [8, 6, 6, 8, 0.5])]


def test_a_module_has_the_facts_of_its_only_product() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = capture(model, (T(3, 4),), train=True, granularity="module")
    assert facts(graph) == [(Work.PRODUCT, [1, 3, 8, 4, 0]), (Work.PRODUCT, [1, 3, 2, 8, 0])]
    assert facts(graph, phase=1) == [(Work.PRODUCT, [1, 3, 2, 8, 0]), (Work.WEIGHT_GRADIENT, [1, 8, 4, 3, 0])]


@pytest.mark.parametrize("name", ["alexnet", "unet", "rnnlm", "gpt2", "llama3_8b", "mixtral_8x7b", "two_tower"])
def test_products_of_the_zoo_have_the_flops_of_their_sizes(name: str) -> None:
    model = build(name, small=True)
    graph = capture(model.model, model.args, train=True)
    assert np.equal(*flops_by_extents(graph)).all()
    assert not graph.flops[graph.work == Work.OTHER].any()
    assert not graph.extents[graph.work == Work.OTHER][:, [0, 3, 4]].any()


def _batch_normalised(x: torch.Tensor) -> torch.Tensor:
    return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]


ROWS: dict[str, tuple[Callable[..., Any], torch.Tensor, tuple[float, float]]] = {
    "softmax of the last dimension": (lambda x: torch.softmax(x, -1), T(2, 3, 4), (6, 4)),
    "softmax of another": (lambda x: torch.softmax(x, 1), T(2, 3, 4), (0, 0)),
    "log_softmax": (lambda x: F.log_softmax(x, 2), T(2, 3, 4), (6, 4)),
    "layer norm": (lambda x: F.layer_norm(x, (3, 4)), T(2, 3, 4), (2, 12)),
    "batch norm": (_batch_normalised, T(2, 3, 4, 4), (32, 3)),
    "sum over the first dimensions": (lambda x: x.sum((0, 1)), T(2, 3, 4), (6, 4)),
    "sum over the last": (lambda x: x.sum(-1), T(2, 3, 4), (0, 0)),
    "sum over all": (torch.sum, T(2, 3, 4), (0, 0)),
}


@pytest.mark.parametrize("name", ROWS)
def test_ops_that_pass_over_rows_have_them_and_their_columns(name: str) -> None:
    function, x, (rows, columns) = ROWS[name]
    graph = capture(Called(lambda x, w: function(x * w), torch.ones(())), (x,))
    known = graph.extents[graph.extents.any(axis=1)].tolist()
    assert known == ([[0, rows, columns, 0, 0]] if columns else [])
    assert not graph.work.any()
