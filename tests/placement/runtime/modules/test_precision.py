"""Steps in a precision: what ranks compute is what torch computes with the same formats."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parallel.sharded_models import run_in_threads
from parallel.transformer import Transformer, batch
from torch import Tensor, nn
from torch.func import functional_call

import placement
from graphs.capture import capture, capture_program
from graphs.recipes import PRECISIONS
from placement.runtime.states.formats import convert
from tests.helpers.placed_models import cpus

HALF = torch.bfloat16


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def reference(model: nn.Module, precision: str) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss and gradients as torch has them: of float32 weights that are cast for each use, or of bfloat16 ones."""
    weights = dict(model.named_parameters())
    if precision == "master":
        half = copy.deepcopy(model).to(HALF)
        loss = half(*batch())
        return loss, dict(zip(weights, torch.autograd.grad(loss, list(half.parameters())), strict=True))
    loss = functional_call(model, {name: weight.to(HALF) for name, weight in weights.items()}, batch())
    return loss, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


STRATEGIES = ("dp2 zero1", "dp2 zero3", "tp2", "dp2 zero3 | tp2 sp", "dp2 zero3 | mb2", "pp2 1f1b mb2 | dp2 zero3")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dp2 zero3 | recompute=layers.*"])
@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_ranks_compute_what_torch_does(strategy: str, precision: str) -> None:
    model = transformer()
    loss, gradients = reference(model, precision)
    program = capture_program(model, batch(), train=True, precision=precision)
    convert(model, PRECISIONS[precision])
    run = run_in_threads(model, batch(), strategy, program=program)
    torch.testing.assert_close(run.loss, loss.detach(), rtol=1e-2, atol=1e-2)
    for name, expected in gradients.items():
        found = run.gradients[name]
        assert found.dtype == torch.float32
        # Sums of parts round in another order; what is 0 but for rounding (of a key's bias) is not compared by itself.
        assert (found - expected.float()).norm() < 0.02 * expected.float().norm() + 1e-3, name


def placed(model: nn.Module, precision: str | None, **how: Any) -> nn.Module:
    graph = capture(model, batch(), train=True, precision=precision)
    return placement.apply(model, placement.optimize(graph, cpus(1), "single_device", strategy="none"), batch(), **how)


def test_one_device_computes_in_the_precision_too() -> None:
    for precision, kept in (("mixed", torch.float32), ("master", HALF)):
        model = transformer()
        loss, gradients = reference(model, precision)
        module = placed(copy.deepcopy(model), precision)
        found = module(*batch())
        found.backward()
        assert torch.equal(found, loss)
        for name, parameter in module.named_parameters():
            assert parameter.dtype == kept
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, gradients[name].float(), rtol=1e-2, atol=1e-4)


def test_evaluation_is_in_the_precision_too() -> None:
    model = transformer()
    module = placed(model, "mixed").eval()
    weights = {name: weight.to(HALF) for name, weight in model.named_parameters()}
    with torch.no_grad():
        assert torch.equal(module(*batch()), functional_call(model, weights, batch()))
