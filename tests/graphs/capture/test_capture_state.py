"""Capturing leaves a model, its hooks and random numbers as they were, whatever happens, and repeats itself."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captured_models import Perceptron, Tied
from cases.capture_cases import Branchy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphs.capture import capture
from graphs.errors import CaptureError


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4)).train()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before = {
        name: (tensor, tensor.clone(), tensor.requires_grad)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    random_state = torch.get_rng_state()
    for train in (False, True):
        for granularity in ("op", "module"):
            capture(model, torch.zeros(3, 4), train=train, granularity=granularity)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (tensor, value, requires_grad) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad == requires_grad
        assert tensor.grad is None
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random_state)
    model(torch.rand(3, 4))


class Remembering(nn.Module):
    """Keeps what it saw, and fails after that."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: Any = None
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.layer(x)
        if self.fails:
            raise KeyError("no such thing")
        return self.seen


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_restored_after_an_error_too(train: bool) -> None:
    model = Remembering(fails=True).eval()
    weight = model.layer.weight
    with pytest.raises(CaptureError, match="no such thing"):
        capture(model, torch.zeros(1, 2), train=train)
    assert model.seen is None
    assert model.layer.weight is weight
    assert not model.training
    assert not model._forward_hooks


class Dropping(nn.Module):
    """Leaves out layers by the random numbers of a library that no graph has."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.last, self.draw = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (np.random.random, "numpy.random")])
def test_layers_that_are_left_out_at_random(draw: Callable[[], float], name: str, train: bool) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    drawn = []
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"Dropping draws from {name} when it runs; what is captured is one draw"):
            drawn.append(capture(Dropping(draw), (torch.zeros(1, 2),), train=train).n_ops)
    assert drawn[0] == drawn[1]


class Mixed(Perceptron):
    """Computes in a region of ``torch.autocast``."""

    def __init__(self, region: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            return super().forward(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("train", [False, True])
def test_autocast_for_cuda_without_cuda_is_that_of_the_cpu(train: bool) -> None:
    made_before = torch.autocast("cuda", dtype=torch.bfloat16)
    regions: list[tuple[Callable[[], torch.autocast], str]] = [
        (lambda: torch.autocast("cuda", dtype=torch.bfloat16), "bfloat16"),
        (lambda: torch.autocast("cuda"), "float16"),
        (lambda: made_before, "bfloat16"),
        (lambda: torch.autocast("cuda", enabled=False), "float32"),
    ]
    for region, dtype in regions:
        graph = capture(Mixed(region), (torch.zeros(2, 4),), train=train)
        products = {op.dtype for op in graph.records()[0] if op.flops}
        assert products == {dtype}
    assert made_before.device == "cuda"
    assert not torch.is_autocast_enabled("cpu")


class Hooked(nn.Module):
    """Hooks of its layers keep what they see, in all the places where something can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept, self.calls = (
            nn.Linear(2, 2),
            {"all": [deque([1])]},
            SimpleNamespace(seen={1, 2}, last=[]),
        )
        self.shown: list[Any] = []
        shown = self.shown
        outside: dict[str, Any] = {}
        self.layer.register_forward_hook(lambda module, args, out: shown.append(out))
        self.layer.register_forward_hook(lambda module, args, out: outside.__setitem__("out", out))
        self.outside = outside
        self.layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.kept["all"][0].append(out)
        self.kept["new"] = [out]
        self.calls.seen.add(out)
        self.calls.last.append(out)
        self.calls.new = out

    def forward(self, x: torch.Tensor) -> Any:
        self.layer(x)
        return self.kept, self.outside["out"] * 2


@pytest.mark.filterwarnings("ignore:Hooked changes its attribute")
@pytest.mark.parametrize("granularity", ["op", "module"])
@pytest.mark.parametrize("train", [False, True])
def test_what_hooks_keep_is_as_it_was(train: bool, granularity: str) -> None:
    model = Hooked()
    kept, queue = model.kept, model.kept["all"][0]
    capture(model, torch.zeros(3, 2), train=train, granularity=granularity)
    assert model.kept is kept
    assert kept == {"all": [queue]}
    assert queue == deque([1])
    assert vars(model.calls) == {"seen": {1, 2}, "last": []}
    assert not model.shown
    assert not model.outside


def test_capture_is_deterministic() -> None:
    args = (torch.zeros(2, 4, 9, 9),)
    assert capture(Branchy(), args).hash == capture(Branchy(), args).hash
    with torch.device("meta"):
        on_meta = Branchy()
    assert capture(on_meta, args).hash == capture(Branchy(), args).hash


def test_models_and_inputs_may_be_fake_already() -> None:
    with FakeTensorMode():
        model, x = Tied(), torch.zeros(3, dtype=torch.long)
        inside = capture(model, x)
    assert inside.hash == capture(model, x).hash == capture(Tied(), torch.zeros(3, dtype=torch.long)).hash
