"""Capturing one forward pass, op by op: small models whose graphs are known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_models import FLOAT, Perceptron, Tied, Unrolled, edges_of, ops_of, state_bytes
from cases.capture_cases import Branchy
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from graphs.capture import capture, from_exported_program
from graphs.capture.costs import general_kernels
from graphs.opgraph import Phase


def test_perceptron_by_hand() -> None:
    graph = capture(Perceptron(), (torch.zeros(3, 4),))
    ops = ops_of(graph)
    assert list(ops) == ["x", "first/linear", "relu", "second/linear"]
    assert edges_of(graph) == {
        ("x", "first/linear", 3 * 4 * FLOAT),
        ("first/linear", "relu", 3 * 8 * FLOAT),
        ("relu", "second/linear", 3 * 8 * FLOAT),
    }
    assert [op.kind for op in ops.values()] == ["input", "aten.linear", "aten.relu", "aten.linear"]
    assert [op.module for op in ops.values()] == ["", "first", "", "second"]
    assert [op.flops for op in ops.values()] == [0, 2 * 3 * 4 * 8, 0, 2 * 3 * 8 * 2]
    assert [op.kept_bytes for op in ops.values()] == [0, (4 * 8 + 8) * FLOAT, 0, (8 * 2 + 2) * FLOAT]
    moved = [0, 3 * 4 + 4 * 8 + 8 + 3 * 8, 2 * 3 * 8, 3 * 8 + 8 * 2 + 2 + 3 * 2]
    assert [op.bytes_moved for op in ops.values()] == [FLOAT * n for n in moved]
    assert [op.kernels for op in ops.values()] == [0, 1, 1, 1]
    assert {op.dtype for op in ops.values()} == {"float32"}
    assert (graph.colocation == -1).all()
    assert (graph.phase == Phase.FORWARD).all()


def test_the_result_is_a_tensor_without_consumers() -> None:
    graph = capture(Perceptron(), torch.zeros(3, 4))
    results = [t for t in range(graph.n_tensors) if len(graph.consumers_of(t)) == 0]
    assert [graph.op_names[graph.tensor_producer[t]] for t in results] == ["second/linear"]
    assert graph.tensor_bytes[results].tolist() == [3 * 2 * FLOAT]


def test_convolution_batch_norm_relu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    graph = capture(model, torch.zeros(2, 3, 5, 5))
    ops = ops_of(graph)
    assert list(ops) == ["input", "0/conv2d", "1/batch_norm", "2/relu_"]
    assert ops["0/conv2d"].flops == 2 * (2 * 8 * 5 * 5) * 3 * 3 * 3
    assert ops["0/conv2d"].kept_bytes == 8 * 3 * 3 * 3 * FLOAT
    # Weight, bias, running mean, running variance, and the eight bytes of num_batches_tracked.
    assert ops["1/batch_norm"].kept_bytes == 4 * 8 * FLOAT + 8
    assert edges_of(graph) == {
        ("input", "0/conv2d", 2 * 3 * 5 * 5 * FLOAT),
        ("0/conv2d", "1/batch_norm", 2 * 8 * 5 * 5 * FLOAT),
        ("1/batch_norm", "2/relu_", 2 * 8 * 5 * 5 * FLOAT),
    }


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.view(4, 6).t().unsqueeze(0).expand(3, 6, 4)[:, 1:, :].transpose(1, 2).squeeze().detach()
        return z + 1


def test_views_are_folded_into_their_base() -> None:
    graph = capture(Views(), torch.zeros(2, 12))
    assert graph.op_names == ("x", "mul", "add")
    assert edges_of(graph) == {("x", "mul", 24 * FLOAT), ("mul", "add", 24 * FLOAT)}
    # It reads 5 of 6 rows of 4, once, however often they are expanded; and writes all 3 * 4 * 5.
    assert ops_of(graph)["add"].bytes_moved == (5 * 4 + 3 * 4 * 5) * FLOAT


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (x + 1).chunk(2, dim=1)
        c, d = torch.split(a, [1, 2], dim=1)
        return torch.cat([b, d, c], dim=1)


def test_chunk_and_split_make_no_tensors_of_their_own() -> None:
    graph = capture(Chunks(), torch.zeros(5, 6))
    assert graph.op_names == ("x", "add", "cat")
    assert edges_of(graph) == {("x", "add", 30 * FLOAT), ("add", "cat", 30 * FLOAT)}
    assert ops_of(graph)["cat"].bytes_moved == 2 * 30 * FLOAT


class Copies(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.reshape(6) + 1, y.t().reshape(6) + 2, y.contiguous().to(torch.float32) + 3


def test_reshape_is_an_op_only_where_it_copies() -> None:
    graph = capture(Copies(), torch.zeros(2, 3))
    assert graph.op_names == ("x", "mul", "add", "reshape", "add_1", "add_2")
    assert ("mul", "reshape", 24) in edges_of(graph)
    assert ("mul", "add", 24) in edges_of(graph)
    assert ("mul", "add_2", 24) in edges_of(graph)


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        values, indices = torch.topk(x, 2)
        largest, _ = torch.max(x, dim=1)
        return {"values": values * 2, "nested": [(indices + 1, largest)]}


def test_each_output_of_a_call_is_a_tensor_and_unused_ones_are_dropped() -> None:
    graph = capture(Several(), torch.zeros(5, 6))
    ops = ops_of(graph)
    sizes: dict[str, list[int]] = {}
    for producer, size in zip(graph.tensor_producer, graph.tensor_bytes, strict=True):
        sizes.setdefault(graph.op_names[producer], []).append(int(size))
    assert sizes["topk"] == [5 * 2 * FLOAT, 5 * 2 * 8]
    assert sizes["max"] == [5 * FLOAT]
    assert ops["max"].bytes_moved == 5 * 6 * FLOAT + 5 * FLOAT
    assert {("topk", "mul", 40), ("topk", "add", 80)} <= edges_of(graph)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        before = y + 1
        y[:, 0] = 7.0
        y.add_(x)
        return y * before


def test_writes_in_place_become_versions() -> None:
    graph = capture(InPlace(), torch.zeros(2, 3))
    edges = {(a, b) for a, b, _ in edges_of(graph)}
    fill = next(name for name in graph.op_names if name.startswith(("fill_", "copy_")))
    assert edges == {
        ("x", "mul"),
        ("mul", "add"),
        ("mul", fill),
        (fill, "add_"),
        ("x", "add_"),
        ("add_", "mul_1"),
        ("add", "mul_1"),
    }
    assert {size for *_, size in edges_of(graph)} == {24}
    moved = {name: op.bytes_moved for name, op in ops_of(graph).items()}
    assert moved[fill] == 2 * FLOAT + FLOAT  # two elements, and the number copied into them
    assert moved["add_"] == 3 * 24


class DeadCode(nn.Module):
    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        (x @ x).sum()
        buffer = torch.empty(3, 3)
        buffer.copy_(x)
        return buffer * x.shape[0]


def test_dead_code_and_unused_inputs_vanish() -> None:
    graph = capture(DeadCode(), (torch.zeros(3, 3), torch.zeros(99)))
    assert graph.op_names == ("x", "copy_", "mul")
    assert ops_of(graph)["copy_"].bytes_moved == 2 * 9 * FLOAT


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_share_a_group_and_count_once(device: str) -> None:
    with torch.device(device):
        model = Tied()
    graph = capture(model, torch.zeros(3, dtype=torch.long))
    ops = ops_of(graph)
    assert ops["embedding/embedding"].colocation == ops["head/linear"].colocation is not None
    assert ops["body/linear"].colocation is None
    assert ops["embedding/embedding"].kept_bytes == 40 * FLOAT
    assert ops["head/linear"].kept_bytes == 0
    assert graph.kept_bytes.sum() == state_bytes(model) == (40 + 16 + 4) * FLOAT
    # An embedding reads the rows it needs, not the table.
    assert ops["embedding/embedding"].bytes_moved == 3 * 8 + 2 * 3 * 4 * FLOAT


class SharedMemory(nn.Module):
    """Two parameters that are views of one buffer's memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.a = nn.Parameter(memory.view(2, 4))
        self.b = nn.Parameter(memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a.t()).sum() + self.b


def test_parameters_that_share_memory_are_one_state() -> None:
    graph = capture(SharedMemory(), torch.zeros(3, 4))
    assert graph.kept_bytes.sum() == 8 * FLOAT
    ops = ops_of(graph)
    assert ops["matmul"].colocation == ops["add"].colocation is not None


class Flattened(nn.Module):
    """Two parameters side by side in one memory, as recurrent layers hold them on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(12)
        self.a = nn.Parameter(memory[:8].view(2, 4))
        self.b = nn.Parameter(memory[8:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a.t()).sum() + self.b


@pytest.mark.parametrize("train", [False, True])
def test_neighbours_in_memory_are_separate_states(train: bool) -> None:
    graph = capture(Flattened(), torch.zeros(3, 4), train=train)
    assert graph.kept_bytes.sum() == 12 * FLOAT * (4 if train else 1)
    first = next(op for name, op in ops_of(graph).items() if name in ("matmul", "mm"))
    assert first.kept_bytes == 8 * FLOAT * (4 if train else 1)
    assert first.colocation is None or first.colocation != ops_of(graph)["add"].colocation


def test_unrolled_cells_share_one_group_per_layer() -> None:
    model = Unrolled()
    graph = capture(model, torch.zeros(2, 3, 4))
    groups = {}
    for i, kind in enumerate(graph.kinds):
        if kind == "aten.lstm_cell" or kind == "aten.linear":
            groups.setdefault(graph.modules[i], []).append(int(graph.colocation[i]))
    assert set(groups) == {"cells.0", "cells.1"}
    assert all(len(members) >= 3 and len(set(members)) == 1 and members[0] >= 0 for members in groups.values())
    assert groups["cells.0"][0] != groups["cells.1"][0]
    assert graph.kept_bytes.sum() == state_bytes(model)
    # The second layer's first step does not wait for the first layer's last: the wavefront is there.
    assert graph.n_edges < 60


def test_dropout_does_nothing_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2)).train()
    graph = capture(model, torch.zeros(1, 2))
    assert graph.op_names == ("input", "0/linear", "2/linear")
    assert model.training


class Keywords(nn.Module):
    def forward(
        self, x: torch.Tensor, *, scale: torch.Tensor, extra: dict[str, torch.Tensor], flag: bool = False
    ) -> Any:
        return x * scale + extra["bias"] if flag else x


def test_keyword_and_nested_inputs_are_named() -> None:
    kwargs = {"scale": torch.zeros(3), "extra": {"bias": torch.zeros(3)}, "flag": True}
    graph = capture(Keywords(), (torch.zeros(2, 3),), kwargs)
    assert [name for name, kind in zip(graph.op_names, graph.kinds, strict=True) if kind == "input"] == [
        "x",
        "scale",
        "extra_bias",
    ]
    assert edges_of(graph) >= {("extra_bias", "add", 12), ("scale", "mul", 12)}


class SharedTable(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.register_buffer("mask", torch.ones(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.mask
        return x


def test_a_shared_read_only_table_is_sent_not_glued() -> None:
    graph = capture(SharedTable(32), torch.zeros(32, 32))
    ops = ops_of(graph)
    assert ops["mask/buffer"].kind == "buffer"
    assert {(a, b, size) for a, b, size in edges_of(graph) if a == "mask/buffer"} == {
        ("mask/buffer", name, 32 * 32 * FLOAT) for name in ("mul", "mul_1", "mul_2")
    }
    assert (graph.colocation == -1).all()
    assert graph.kept_bytes.sum() == state_bytes(SharedTable(32))
    small = capture(SharedTable(4), torch.zeros(4, 4))
    assert "buffer" not in small.kinds  # 64 bytes are simply there on every device
    assert small.kept_bytes.sum() == state_bytes(SharedTable(4))


class CountingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x / self.total


def test_a_written_buffer_binds_its_users_and_orders_them() -> None:
    graph = capture(CountingBuffer(), torch.zeros(2, 4))
    ops = ops_of(graph)
    assert ops["add_"].colocation == ops["div"].colocation is not None
    assert ("add_", "div", 0) in edges_of(graph)
    assert graph.kept_bytes.sum() == 4 * FLOAT


class GradientSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(y) + 1


def test_regions_under_a_setting_are_opened() -> None:
    graph = capture(GradientSettings(), torch.zeros(3, 4))
    linears = [i for i, kind in enumerate(graph.kinds) if kind == "aten.linear"]
    assert len(linears) == 2
    assert [graph.dtypes[i] for i in linears] == ["float32", "bfloat16"]
    assert graph.flops.sum() == 2 * 2 * 3 * 4 * 4
    assert graph.modules[linears[1]] == "layer"


def test_flops_equal_torchs_counter() -> None:
    model = Branchy().eval()
    x = torch.rand(2, 4, 9, 9)
    graph = capture(model, x)
    # The CPU's fused attention has no formula in torch's counter, nor have the kernels that the other context avoids.
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_only, general_kernels(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    assert graph.flops.sum() == counter.get_total_flops() > 0
    assert graph.kept_bytes.sum() == state_bytes(model)


# Without capture's borrowing, torch.export remarks on how recurrent layers hold their weights.
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_an_exported_program_gives_the_same_graph(tmp_path: Any) -> None:
    x = torch.zeros(2, 4, 9, 9)
    model = Branchy().eval()
    program = torch.export.export(model, (x,), strict=False)
    captured = capture(model, x)
    direct = from_exported_program(program, "Branchy")
    assert direct.hash == captured.hash
    torch.export.save(program, tmp_path / "model.pt2")
    # A file has lost which tensors share memory; the operators' schemas make up for it.
    assert from_exported_program(torch.export.load(tmp_path / "model.pt2"), "Branchy").hash == captured.hash
