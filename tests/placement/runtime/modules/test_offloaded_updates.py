"""Steps whose updates, or parameters as well, are offloaded: numbers are those of the model as it is."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import placement
from graphs.capture import capture_program
from graphs.capture.record import default_loss
from placement.runtime.program.hosted_tensors import added_on_host, copied_in, sent_away
from placement.runtime.writing.writer import write
from tests.helpers.parallel.sharded_models import check_steps, planned
from tests.helpers.placed_models import with_host


@pytest.mark.parametrize(
    "strategy",
    [
        "offload=optimizer",
        "mb2 | recompute=kind:*tanh* | offload=optimizer",
        "offload=parameters",
        "mb2 | recompute=kind:*tanh* | offload=parameters",
    ],
)
def test_training_is_that_of_the_model(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16) if "mb" not in strategy else nn.Tanh())
    batch = (torch.randn(6, 8),)
    plain = copy.deepcopy(model)
    graph = placement.capture(model, batch, train=True, optimizer="adamw")
    found = placement.optimize(graph, with_host(1), strategy=strategy, seed=0)
    found.save(tmp_path / "found.json")
    assert placement.verify(tmp_path / "found.json", graph=graph).made_again
    placed = placement.apply(model, tmp_path / "found.json", batch)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (placed, plain))
    for _ in range(3):
        loss = placed.step(*batch)
        expected = default_loss(plain(*batch))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(dict(placed.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2 zero3 | mb2 | offload=parameters",
        "dp2 | tp2 | offload=parameters",
        "pp2 1f1b mb4 | recompute=* | offload=parameters+activations",
    ],
)
def test_ranks_train_as_one_device_does(strategy: str) -> None:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    check_steps(nn.Sequential(*layers), (torch.randn(8, 8),), strategy, optimizer, 3)


def test_in_a_mixed_precision_what_was_copied_is_cast() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), (torch.randn(6, 8),)
    given = []
    for strategy in ("mb2", "mb2 | offload=parameters"):
        graph = placement.capture(model, batch, train=True, precision="mixed")
        placed = placement.apply(
            copy.deepcopy(model), placement.optimize(graph, with_host(1), strategy=strategy, seed=0), batch
        )
        given.append((placed.step(*batch), [p.grad for p in placed.parameters()]))
    torch.testing.assert_close(given[0], given[1])


def test_a_layer_is_copied_before_it_runs_and_its_gradient_sent_away_behind_it() -> None:
    """Each copy has readers of its own, which stand together; a gradient leaves before the next layer's is made."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    program = capture_program(model, (torch.randn(4, 8),), {}, True)
    nodes = list(write(planned(program, "offload=parameters"), 0).routine.module.graph.nodes)
    copies, away = ([n for n, node in enumerate(nodes) if node.target is call] for call in (copied_in, sent_away))
    assert len(copies) == 3 * 2 + 2  # weights and biases, and the weights of all layers but the first
    assert len(away) == 6
    assert away[0] < copies[-1]
    code = write(planned(program, "mb3 | offload=parameters"), 0).routine.module.graph
    assert sum(node.target is added_on_host for node in code.nodes) == 2 * 6
