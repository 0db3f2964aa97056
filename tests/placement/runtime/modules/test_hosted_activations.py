"""A step whose activations wait on hosts: loss and gradients are those of the model as it is, and of `save_on_cpu`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from parallel.sharded_models import check, planned
from parallel.transformer import BATCH, TOKENS, WORDS, Transformer
from placed_models import with_host
from torch import nn

import placement
from graphs.capture import capture_program
from graphs.capture.record import default_loss
from placement.runtime.program.hosted_tensors import arrived, asked_back, sent_away
from placement.runtime.writing.writer import write

KEPT = "recompute=layers.*+!kind:*mm*"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))


@pytest.mark.parametrize(
    "strategy", ["offload=activations", f"mb2 | {KEPT} | offload=optimizer+layers.*+!kind:*gelu*@layers.0"]
)
def test_training_is_that_of_the_model(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = Transformer(), batch()
    plain = copy.deepcopy(model)
    graph = placement.capture(model, args, train=True)
    found = placement.optimize(graph, with_host(1), strategy=strategy, seed=0)
    found.save(tmp_path / "found.json")
    assert placement.verify(tmp_path / "found.json", graph=graph).made_again
    placed = placement.apply(model, tmp_path / "found.json", args)
    loss = placed.step(*args)
    with torch.autograd.graph.save_on_cpu():
        expected = default_loss(plain(*args))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2 zero3 | offload=activations",
        f"tp2 sp | {KEPT} | offload=layers.*",
        f"pp2 1f1b mb4 | {KEPT} | offload=activations",
        "pp2 zb-h1 mb4 | offload=layers.*",
    ],
)
def test_ranks_compute_what_one_device_does(strategy: str) -> None:
    torch.manual_seed(0)
    check(Transformer(layers=4), batch(), strategy)


def test_what_one_op_wrote_comes_back_together() -> None:
    """A pooling's values are read before its indices: the backward pass of what follows comes first."""
    layers = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)
    torch.manual_seed(0)
    check(nn.Sequential(*layers), (torch.randn(4, 3, 32, 32),), "mb2 | offload=activations")


def test_a_tensor_is_on_the_host_between_its_passes() -> None:
    """Its line ends with the forward pass; what the backward pass reads is a line of its own."""
    program = capture_program(Transformer(), batch(), {}, True)
    nodes = list(write(planned(program, "offload=kind:*gelu*"), 0).routine.module.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    away, back = ([node for node in nodes if node.target is call] for call in (sent_away, asked_back))
    assert len(away) == len(back) > 0
    first_back = min(place[node] for node in back)
    for node in away:
        assert max(place[user] for user in node.args[0].users) < first_back


def test_tensors_of_a_cpu_stay_where_they_are() -> None:
    tensor = torch.randn(4, 3).t()
    assert arrived(asked_back(sent_away(tensor))) is tensor
