"""Losses that add their samples up are no means of the parts' losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from placement.exporters.exporting import export
from placement.optimization import optimize

CLUSTER = Cluster.preset("8xA100-nvswitch")


class Fit(nn.Module):
    def __init__(self, reduction: str, divided: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.reduction, self.divided = reduction, divided

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.body(x), y, reduction=self.reduction)
        return loss / len(x) if self.divided else loss


def step(reduction: str, divided: bool = False) -> OpGraph:
    return capture(Fit(reduction, divided), (torch.randn(8, 8), torch.randn(8, 4)), train=True)


@pytest.mark.parametrize("strategy", ["dp2", "mb2"])
def test_a_sum_is_refused_and_what_is_divided_is_not(strategy: str) -> None:
    # One after the other: they differ in nothing but the reduction.
    with pytest.raises(MismatchError, match=r"the loss is a sum over samples \(op mse_loss\)"):
        export(optimize(step("sum"), CLUSTER, strategy=strategy), "torch")
    for graph in (step("mean"), step("sum", divided=True)):
        assert "def " in export(optimize(graph, CLUSTER, strategy=strategy), "torch")


def test_a_graph_knows_the_loss_that_adds_up() -> None:
    assert step("sum").origin.summed_loss == "aten.mse_loss"
    assert step("mean").origin.summed_loss is None
    assert step("sum") != step("mean")
