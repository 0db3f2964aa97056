"""Capture at module granularity, the way out when tracing fails."""

from __future__ import annotations

import pytest
import torch
from captured_models import (
    FLOAT,
    Choosing,
    Failing,
    Mixed,
    Perceptron,
    Tied,
    check_training_rules,
    edges_of,
    ops_of,
    phase_names,
    state_bytes,
)
from torch import nn

from graphs.capture import capture
from graphs.errors import CaptureError
from graphs.opgraph import Phase


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.left(x).relu() + self.right(x))


def test_leaf_modules_become_ops_and_work_between_them_is_attached() -> None:
    graph = capture(Residual(), torch.zeros(3, 4), granularity="module")
    ops = ops_of(graph)
    assert list(ops) == ["x", "left", "right", "out"]
    assert [op.kind for op in ops.values()] == ["input", "Linear", "Linear", "Linear"]
    assert edges_of(graph) == {("x", "left", 48), ("x", "right", 48), ("left", "out", 48), ("right", "out", 48)}
    fine = capture(Residual(), torch.zeros(3, 4))
    assert graph.flops.sum() == fine.flops.sum()
    assert graph.bytes_moved.sum() == fine.bytes_moved.sum()
    assert graph.kept_bytes.sum() == fine.kept_bytes.sum() == state_bytes(Residual())
    assert ops["left"].kernels == 2  # with the relu
    assert ops["left"].workspace_bytes == 3 * 4 * FLOAT  # what the relu reads
    assert ops["out"].kernels == 2  # with the addition


def test_a_module_that_never_calls_its_children_is_a_leaf() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    graph = capture(model, (torch.zeros(2, 3, 4),) * 3, granularity="module")
    assert graph.kinds == ("input", "MultiheadAttention")
    assert graph.kept_bytes.sum() == state_bytes(model)


def test_a_module_called_twice_is_two_ops_in_one_group() -> None:
    layer = nn.Linear(4, 4)
    graph = capture(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(3, 4), granularity="module")
    ops = ops_of(graph)
    assert list(ops) == ["input", "0", "1", "0_1"]
    assert ops["0"].colocation == ops["0_1"].colocation is not None
    assert graph.kept_bytes.sum() == 20 * FLOAT


@pytest.mark.parametrize("train", [False, True])
def test_module_flops_equal_op_flops_in_the_forward_pass(train: bool) -> None:
    x = torch.zeros(2, 3, 8, 8)
    fine, coarse = (capture(Mixed(), x, train=train, granularity=g) for g in ("op", "module"))
    forward = [graph.flops[graph.phase == Phase.FORWARD].sum() for graph in (fine, coarse)]
    assert forward[0] == forward[1] > 0
    assert coarse.n_ops < fine.n_ops
    assert coarse.kept_bytes.sum() == fine.kept_bytes.sum()


def test_training_mirrors_the_forward_pass() -> None:
    graph = capture(Perceptron(), torch.zeros(3, 4), train=True, granularity="module")
    check_training_rules(graph)
    ops = ops_of(graph)
    assert list(ops)[:3] == ["x", "first", "second"]
    assert phase_names(graph, Phase.BACKWARD) == ["second/backward", "first/backward"]
    assert ops["second/backward"].flops == 2 * ops["second"].flops
    assert ops["first/backward"].flops == ops["first"].flops  # the input needs no gradient
    edges = edges_of(graph)
    assert ("second/backward", "first/backward", 3 * 8 * FLOAT) in edges
    assert ("first", "second/backward", 3 * 8 * FLOAT) in edges
    assert ("second", "second/backward", 3 * 2 * FLOAT) in edges
    assert ("first/backward", "first/weight.adam", 4 * 8 * FLOAT) in edges
    assert graph.kept_bytes.sum() == 4 * state_bytes(Perceptron())
    group = ops["first"].colocation
    assert {n for n, op in ops.items() if op.colocation == group} == {
        "first",
        "first/backward",
        "first/weight.adam",
        "first/bias.adam",
    }


def test_training_with_tied_parameters() -> None:
    graph = capture(Tied(), torch.zeros(3, dtype=torch.long), train=True, granularity="module")
    check_training_rules(graph)
    assert phase_names(graph, Phase.UPDATE).count("embedding/weight.adam") == 1
    assert graph.kept_bytes.sum() == 4 * state_bytes(Tied())


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(4, 1)
        self.yes = nn.Linear(4, 4)
        self.no = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[self.judge(x).squeeze(1) > 1e9]
        return self.yes(x) if len(chosen) > 0 else self.no(x)


@pytest.mark.parametrize("train", [False, True])
def test_control_flow_that_depends_on_data_is_run_once_for_real(train: bool) -> None:
    model, x = Deciding(), torch.rand(3, 4)
    with pytest.raises(CaptureError, match="granularity="):
        capture(model, x, train=train)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture(model, x, train=train, granularity="module")
    forward = [m for m, p in zip(graph.modules, graph.phase, strict=True) if p == Phase.FORWARD]
    assert "no.0" in forward
    assert "no.1" in forward
    assert "yes" not in forward
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_decides_is_kept() -> None:
    graph = capture(Failing(), torch.ones(3, 4), granularity="module")
    assert {"blocks.0.first", "blocks.0.second", "blocks.1.0"} <= set(graph.modules)


def test_without_weights_data_cannot_decide() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Choosing())
    with pytest.raises(CaptureError, match=r"'1' \(Choosing\).*give the model real weights"):
        capture(model, torch.zeros(3, 4), granularity="module")


def test_a_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'first' \(Linear\).*check that the model runs"):
        capture(Perceptron(), torch.zeros(3, 5), granularity="module")


def test_module_capture_is_deterministic() -> None:
    x = torch.zeros(2, 3, 8, 8)
    first, second = (capture(Mixed(), x, train=True, granularity="module") for _ in range(2))
    assert first.hash == second.hash


class Penalised(nn.Module):
    """A gradient penalty, which the model computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.b(self.a(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean() + y.mean()


def test_a_model_that_takes_gradients_itself() -> None:
    graph = capture(Penalised(), (torch.zeros(3, 4),), train=True, granularity="module")
    assert {op.module for op in graph.records()[0] if op.parameter_bytes} == {"a", "b"}
