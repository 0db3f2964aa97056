"""Another optimizer's update of the same step."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from graphs.capture import capture
from graphs.errors import GraphError, UnknownNameError
from graphs.recipes import OPTIMIZERS
from graphs.transforms.optimizers import with_optimizer


@cache
def tied(train: bool = True, optimizer: str = "adam", dtype: torch.dtype = torch.float32) -> object:
    """A step with a frozen, a tied and a normed parameter."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 50, bias=False))
    model[3].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return capture(model.to(dtype), (torch.randint(0, 50, (4, 6)),), train=train, optimizer=optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", OPTIMIZERS)
@pytest.mark.parametrize("after", OPTIMIZERS)
def test_it_is_the_graph_that_capture_makes(before: str, after: str, dtype: torch.dtype) -> None:
    expected = tied(optimizer=after, dtype=dtype)
    assert with_optimizer(tied(optimizer=before, dtype=dtype), after) == expected


def test_what_has_no_update_is_refused() -> None:
    with pytest.raises(GraphError, match="capture a training step"):
        with_optimizer(tied(train=False), "sgd")
    with pytest.raises(UnknownNameError, match="lion"):
        with_optimizer(tied(), "lion")
