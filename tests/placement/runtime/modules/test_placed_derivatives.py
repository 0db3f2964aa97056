"""Derivatives that the model takes itself: in its forward pass by torch.func, in a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_models import check_equal
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from graphs.capture import capture_program
from graphs.errors import CaptureError

# Of torch's own, in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

X = torch.linspace(-1, 1, 12).reshape(6, 2)


class Physics(nn.Module):
    """A small network, and a forward pass that is given."""

    def __init__(self, forward: Callable[[Physics, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)

    def at(self, point: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.n(point).squeeze(-1)
        return out


def residual(m: Physics, x: torch.Tensor) -> Any:
    du = vmap(grad(m.at))(x)
    return (du[:, 1] + m.n(x)[:, 0] * du[:, 0]).pow(2).mean()


def jacobians(m: Physics, x: torch.Tensor) -> Any:
    return vmap(jacrev(m.n))(x), vmap(jacfwd(m.n))(x), vmap(jacrev(jacrev(m.at)))(x)


def products(m: Physics, x: torch.Tensor) -> Any:
    out, tangent = jvp(m.n, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    other, back = vjp(m.n, x)  # type: ignore[misc]
    return out * tangent, back(torch.ones_like(other))[0]


def weights_as_arguments(m: Physics, x: torch.Tensor) -> Any:
    twice = {name: 2 * p for name, p in m.n.named_parameters()}
    both = torch.stack([twice["0.weight"], twice["0.weight"].sin()])
    return functional_call(m.n, twice, (x,)), vmap(lambda w: torch.tanh(x @ w.T), out_dims=1)(both)


def by_autograd(m: Physics, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.at(point).sum(), point, create_graph=m.training)
    return m.n(slope)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "forward", [residual, jacobians, products, weights_as_arguments, by_autograd], ids=lambda forward: forward.__name__
)
def test_derivatives_in_the_forward_pass(forward: Callable[..., Any], train: bool) -> None:
    check_equal(Physics(forward), (X,), train=train, seeds=[0], steps=1, tolerance=1e-5)


def test_what_torch_cannot_trace_says_what_to_write() -> None:
    model = Physics(lambda m, x: vmap(hessian(m.at))(x))
    with pytest.raises(CaptureError, match=r"take jacrev\(jacrev\(f\)\) for hessian\(f\)"):
        capture_program(model, (X,), train=True)


class Rebuilt(torch.autograd.Function):
    """A module whose activations are made again in the backward pass, which fills the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module, ctx.random = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: torch.Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), now = ctx.saved_tensors, torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = ctx.module(again)
        torch.set_rng_state(now)
        y.backward(gradients[0])
        return again.grad, None


class Reversible(nn.Module):
    """Layers with a backward pass of their own: one used twice, one whose gradient comes by both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.i, self.o = nn.Linear(2, 8), nn.Linear(8, 3)
        self.f, self.g = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Rebuilt.apply(Rebuilt.apply(self.i(x), self.f), self.f)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.o(Rebuilt.apply(h, self.g) + self.g(h).sin())  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("train", [False, True])
def test_gradients_that_a_backward_pass_of_the_model_fills(train: bool) -> None:
    check_equal(Reversible(), (X,), train=train, seeds=[0, 1], tolerance=1e-6)
