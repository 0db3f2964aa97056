"""Capture of training steps: forward, backward and update as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_models import (
    FLOAT,
    Mixed,
    Perceptron,
    Tied,
    Unrolled,
    check_training_rules,
    edges_of,
    ops_of,
    phase_names,
    state_bytes,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from graphs.capture import capture
from graphs.capture.costs import general_kernels
from graphs.errors import CaptureError
from graphs.opgraph import Phase


def test_perceptron_by_hand() -> None:
    graph = capture(Perceptron(), torch.zeros(3, 4), train=True)
    check_training_rules(graph)
    ops = ops_of(graph)
    first, second = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2
    assert {name: op.flops for name, op in ops.items() if op.flops} == {
        "first/addmm": first,
        "second/addmm": second,
        "second/mm": second,
        "second/mm_1": second,
        "first/mm": first,  # the input needs no gradient
    }
    assert ops["first/mm"].forward_of == "first/addmm"
    assert ops["first/mm"].module == "first"
    assert ops["threshold_backward"].forward_of == "relu"
    assert phase_names(graph, Phase.UPDATE) == [
        f"{layer}/{kind}.adam" for layer in ("first", "second") for kind in ("weight", "bias")
    ]
    # Parameter, gradient and two moments are kept; the gradient is written there, so its tensor has no bytes.
    assert ops["first/addmm"].kept_bytes == 4 * (4 * 8 + 8) * FLOAT
    assert graph.kept_bytes.sum() == 4 * state_bytes(Perceptron())
    assert ("first/mm", "first/weight.adam", 4 * 8 * FLOAT) in edges_of(graph)
    group = ops["first/addmm"].colocation
    members = {name for name, op in ops.items() if op.colocation == group}
    assert members == {"first/addmm", "first/mm", "first/sum", "first/weight.adam", "first/bias.adam"}
    # Gradient read; parameter and two moments read and written.
    assert ops["first/weight.adam"].bytes_moved == 7 * 4 * 8 * FLOAT
    # The weight's gradient reads the layer's input and the output's gradient.
    assert ops["first/mm"].bytes_moved == (3 * 4 + 3 * 8 + 4 * 8) * FLOAT


@pytest.mark.parametrize(("optimizer", "kept", "moved"), [("sgd", 2, 3), ("momentum", 3, 5), ("adamw", 4, 7)])
def test_optimizers_differ_in_what_they_keep_and_move(optimizer: str, kept: int, moved: int) -> None:
    graph = capture(Perceptron(), torch.zeros(3, 4), train=True, optimizer=optimizer)
    assert graph.kept_bytes.sum() == kept * state_bytes(Perceptron())
    assert ops_of(graph)[f"second/weight.{optimizer}"].bytes_moved == moved * 16 * FLOAT
    assert set(graph.kinds) >= {f"optimizer.{optimizer}"}


def test_frozen_and_unused_parameters_have_no_update() -> None:
    model = Perceptron()
    model.first.weight.requires_grad_(False)
    model.unused = nn.Linear(5, 5)
    graph = capture(model, torch.zeros(3, 4), train=True)
    check_training_rules(graph)
    assert phase_names(graph, Phase.UPDATE) == ["first/bias.adam", "second/weight.adam", "second/bias.adam"]
    trained = (8 + 16 + 2) * FLOAT
    assert graph.kept_bytes.sum() == 4 * trained + (32 + 30) * FLOAT


def test_tied_parameters_have_one_update_and_one_group() -> None:
    graph = capture(Tied(), torch.zeros(3, dtype=torch.long), train=True)
    check_training_rules(graph)
    ops = ops_of(graph)
    updates = phase_names(graph, Phase.UPDATE)
    assert updates == ["embedding/weight.adam", "body/weight.adam", "body/bias.adam"]
    names = ("embedding/embedding", "head/mm", "embedding/weight.adam")
    assert len({ops[name].colocation for name in names}) == 1
    # Two shares of the gradient, of which only their sum is kept.
    assert ("embedding/embedding_dense_backward", "embedding/add", 40 * FLOAT) in edges_of(graph)
    assert ("embedding/add", "embedding/weight.adam", 40 * FLOAT) in edges_of(graph)
    assert graph.kept_bytes.sum() == 4 * state_bytes(Tied())


def test_unrolled_cells_keep_one_group_per_layer() -> None:
    graph = capture(Unrolled(), torch.zeros(2, 3, 4), train=True)
    check_training_rules(graph)
    for layer in ("cells.0", "cells.1"):
        updates = [i for i, name in enumerate(graph.op_names) if name.startswith(f"{layer}/weight_hh.")]
        forward = [
            i
            for i in range(graph.n_ops)
            if graph.modules[i] == layer
            and graph.kinds[i] == "aten.addmm"
            and graph.colocation[i] == graph.colocation[updates[0]]
        ]
        assert len(updates) == 1
        assert len(forward) == 3  # one for each step
    assert graph.kept_bytes.sum() == 4 * state_bytes(Unrolled())


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(torch.relu_(self.norm(self.conv(x))))
        return self.head(self.drop(y.mean((2, 3))))


def test_batch_norm_and_dropout_in_training() -> None:
    model = Normalised()
    graph = capture(model, torch.zeros(2, 3, 9, 9), train=True)
    check_training_rules(graph)
    ops = ops_of(graph)
    assert ops["norm/native_batch_norm"].colocation == ops["norm/native_batch_norm_backward"].colocation
    buffers = sum(b.numel() * b.itemsize for b in model.buffers())
    parameters = sum(p.numel() for p in model.parameters()) * FLOAT
    assert graph.kept_bytes.sum() == 4 * parameters + buffers
    assert any(op.module == "drop" and op.phase is Phase.BACKWARD for op in ops.values())
    assert not any("num_batches" in name or name == "norm/add_" for name in ops)


def test_a_grouped_convolutions_backward_costs_two_forwards() -> None:
    graph = capture(Normalised(), torch.zeros(2, 3, 9, 9), train=True)
    ops = ops_of(graph)
    assert ops["depthwise/convolution_backward"].flops == 2 * ops["depthwise/convolution"].flops
    assert ops["conv/convolution_backward"].flops == ops["conv/convolution"].flops


def test_flops_equal_torchs_counter() -> None:
    model, x = Mixed(), torch.rand(2, 3, 8, 8)
    graph = capture(model, x, train=True)
    check_training_rules(graph)
    with general_kernels(), FlopCounterMode(display=False) as counter:
        model(x).backward()
    assert graph.flops.sum() == counter.get_total_flops() > 0


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Perceptron()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_recomputed_activations_are_backward_work() -> None:
    graph = capture(Recomputed(), torch.zeros(3, 4, requires_grad=True), train=True)
    check_training_rules(graph)
    ops = ops_of(graph)
    forwards = [op for op in ops.values() if op.module == "block.first" and op.kind == "aten.addmm"]
    assert [op.phase for op in forwards] == [Phase.FORWARD, Phase.BACKWARD]


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, with_loss: bool) -> dict[str, Any]:
        y = self.layer(x)
        return {"logits": y, "ids": y.argmax(), "more": [y * 2]} | ({"loss": y.sum()} if with_loss else {})


def test_default_losses() -> None:
    with_loss = capture(Dictionary(), (torch.zeros(3, 4), True), train=True)
    assert not any(kind in ("aten.mean", "aten.mul") for kind in with_loss.kinds)
    without = capture(Dictionary(), (torch.zeros(3, 4), False), train=True)
    assert without.kinds.count("aten.mean") == 2
    given = capture(Dictionary(), (torch.zeros(3, 4), True), train=True, loss=lambda out: out["logits"].exp().sum())
    assert "aten.exp" in given.kinds
    for graph in (with_loss, without, given):
        check_training_rules(graph)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).argmax()


def test_nothing_to_train() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(CaptureError, match="no trainable parameter"):
        capture(nn.ReLU(), x, train=True)
    with pytest.raises(CaptureError, match="without a floating-point tensor"):
        capture(Constant(), x, train=True)
    with pytest.raises(CaptureError, match="depends on no trainable parameter"):
        capture(nn.Linear(2, 2), x, train=True, loss=lambda out: out.detach().sum())
    with pytest.raises(CaptureError, match=r"the loss is shape \(1, 2\)"):
        capture(nn.Linear(2, 2), x, train=True, loss=lambda out: out)


def test_training_capture_is_deterministic() -> None:
    graphs = [capture(Normalised(), torch.zeros(2, 3, 9, 9), train=True) for _ in range(2)]
    assert graphs[0].hash == graphs[1].hash
    with torch.device("meta"):
        model = Normalised()
    assert capture(model, torch.zeros(2, 3, 9, 9), train=True).hash == graphs[0].hash


def test_an_rms_norm_is_one_op_each_way_and_runs_on_the_cpu() -> None:
    """As on CUDA, without copies in float32: what is kept is the input, and a number for each row."""
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 2)).to(torch.bfloat16)
    graph = capture(model, (torch.zeros(4, 8, dtype=torch.bfloat16),), train=True)
    assert [kind for kind in graph.kinds if "rms" in kind] == ["aten._fused_rms_norm", "aten._fused_rms_norm_backward"]
    assert "aten._to_copy" not in graph.kinds
    x = torch.randn(4, 8, requires_grad=True)
    norm, grad = nn.RMSNorm(8), torch.randn(4, 8)
    expected = torch.autograd.grad(norm(x), [x, norm.weight], grad)  # outside of a capture: torch's own
    rows = torch.ops.aten._fused_rms_norm(x, [8], norm.weight, None)[1]
    found = torch.ops.aten._fused_rms_norm_backward(grad, x, [8], rows, norm.weight, [True, True])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def _attends(mask: torch.Tensor | None, width: int = 8, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = None if mask is None else torch.ones(4, 1, dtype=torch.bool).expand(mask.shape)
            rows = rows if mask is not None and mask.stride(-1) == 0 else mask
            return nn.functional.scaled_dot_product_attention(*(self.inner(x) for _ in range(3)), rows)

    graph = capture(Attends().to(dtype), (torch.zeros(1, 2, 4, width, dtype=dtype),), train=True)
    return {kind for kind in graph.kinds if "attention" in kind or "softmax" in kind}


def test_attention_is_one_kernel_where_cuda_has_one() -> None:
    fused = {f"aten._scaled_dot_product_flash_attention_for_cpu{each}" for each in ("", "_backward")}
    whole = torch.ones(4, 4, dtype=torch.bool)
    assert _attends(None) == fused
    assert _attends(None, width=6) == fused  # FlashAttention pads
    assert _attends(whole) == fused
    for spelt_out in (
        _attends(torch.ones(4, 1, dtype=torch.bool).expand(4, 4)),  # memory-efficient attention reads rows
        _attends(whole, width=6),  # 12 bytes
        _attends(None, dtype=torch.float64),
    ):
        assert any("softmax" in kind for kind in spelt_out)
        assert not spelt_out & fused
