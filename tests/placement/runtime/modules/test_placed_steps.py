"""Several steps of a model with state of Python: as without a placement, or refused when it is placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_models import placed_at_random
from torch import Tensor, nn

from graphs.errors import CaptureError, MismatchError

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop, self.between = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5), between
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("centre", torch.ones(8))
        self.register_buffer("other", torch.zeros(8))
        self.tau, self.step = 1.0, 0
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: Any) -> Net:
        copied = Net(self.between)
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x).relu())).pow(2).mean()


def reassigned(net: Any, h: Tensor) -> Tensor:
    net.centre = 0.9 * net.centre + 0.1 * h.detach().mean(0)
    return h - net.centre


def reassigned_after_use(net: Any, h: Tensor) -> Tensor:
    made = h * net.centre  # the backward pass reads what the buffer had
    net.centre = 0.9 * net.centre + 0.1 * h.detach().mean(0)
    return made


def data(net: Any, h: Tensor) -> Tensor:
    net.b.weight.data = net.b.weight.data.clamp(-0.1, 0.1)
    return h


def generated(net: Any, h: Tensor) -> Tensor:
    return h[:, torch.randperm(8, generator=torch.Generator().manual_seed(7))]


def kept_generator(net: Any, h: Tensor) -> Tensor:
    return h * torch.rand(8, generator=net.generator)


def seeded_generator(net: Any, h: Tensor) -> Tensor:
    net.generator.manual_seed(9)
    return h * torch.rand(8, generator=net.generator) + torch.rand(8, generator=net.generator)


def tempered(net: Any, h: Tensor) -> Tensor:
    return net.drop(h) / net.tau


def normed(net: Any, h: Tensor) -> Tensor:
    return net.norm(h)


def swapped(net: Any, h: Tensor) -> Tensor:
    net.centre, net.other = net.other, net.centre
    return h - net.centre


def counted(net: Any, h: Tensor) -> Tensor:
    net.step += 1
    return h * net.step


def set_numbers(net: Any, step: int) -> None:
    net.tau, net.drop.p = 1.0 + step, 0.2 + 0.1 * step


def steps(net: Any, change: Callable[[Any, int], None]) -> list[float]:
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(4):
        change(net, step)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = net(X)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, int], None]]] = {
    "a buffer becomes another": (reassigned, lambda net, step: None),
    "a buffer becomes another after it was read": (reassigned_after_use, lambda net, step: None),
    "a parameter gets other data": (data, lambda net, step: None),
    "a generator of the call's own": (generated, lambda net, step: None),
    "a generator of the model's": (kept_generator, lambda net, step: None),
    "a generator that each call seeds": (seeded_generator, lambda net, step: None),
    "numbers that a trainer sets": (tempered, set_numbers),
    "a norm in evaluation mode": (normed, lambda net, step: net.norm.eval()),
    "a norm that is frozen later": (normed, lambda net, step: net.norm.train(step < 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_model(name: str) -> None:
    between, change = CASES[name]
    plain, model = Net(between), Net(between)
    change(model, 0)
    placed = placed_at_random(model, (X,))
    assert steps(placed, change) == pytest.approx(steps(plain, change), rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(placed.state_dict()[key], value)


def test_another_next_step_is_refused() -> None:
    with (
        pytest.warns(UserWarning, match=r"Net changes its attribute .step. when it runs; what"),
        pytest.raises(MismatchError, match=r"changes its attribute .step. when it runs, and a"),
    ):
        placed_at_random(Net(counted), (X,))
    with pytest.raises(CaptureError, match=r"centre becomes another tensor of the model"):
        placed_at_random(Net(swapped), (X,))
    placed = placed_at_random(Net(tempered), (X,))
    placed.drop.p = 0.0
    with pytest.raises(MismatchError, match=r"drop\.p is 0\.0, unlike when the model was placed, and"):
        placed(X)
