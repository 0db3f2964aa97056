"""Capture in a precision: casts are ops, states have the bytes of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphs.capture import capture, capture_program
from graphs.errors import CaptureError, UnknownNameError
from graphs.formatting import format_bytes
from graphs.kept import kept_state, kept_words
from graphs.opgraph import OpGraph, Phase
from graphs.recipes import PRECISIONS
from graphs.transforms.optimizers import with_optimizer


def net(**how: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, **how), nn.ReLU(), nn.LayerNorm(64, **how), nn.Linear(64, 8, **how))


def captured(precision: str | None, model: nn.Module | None = None, **how: Any) -> OpGraph:
    return capture(model or net(), torch.zeros(4, 32), train=True, precision=precision, **how)


@pytest.mark.parametrize(
    ("precision", "parameter", "gradient", "state", "moved"),
    [
        ("float32", 4, 4, 8, 4 + 2 * 4 + 2 * 8),
        ("bfloat16", 2, 2, 4, 2 + 2 * 2 + 2 * 4),
        ("mixed", 4, 4, 8, 4 + 2 * 4 + 2 * 8),  # 16 bytes a parameter
        ("mixed-bf16-reduce", 4, 2, 8, 2 + 2 * 4 + 2 * 8),
        ("master", 2, 4, 4 + 8, 4 + 2 + 2 * 12),  # 18 bytes a parameter
        ("master-bf16-reduce", 2, 2, 4 + 8, 2 + 2 + 2 * 12),  # 16 bytes a parameter
    ],
)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_states_have_the_bytes_of_the_formulas(
    precision: str, parameter: int, gradient: int, state: int, moved: int, given: torch.dtype
) -> None:
    graph = captured(precision, net(dtype=given))
    n = sum(p.numel() for p in net().parameters())
    assert graph.parameter_bytes.sum() == parameter * n
    assert graph.gradient_bytes.sum() == gradient * n
    assert graph.optimizer_bytes.sum() == state * n
    assert graph.bytes_moved[graph.phase == Phase.UPDATE].sum() == moved * n
    assert graph.origin.precision == precision
    assert kept_state(graph, precision, "adam").total_bytes == graph.kept_bytes.sum()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_optimizer_is_as_if_captured_with_it(precision: str) -> None:
    assert with_optimizer(captured(precision), "momentum") == captured(precision, optimizer="momentum")


def test_products_read_narrow_numbers_and_gradients_are_wide() -> None:
    for precision in ("mixed", "master"):
        graph = captured(precision)
        products = [i for i, kind in enumerate(graph.kinds) if "mm" in kind]
        assert {graph.dtypes[i] for i in products} == {"bfloat16"}
        in_place = graph.tensor_producer[graph.tensor_in_place].tolist()
        assert {(graph.kinds[i], graph.dtypes[i]) for i in in_place} == {("aten._to_copy", "float32")}


def test_a_gradient_is_cast_as_soon_as_it_is_complete() -> None:
    for precision in ("mixed", "master"):
        graph = captured(precision)
        last = {name: graph.op_names.index(name) for name in graph.op_names}
        casts = [i for name, i in last.items() if name.startswith("3/_to_copy") and graph.phase[i] == Phase.BACKWARD]
        assert len(casts) == 2
        assert max(casts) < last["0/mm"]


def test_the_model_is_lent_and_keeps_its_formats() -> None:
    model = net()
    before = dict(model.named_parameters())
    captured("mixed", model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Odd(nn.Module):
    """Uses weights in every way there is: tied, of an LSTM, another module's, in a region that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, words: Tensor) -> Tensor:
        x, _ = self.lstm(self.words(words))
        x = x + self.attention(x, x, x)[0]
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        return self.head(x * self.scale.to(x.dtype))


def test_weights_are_cast_once_however_they_are_read() -> None:
    graph = capture(Odd(), torch.zeros(3, 2, dtype=torch.long), train=True, precision="mixed")
    n = sum(p.numel() for p in Odd().parameters())
    assert graph.kept_bytes.sum() == 16 * n + 4 * 8
    readers = {state.name: state.users for state in graph.states}
    for name, users in readers.items():
        forward = [u for u in users if graph.phase[graph.op_names.index(u)] == Phase.FORWARD]
        assert name == "scale" or len(forward) == 1


def test_inference_casts_too() -> None:
    graph = capture(net(), torch.zeros(4, 32), precision="mixed")
    assert sum(kind == "aten._to_copy" for kind in graph.kinds) == 1 + 6
    assert graph.kept_bytes.sum() == captured("mixed").parameter_bytes.sum()


def test_a_program_has_states_in_the_formats_of_the_precision() -> None:
    for precision, dtype in (("mixed", torch.float32), ("master", torch.bfloat16)):
        program = capture_program(net(), torch.zeros(4, 32), train=True, precision=precision)
        assert {info.layout.dtype for info in program.state_infos} == {dtype}


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(UnknownNameError, match="unknown precision 'mixd', did you mean 'mixed'"):
        captured("mixd")
    with pytest.raises(CaptureError, match="with granularity='module' there are none; leave the granularity out"):
        captured("master", granularity="module")
    with pytest.raises(CaptureError, match=r"'master-fp8' makes casts .* with granularity='module' there are none"):
        captured("master-fp8", granularity="module")

    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, dtype=torch.long), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    with pytest.raises(CaptureError, match="no floating-point parameter for precision 'master'"):
        capture(Integers(), torch.zeros(4), precision="master")


def test_words_about_memory_say_the_precision() -> None:
    n = sum(p.numel() for p in net().parameters())
    said = f"{format_bytes(18 * n)} in master (parameters {format_bytes(2 * n)}"
    assert kept_words(captured("master")).startswith(said)
    assert " in " not in kept_words(captured(None))
