"""The ops between two exchanges under torch.compile: the numbers are those of the model."""

from __future__ import annotations

import compiled_work
import pytest
import torch
from torch import nn

import placement
from placement.runtime.ranks.launch import launch
from tests.helpers.placed_models import cpus


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[float], dict[str, list[float]]]]:
    """What each rank has of a placement."""
    file = tmp_path_factory.mktemp("compiled") / "placed.json"
    graph = placement.capture(compiled_work.model(), (compiled_work.batch(),), train=True)
    placement.optimize(graph, cpus(2), "round_robin", strategy="none").save(file)
    return launch("compiled_work:compiled", str(file), ["cpu", "cpu"], limit_s=240)


def test_ranks_compute_what_the_model_does(found: list[tuple[list[float], dict[str, list[float]]]]) -> None:
    losses, gradients = compiled_work.plain()
    for mine, _ in found:
        assert mine == pytest.approx(losses, rel=1e-4, abs=1e-5)
    together = {name: gradient for _, own in found for name, gradient in own.items()}
    assert set(together) == set(gradients)
    for name, gradient in together.items():
        assert gradient == pytest.approx(gradients[name], rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch, of itself
def test_a_placement_is_compiled_between_its_transfers() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()), torch.randn(4, 8)
    expected = model(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    graph = placement.capture(model, (x,), train=True)
    found = placement.optimize(graph, cpus(2), "round_robin", strategy="none")
    placed = placement.apply(model, found, (x,))
    parts: list[int] = []

    def backend(part: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        parts.append(sum(node.op == "call_function" for node in part.graph.nodes))
        return part

    placed.compile(backend=backend)
    assert placed(x).allclose(expected, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(placed(x).sum(), list(model.parameters())), gradients, strict=True):
        assert mine.allclose(theirs, atol=1e-6)
    assert max(parts, default=0) > 1
