"""Steps in a precision: what ranks compute is what torch computes with the same formats."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parallel.transformer import Transformer, batch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, AdamW

import placement
from graphs.capture import capture
from graphs.errors import MismatchError
from graphs.recipes import PRECISIONS
from placement.runtime.states import accept_gradients, compute_in, convert
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


class Megatron:
    """A bfloat16 model with float32 gradients, copies and states, as Megatron-LM's optimizer keeps them."""

    def __init__(self, model: nn.Module, kind: Any) -> None:
        self.model = copy.deepcopy(model).to(HALF)
        self.masters = [parameter.detach().float().clone() for parameter in self.model.parameters()]
        self.optimizer = kind(self.masters)

    def step(self, data: tuple[Tensor, Tensor]) -> float:
        loss = self.model(*data)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return float(loss.detach())


@pytest.mark.parametrize(
    "kind", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9)]
)
@pytest.mark.parametrize("precision", ["master", "master-bf16-reduce"])
def test_master_copies_are_those_of_a_megatron_style_optimizer(kind: Any, precision: str) -> None:
    model = transformer()
    reference, module = Megatron(model, kind), placed(model, precision)
    optimizer = placement.with_masters(kind(module.parameters()))
    for number in range(4):
        loss = module(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) == reference.step(batch(number))
        if number == 1:  # as after a restart
            after = placement.with_masters(kind(module.parameters()))
            after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = after
    for parameter, expected, master in zip(
        module.parameters(), reference.model.parameters(), reference.masters, strict=True
    ):
        assert torch.equal(parameter, expected)
        assert torch.equal(optimizer.state[parameter]["master"], master)


def test_master_copies_of_wide_parameters_are_refused() -> None:
    with pytest.raises(MismatchError, match="none narrower than float32"):
        placement.with_masters(AdamW(transformer().parameters()))


def test_losses_in_float16_are_scaled_by_torch_s_scaler() -> None:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.net(x).float().square().mean()

    x, scales = torch.randn(4, 8), []
    graph = capture(Autocast(), x, train=True)
    on_two = placement.optimize(graph, cpus(2), "random", strategy="none", seed=0)
    trained = [Autocast(), placement.apply(Autocast(), on_two, x)]
    for module in trained:
        optimizer, scaler = SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**30)
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(module(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**30  # steps that overflowed were left out
    for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_a_plain_model_can_compute_in_a_precision(precision: str) -> None:
    model = transformer()
    loss, gradients = reference(model, precision)
    convert(model, PRECISIONS[precision])
    accept_gradients(model, PRECISIONS[precision])
    before = dict(model.named_parameters())
    compute_in(model, PRECISIONS[precision])
    for _ in range(2):
        model.zero_grad()
        found = model(*batch())
        found.backward()
        assert torch.equal(found, loss)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name].float())
