"""Placements as strategies whose stages are devices: the numbers of the model as it is, to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from parallel.sharded_models import Run, compare, run_plan, run_whole
from placed_models import cpus, random_layout, rank_plan
from torch import nn

from graphs.capture import capture_program
from graphs.zoo import build
from placement.runtime.planning.placement_plan import forward_plan, placement_plan, resized_plan
from placement.runtime.program.functional import functional


def placed(model: nn.Module, args: tuple[Any, ...], train: bool, n_ranks: int, seed: int) -> Run:
    own = copy.deepcopy(model).train(train)
    plan = rank_plan(random_layout(capture_program(own, args, train=train), n_ranks, seed))
    torch.manual_seed(3)
    return run_plan(plan, own, args)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["two_tower", "rnnlm", "gpt2", "resnet50", "unet", "mixtral_8x7b"])
def test_models_of_the_zoo(name: str, train: bool) -> None:
    made = build(name, device="cpu", small=True, batch_size=4)
    args = made.train_args if train else made.args
    expected = run_whole(made.model, args, train=train)
    compare(placed(made.model, args, train, 3, seed=1), expected, tolerance=1e-6)


class Counting(nn.Module):
    """Reads a counter after it was raised, in ops that may be on several ranks, and the shape of what others made."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = nn.Buffer(torch.zeros(3, dtype=torch.long))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[1] += 1
        self.steps += 1
        noise = torch.rand_like(self.left(x)) + torch.ones_like(self.right(x))
        return self.left(x) * self.steps + self.right(x) * self.calls[1] * self.steps + noise


@pytest.mark.parametrize("seed", range(4))
def test_counters_rise_once_on_every_rank(seed: int) -> None:
    model, x = Counting(), torch.randn(4, 6)
    compare(placed(model, (x,), True, 2, seed), run_whole(model, (x,)), tolerance=1e-6)


def test_ops_run_in_the_order_asked_for() -> None:
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    model.forward = lambda x: sum(layer(x) for layer in model)  # type: ignore[method-assign, assignment]
    program = capture_program(model, (torch.ones(2, 4),))
    names = program.graph.op_names
    layers = [op for op, name in enumerate(names) if "linear" in name]
    others = [op for op in range(len(names)) if op not in layers and op > layers[0]]
    for order in (layers, layers[::-1]):
        wanted = [*range(layers[0]), *order, *others]
        plan = placement_plan(functional(program), cpus(2), [0, 1], [0] * len(names), wanted)
        assert [op for op in plan.ops(0) if op in layers] == order
        assert plan.ops(1) == []


def test_what_no_rank_asked_for_stays_on_the_ranks_of_the_step() -> None:
    """Evaluation and other sizes have the ranks of the step, also those that have nothing to do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    program = capture_program(model, (torch.randn(4, 4),), train=True)
    row = np.where([module == "2" for module in program.graph.modules], 2, 1).tolist()
    plan = placement_plan(functional(program), cpus(3), [0, 1, 2], row)
    smaller = resized_plan(capture_program(model, (torch.randn(2, 4),), train=True), plan)
    assert smaller.n_ranks == plan.n_ranks == 3
    assert smaller.values.split.rows == plan.values.split.rows
    alone = capture_program(copy.deepcopy(model).eval(), (torch.randn(2, 4),))
    evaluated = forward_plan(alone, plan)
    assert evaluated.n_ranks == 3
    of_module = dict(zip(alone.graph.modules, evaluated.values.split.rows, strict=True))
    assert (of_module["0"], of_module["1"], of_module["2"]) == (1, 1, 2)
