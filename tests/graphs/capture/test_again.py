"""State of Python and generators: what a second step would do otherwise is known when the first is captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.capture import capture, capture_program


class Net(nn.Module):
    """Two layers, and something between them that a subclass or a function says."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        self.register_buffer("centre", torch.ones(8))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h if self.between is None else self.between(self, h)).pow(2)


def counted(net: Any, h: Tensor) -> Tensor:
    net.step += 1
    return h * min(1.0, net.step / 4)


def counted_only(net: Any, h: Tensor) -> Tensor:
    net.step += 1
    return h


def remembered(net: Any, h: Tensor) -> Tensor:
    memory, net.memory = net.memory, h.detach()
    return h if memory is None else h + 0.1 * memory


def listed(net: Any, h: Tensor) -> Tensor:
    net.seen["all"].append(h.detach())
    return h + sum(net.seen["all"])


def shown(net: Any, h: Tensor) -> Tensor:
    net.last = h
    return h + net.last.mean()


def seeded(net: Any, h: Tensor) -> Tensor:
    torch.manual_seed(7)
    return h * torch.rand(8)


def forked(net: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return h * torch.rand(8)


def generated(net: Any, h: Tensor) -> Tensor:
    return h * torch.rand(8, generator=torch.Generator().manual_seed(7))


def assigned(net: Any, h: Tensor) -> Tensor:
    net.centre = 0.9 * net.centre + 0.1 * h.detach().mean(0)
    return h - net.centre


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], str, bool]] = {
    "a counter": (counted, {"step": 0}, "changes its attribute 'step'", True),
    "a counter that nothing reads": (counted_only, {"step": 0}, "changes its attribute 'step'", False),
    "a tensor that was none": (remembered, {"memory": None}, "changes its attribute 'memory'", True),
    "a tensor that was another": (remembered, {"memory": torch.zeros(4, 8)}, "changes its attribute 'memory'", True),
    "a list in a dictionary": (listed, {"seen": {"all": []}}, "changes its attribute 'seen'", True),
    "a tensor that the next step does not read": (shown, {}, "", False),
    "a seed": (seeded, {}, "seeds torch's random numbers", True),
    "a seed in a fork": (forked, {}, "seeds torch's random numbers", True),
    "a generator made in forward": (generated, {}, "", False),
    "a buffer that becomes another": (assigned, {}, "", False),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_the_next_step_does_otherwise(name: str, train: bool) -> None:
    between, attributes, said, is_other = CASES[name]
    net = Net(between, **attributes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = capture_program(net, torch.zeros(4, 6), train=train)
    told = [str(each.message) for each in caught if "what is captured is one step" in str(each.message)]
    assert len(told) == bool(said)
    assert said in "".join(told)
    assert bool(program.trace.unlike) == is_other
    assert all(getattr(net, key) is value for key, value in attributes.items())


def test_a_buffer_that_becomes_another_is_written() -> None:
    kinds = [op.kind for op in capture(Net(assigned), torch.zeros(4, 6), train=True).records()[0]]
    assert kinds.count("aten.copy_") == 1


def test_a_teacher_stays_in_evaluation_mode() -> None:
    net = Net()
    net.b = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))  # type: ignore[assignment]
    net.b[0].eval()  # type: ignore[index]
    kept = capture(net, torch.zeros(4, 6), train=True)
    assert not [kind for kind in kept.kinds if "dropout" in kind or "bernoulli" in kind]
    assert [kind for kind in capture(net.eval(), torch.zeros(4, 6), train=True).kinds if "bernoulli" in kind]
