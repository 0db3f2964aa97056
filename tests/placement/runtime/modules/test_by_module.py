"""Placements by module: for models that cannot be traced."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from placed_models import cpus
from torch import nn

import placement
from graphs.capture import capture
from graphs.errors import CaptureError, MismatchError
from placement.results.result import Result
from placement.runtime.modules import by_module
from placement.runtime.modules.by_module import ModulePlaced, module_places, place_modules, to_place

X = torch.linspace(-1, 1, 24).reshape(4, 6)
CPU, OTHER = torch.device("cpu"), torch.device("meta")


class Gate(nn.Module):
    """Which of its branches runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.left = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.right = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.stem(x)
        if y.sum() > 0:
            return self.left(y) + y * self.scale
        return self.right(y) * self.scale


def placed_on(graph: Any, names: dict[str, str]) -> Result:
    """A result with the ops of each module on a device of their own, by the beginning of the module's path."""
    base = placement.optimize(graph, cpus(2), method="single_device")
    chosen = {
        op: next((d for path, d in names.items() if module.startswith(path)), "cpu0")
        for op, module in zip(graph.op_names, graph.modules, strict=True)
    }
    order = {device: [op for op in graph.op_names if chosen[op] == device] for device in ("cpu0", "cpu1")}
    return dataclasses.replace(base, answer=dataclasses.replace(base.answered(), placement=chosen, order=order))


def gate_on_two() -> tuple[Gate, Result]:
    model = Gate()
    graph = capture(model, (X,), train=True, granularity="module")
    return model, placed_on(graph, {"left.0": "cpu1", "left.1": "cpu1"})


def test_what_cannot_be_traced_falls_back_to_modules_and_says_so() -> None:
    with pytest.raises(CaptureError, match="granularity"):
        capture(Gate(), (X,))
    with pytest.warns(UserWarning, match=r"^tracing failed in module Gate.*; each leaf module is one op instead\.$"):
        graph = capture(Gate(), (X,), granularity="auto")
    assert "Linear" in graph.kinds
    with pytest.raises(CaptureError, match="check that the model runs"):
        capture(Gate(), (X.t(),), granularity="auto")


def test_outputs_gradients_and_buffers_are_those_of_the_model() -> None:
    model, result = gate_on_two()
    plain = copy.deepcopy(model)
    placed = placement.apply(model, result, (X,))
    assert isinstance(placed, ModulePlaced)
    for x in (X + 1, -X - 1):
        expected, found = plain(x), placed(x)
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
    for mine, theirs in zip(plain.parameters(), placed.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert list(placed.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(placed.state_dict()[key], value) for key, value in plain.state_dict().items())
    placed.eval()
    assert torch.equal(placed(X), plain.eval()(X))


def test_parameters_and_tensors_go_where_their_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, result = gate_on_two()
    places = {"cpu0": CPU, "cpu1": OTHER}
    found = module_places(model, result, places)
    on_other = {path for path, place in found.items() if place == OTHER}
    # The branch that did not run is where the model's own code is; a chain is where its first module is.
    assert on_other == {"left", "left.0", "left.1"}
    moves: list[torch.device] = []
    # The other device has no data, so what would go there is noted and stays.
    monkeypatch.setattr(by_module, "to_place", lambda value, place: moves.append(place) or value)
    placed = place_modules(model, result, places)
    assert moves.count(OTHER) == 2 + 5  # parameters and buffers
    moves.clear()
    placed(X)
    assert OTHER in moves
    assert moves[-1] == CPU


def test_nested_values_move_and_others_stay_the_objects_they_are() -> None:
    @dataclass
    class Pair:
        first: torch.Tensor
        second: Any

    value = {"a": [X, 3], "b": Pair(X, (X, "text"))}
    assert to_place(value, CPU) is value
    moved = to_place(value, OTHER)
    assert moved["a"][0].is_meta
    assert moved["a"][1] == 3
    assert moved["b"].second[0].is_meta
    assert not value["b"].first.is_meta  # type: ignore[attr-defined]


def test_another_model() -> None:
    _, result = gate_on_two()
    with pytest.raises(MismatchError, match="this model has no module 'stem'"):
        place_modules(nn.Sequential(nn.Linear(6, 6)), result, {"cpu0": CPU, "cpu1": CPU})


def test_hooks_go_when_the_model_is_given_back() -> None:
    model, result = gate_on_two()
    placed = place_modules(model, result, {"cpu0": CPU, "cpu1": CPU})
    assert isinstance(placed, ModulePlaced)
    placed.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
