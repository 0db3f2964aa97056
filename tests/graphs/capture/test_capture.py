"""Capture of inference graphs, on models small enough to count by hand."""

from __future__ import annotations

import logging
import random
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import captured_models
import numpy as np
import pytest
import torch
from captured_models import FLOAT, Failing, Perceptron, Tied, Unrolled, edges_of, ops_of, state_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from graphs.capture import capture, costs, from_exported_program
from graphs.capture.costs import general_kernels
from graphs.errors import CaptureError, UnknownNameError
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


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rnn = nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.bilinear = nn.Bilinear(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.conv(x)).flatten(2).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(y, y, y)
        y, _ = self.attention(y, y, y, need_weights=False)
        y, _ = self.rnn(y)
        return self.bilinear(y, y).sum() + torch.einsum("bij,bkj->bik", y, y).sum()


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


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4)).train()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before = {
        name: (tensor, tensor.clone(), tensor.requires_grad)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    random_state = torch.get_rng_state()
    for train in (False, True):
        for granularity in ("op", "module"):
            capture(model, torch.zeros(3, 4), train=train, granularity=granularity)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (tensor, value, requires_grad) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad == requires_grad
        assert tensor.grad is None
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random_state)
    model(torch.rand(3, 4))


class Remembering(nn.Module):
    """Keeps what it saw, and fails after that."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: Any = None
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.layer(x)
        if self.fails:
            raise KeyError("no such thing")
        return self.seen


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_restored_after_an_error_too(train: bool) -> None:
    model = Remembering(fails=True).eval()
    weight = model.layer.weight
    with pytest.raises(CaptureError, match="no such thing"):
        capture(model, torch.zeros(1, 2), train=train)
    assert model.seen is None
    assert model.layer.weight is weight
    assert not model.training
    assert not model._forward_hooks


class Dropping(nn.Module):
    """Leaves out layers by the random numbers of a library that no graph has."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.last, self.draw = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (np.random.random, "numpy.random")])
def test_layers_that_are_left_out_at_random(draw: Callable[[], float], name: str, train: bool) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    drawn = []
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"Dropping draws from {name} when it runs; what is captured is one draw"):
            drawn.append(capture(Dropping(draw), (torch.zeros(1, 2),), train=train).n_ops)
    assert drawn[0] == drawn[1]


class Mixed(Perceptron):
    """Computes in a region of ``torch.autocast``."""

    def __init__(self, region: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            return super().forward(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("train", [False, True])
def test_autocast_for_cuda_without_cuda_is_that_of_the_cpu(train: bool) -> None:
    made_before = torch.autocast("cuda", dtype=torch.bfloat16)
    regions: list[tuple[Callable[[], torch.autocast], str]] = [
        (lambda: torch.autocast("cuda", dtype=torch.bfloat16), "bfloat16"),
        (lambda: torch.autocast("cuda"), "float16"),
        (lambda: made_before, "bfloat16"),
        (lambda: torch.autocast("cuda", enabled=False), "float32"),
    ]
    for region, dtype in regions:
        graph = capture(Mixed(region), (torch.zeros(2, 4),), train=train)
        products = {op.dtype for op in graph.records()[0] if op.flops}
        assert products == {dtype}
    assert made_before.device == "cuda"
    assert not torch.is_autocast_enabled("cpu")


class Hooked(nn.Module):
    """Hooks of its layers keep what they see, in all the places where something can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept, self.calls = (
            nn.Linear(2, 2),
            {"all": [deque([1])]},
            SimpleNamespace(seen={1, 2}, last=[]),
        )
        self.shown: list[Any] = []
        shown = self.shown
        outside: dict[str, Any] = {}
        self.layer.register_forward_hook(lambda module, args, out: shown.append(out))
        self.layer.register_forward_hook(lambda module, args, out: outside.__setitem__("out", out))
        self.outside = outside
        self.layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.kept["all"][0].append(out)
        self.kept["new"] = [out]
        self.calls.seen.add(out)
        self.calls.last.append(out)
        self.calls.new = out

    def forward(self, x: torch.Tensor) -> Any:
        self.layer(x)
        return self.kept, self.outside["out"] * 2


@pytest.mark.parametrize("granularity", ["op", "module"])
@pytest.mark.parametrize("train", [False, True])
def test_what_hooks_keep_is_as_it_was(train: bool, granularity: str) -> None:
    model = Hooked()
    kept, queue = model.kept, model.kept["all"][0]
    capture(model, torch.zeros(3, 2), train=train, granularity=granularity)
    assert model.kept is kept
    assert kept == {"all": [queue]}
    assert queue == deque([1])
    assert vars(model.calls) == {"seen": {1, 2}, "last": []}
    assert not model.shown
    assert not model.outside


def test_capture_is_deterministic() -> None:
    args = (torch.zeros(2, 4, 9, 9),)
    assert capture(Branchy(), args).hash == capture(Branchy(), args).hash
    with torch.device("meta"):
        on_meta = Branchy()
    assert capture(on_meta, args).hash == capture(Branchy(), args).hash


def test_models_and_inputs_may_be_fake_already() -> None:
    with FakeTensorMode():
        model, x = Tied(), torch.zeros(3, dtype=torch.long)
        inside = capture(model, x)
    assert inside.hash == capture(model, x).hash == capture(Tied(), torch.zeros(3, dtype=torch.long)).hash


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


@pytest.mark.parametrize("train", [False, True])
def test_a_failure_names_module_line_and_way_out(train: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(captured_models.__file__)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if text.endswith("# the line"))
    with pytest.raises(CaptureError) as caught:
        capture(Failing(), torch.zeros(3, 4), train=train)
    message = str(caught.value)
    assert "'blocks.1.0' (Choosing)" in message
    assert f"{file}:{line}" in message
    assert "depends on the data" in message
    assert message.endswith('pass granularity="module" to capture leaf modules as ops.')
    assert "\n" not in message
    assert capsys.readouterr().err == ""


class Selecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x.sum(1) > 0).squeeze(1)] * 2


def test_a_size_that_depends_on_data_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"module '0' .*test_capture\.py:\d+: .*size that depends on data \(u0\)"):
        capture(nn.Sequential(Selecting()), torch.zeros(3, 4))


@pytest.mark.parametrize("train", [False, True])
def test_a_shape_error_names_the_users_line(train: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, handler = log.level, logging.StreamHandler()  # to the stderr of this test
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError, match=re.escape("'first' (Linear)") + ".*captured_models.py:") as caught:
            capture(Perceptron(), torch.zeros(3, 5), train=train)
    finally:
        log.removeHandler(handler)
    assert str(caught.value).endswith("; check that the model runs on these inputs.")
    assert capsys.readouterr().err == ""  # torch logs the traceback of its own kernel
    assert log.level == level


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape != y.shape:
            raise ValueError("unlike inputs")
        return x + y


@pytest.mark.parametrize("train", [False, True])
def test_inputs_the_model_refuses_do_not_advise_another_granularity(train: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.append(Pair())
    for broken, args, match in (
        (model, torch.zeros(3, 4), "missing .*'y'"),
        (Perceptron(), (), "missing"),
        (_Checked(), torch.zeros(3, 4), "ValueError: unlike inputs"),
    ):
        with pytest.raises(CaptureError, match=match + ".*; check that the model runs on these inputs"):
            capture(broken, args, train=train)


class Inverse(nn.Module):
    """Its window must not be zero, which is looked at when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(4)
        return torch.istft(torch.stft(x, 4, window=window, return_complex=True), 4, window=window)


def test_a_composite_operator_that_looks_at_values() -> None:
    graph = capture(Inverse(), (torch.zeros(2, 16),))
    assert "aten.istft" in graph.kinds


class OwnError(Exception):
    """Of the model's own code."""


class Strict(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_a_tracers_error_in_the_words_of_the_model_is_the_tracers() -> None:
    class Wrapping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x if x.sum() > 0 else -x
            except Exception as error:
                raise ValueError("cannot choose") from error

    with pytest.raises(CaptureError, match='cannot choose; pass granularity="module"'):
        capture(Wrapping(), (torch.zeros(2),))


class Forgetful(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Misspelt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shap[0]  # type: ignore[attr-defined, no-any-return]


class Optional(nn.Module):
    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        return x + y  # type: ignore[no-any-return]


class Classes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x, torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "x", "reason"),
    [
        (nn.Embedding(10, 4), torch.zeros(2, 3), "Expected tensor for argument #1 'indices'"),
        (nn.BatchNorm2d(3), torch.zeros(2, 4, 5, 5), "running_mean should contain 4 elements not 3"),
        (nn.BatchNorm2d(3), torch.zeros(2, 3), r"expected 4D input \(got 2D input\)"),
        (nn.Conv2d(3, 8, 3), torch.zeros(2, 4, 9, 9), r"to have 3 channels, but got 4"),
        (nn.Conv2d(3, 8, 5), torch.zeros(2, 3, 3, 3), "Kernel size can't be greater than actual input size"),
        (nn.Linear(3, 3), None, "must be Tensor, not NoneType"),
        (nn.LSTM(4, 8), torch.zeros(2, 3, 5), "Expected 4, got 5"),
        (nn.Conv1d(3, 8, 3), torch.zeros(2, 3, 9).double(), r"Input type \(double\) and bias type \(float\)"),
        (Strict(RuntimeError("eight words at most")), torch.zeros(2, 3), "eight words at most"),
        (Strict(OwnError("metadata are missing")), torch.zeros(2, 3), "metadata are missing"),
        (Strict(ZeroDivisionError("no heads")), torch.zeros(2, 3), "no heads"),
        (Classes(), torch.zeros(2, 3), "Expected input batch_size"),
        (Forgetful(), torch.zeros(2, 3), "'Forgetful' object has no attribute 'layer'"),
        (Misspelt(), torch.zeros(2, 3), "'Tensor' object has no attribute 'shap'"),
        (Optional(), torch.zeros(2, 3), r"unsupported operand type\(s\) for \+: 'Tensor' and 'NoneType'"),
    ],
)
def test_what_a_layer_refuses_is_not_blamed_on_the_granularity(layer: nn.Module, x: Any, reason: str) -> None:
    match = (
        rf"in module '1' \({type(layer).__name__}\).*: \w+: .*{reason}.*; check that the model runs on these inputs\.$"
    )
    with pytest.raises(CaptureError, match=match):
        capture(nn.Sequential(nn.Identity(), layer), (x,))


class Differences(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diff(x, n=30).sum() + torch.diff(x, n=31).sum() + torch.diff(x, n=32).sum()


def test_calls_of_all_composite_operators_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some 155 calls each; the sizes are in no other test, so that none is cached.
    monkeypatch.setattr(costs, "MOST_CALLS", 320)
    with pytest.raises(CaptureError, match="may be made of 320 in all; pass granularity"):
        capture(Differences(), torch.zeros(2, 173))
    monkeypatch.setattr(costs, "MOST_CALLS", 640)
    assert capture(Differences(), torch.zeros(2, 174)).n_ops == 9


class _Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(x * self.weight, self.weight)


def test_bad_arguments() -> None:
    with pytest.raises(UnknownNameError, match="granularity"):
        capture(Perceptron(), torch.zeros(3, 4), granularity="modules")
    with pytest.raises(UnknownNameError, match="'adam'"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, optimizer="adan")
    with pytest.raises(UnknownNameError, match="Valid: adam, adamw, momentum, sgd"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, optimizer=torch.optim.Adam)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="got loss='mse'; expected a function"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, loss="mse")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"loss= does not take the model's output \(TypeError: MSELoss"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, loss=nn.MSELoss())
    with pytest.raises(CaptureError, match=r"expected a torch\.nn\.Module"):
        capture(torch.relu, torch.zeros(3, 4))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"'0' \(LazyLinear\) is lazy"):
        capture(nn.Sequential(nn.LazyLinear(3)), torch.zeros(3, 4))
    with pytest.raises(CaptureError, match="computes nothing"):
        capture(nn.Identity(), torch.zeros(3))
