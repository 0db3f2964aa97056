"""Losses that a user gives, of models that return a tensor, a dictionary or a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parallel.sharded_models import check, check_inference
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput


@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class Answering(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.form = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), form

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.body(x)
        return self.form(loss=logits.square().mean(), logits=logits)


def logits_of(outputs: Any) -> torch.Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs.logits


@pytest.mark.parametrize("form", [dict, Answer, SequenceClassifierOutput])
@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2 1f1b mb2"])
def test_own_losses_and_the_model_s(form: Callable[..., Any], strategy: str) -> None:
    args = (torch.randn(8, 8),)
    check(Answering(form), args, strategy)
    check(Answering(form), args, strategy, loss=lambda outputs: -logits_of(outputs).sigmoid().log().mean())
    check_inference(Answering(form), args, strategy.replace("1f1b", "gpipe"))


class Regression(nn.Module):
    """Its loss broadcasts two tensors together, of which each has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x), labels)


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2 gpipe mb2"])
def test_a_squared_error_inside_the_model(strategy: str) -> None:
    args = torch.randn(8, 8), torch.randn(8, 4)
    check(Regression(), args, strategy)
    check_inference(Regression(), args, strategy)
