"""A step whose updates are offloaded: gradients and parameters are those of the model as it is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import placement
from graphs.capture.record import default_loss
from tests.helpers.placed_models import with_host


@pytest.mark.parametrize("strategy", ["offload=optimizer", "mb2 | recompute=kind:*tanh* | offload=optimizer"])
def test_training_is_that_of_the_model(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16) if "mb" not in strategy else nn.Tanh())
    batch = (torch.randn(6, 8),)
    plain = copy.deepcopy(model)
    graph = placement.capture(model, batch, train=True, optimizer="adam")
    found = placement.optimize(graph, with_host(1), strategy=strategy, seed=0)
    found.save(tmp_path / "found.json")
    assert placement.verify(tmp_path / "found.json", graph=graph).made_again
    placed = placement.apply(model, tmp_path / "found.json", batch)
    mine, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (placed, plain))
    for _ in range(3):
        loss = placed.step(*batch)
        expected = default_loss(plain(*batch))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(dict(placed.state_dict()), dict(plain.state_dict()))
