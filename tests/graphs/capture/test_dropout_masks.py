"""Masks of dropout are those of GPUs: a byte for each number, drawn beside what is dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.capture import capture
from graphs.transforms.splitting.masks import of_integer_inputs

ROWS, WIDTH = 4, 8


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_mask_has_a_byte_for_each_number(dtype: torch.dtype, size: int) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)).to(dtype)
    graph = capture(net, (torch.zeros(ROWS, WIDTH, dtype=dtype),), train=True)
    numbers = ROWS * WIDTH
    moved: dict[str, list[float]] = {}
    for i, kind in enumerate(graph.kinds):
        if kind in ("aten.bernoulli_", "aten.div_"):
            assert graph.dtypes[i] == "bool"
            assert graph.tensor_bytes[graph.output_ptr[i]] == numbers
        if kind in ("aten.bernoulli_", "aten.div_", "aten.mul"):
            moved.setdefault(kind, []).append(float(graph.bytes_moved[i]))
    # Drawn and written beside the product; the backward pass reads it again.
    assert moved["aten.bernoulli_"] == [0.0]
    assert moved["aten.div_"] == [numbers]
    assert moved["aten.mul"] == [2 * size * numbers, (2 * size + 1) * numbers]


class OwnMask(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.empty_like(x).bernoulli_(0.9).div_(0.9)
        return functional.relu(x * drawn), drawn


def test_a_mask_that_others_read_too_stays_as_it_is() -> None:
    graph = capture(OwnMask(), (torch.zeros(ROWS, WIDTH),))
    (drawn,) = (i for i, kind in enumerate(graph.kinds) if kind == "aten.bernoulli_")
    assert graph.dtypes[drawn] == "float32"


def test_masks_are_no_integers_of_the_arguments_that_all_parts_may_have() -> None:
    graph = capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)), (torch.zeros(ROWS, WIDTH),), train=True)
    assert not of_integer_inputs(graph).any()
