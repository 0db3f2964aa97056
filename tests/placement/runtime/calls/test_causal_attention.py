"""Context parallelism shares causal attention: stretches of the queries, and the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.sharded_models import check, check_inference, check_steps, planned
from torch import Tensor, nn
from torch.nn import functional

from graphs.capture import capture_program
from graphs.errors import StrategyError
from graphs.records import Work
from graphs.transforms.splitting.splitter import split
from graphs.transforms.strategy import MeshRule
from graphs.zoo import build

LENGTH, WIDTH, HEADS = 12, 16, 4


class Layer(nn.Module):
    """Causal attention: query, key and value of one product, or of their own with fewer heads of keys."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        widths = (3 * WIDTH,) if is_fused else (WIDTH, WIDTH // 2, WIDTH // 2)
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        parts = [one(self.norm(x)) for one in self.inputs]
        parts = parts[0].chunk(3, -1) if len(parts) == 1 else parts
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=len(self.inputs) > 1)
        result: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return result


class Words(nn.Module):
    """Two layers and the logits of the next word [N * T, V]."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(is_fused) for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.places(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def _words() -> tuple[Tensor]:
    return (torch.randint(0, 20, (4, LENGTH)),)


def _each(strategies: list[str], of_both: tuple[str, ...]) -> list[Any]:
    """Each strategy with queries, keys and values of one product; some with fewer heads of keys, the others slow."""
    slow = pytest.mark.slow
    others = [pytest.param(one, False, marks=() if one in of_both else slow) for one in strategies]
    return [(one, True) for one in strategies] + others


@pytest.mark.parametrize(
    ("strategy", "is_fused"),
    _each(
        [
            *("cp2", "cp3", "cp5", "dp2 zero3 | cp2", "dp2 zero1 | cp3 | mb2", "cp2 | mb2"),
            *("cp2 | recompute=layers.*", "cp2 | tp2 sp", "pp2 1f1b mb2 | cp2"),
        ],
        of_both=("cp3", "cp2 | tp2 sp"),
    ),
)
def test_training(strategy: str, is_fused: bool) -> None:
    check(Words(is_fused), _words(), strategy)


@pytest.mark.parametrize(
    "strategy",
    ["cp2 ulysses", "dp2 zero3 | cp2 ulysses", "cp2 ulysses | mb2 | recompute=layers.*", "pp2 1f1b mb2 | cp2 ulysses"],
)
def test_training_by_heads(strategy: str) -> None:
    check(Words(is_fused=True), _words(), strategy)


@pytest.mark.parametrize(
    ("strategy", "is_fused"),
    _each(
        [
            *("cp2 ring", "cp3 ring", "cp4 ring", "dp2 zero3 | cp2 ring", "cp2 ring | tp2 sp"),
            *("cp2 ring | mb2 | recompute=layers.*", "pp2 1f1b mb2 | cp2 ring"),
        ],
        of_both=("cp3 ring", "cp2 ring | tp2 sp"),
    ),
)
def test_training_in_a_ring(strategy: str, is_fused: bool) -> None:
    """Balanced parts of 12 words, and for 4 stretches, of which the first ones see nothing of later blocks."""
    check(Words(is_fused), _words(), strategy)


def test_heads_travel_and_no_keys_are_gathered() -> None:
    graph = capture_program(Words(is_fused=True), _words(), {}, True).graph
    kinds = [each.kind for each in split(graph, [MeshRule("cp", 2, by_heads=True).axis()]).collectives]
    assert "all_gather" not in kinds
    assert kinds.count("all_to_all") == 2 * 4  # of two layers: queries with keys and values, results, and gradients


def test_too_few_heads_and_heads_that_weights_cut_are_refused() -> None:
    program = capture_program(Words(is_fused=False), _words(), {}, True)
    with pytest.raises(StrategyError, match=r"into 4 parts, .* no attention with so many heads; take fewer parts"):
        planned(program, "cp4 ulysses")
    with pytest.raises(StrategyError, match=r"'cp' .'ulysses'. and 'tp' both cut attention by heads; leave out"):
        planned(program, "cp2 ulysses | tp2")


@pytest.mark.parametrize("is_fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_steps(is_fused: bool) -> None:
    strategy = "dp2 zero1 | cp2"
    check_steps(Words(is_fused), _words(), strategy, lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), 2)


@pytest.mark.parametrize("is_fused", [True, False])
def test_inference(is_fused: bool) -> None:
    check_inference(Words(is_fused), _words(), "cp3")


@pytest.mark.parametrize("strategy", ["cp2", "dp2 | cp2", "cp4 ring"])
def test_llama(strategy: str) -> None:
    made = build("llama3_8b", device="cpu", small=True, batch_size=4)
    check(made.model, made.train_args, strategy)


@pytest.mark.parametrize("is_fused", [True, False])
def test_each_part_has_its_share_of_the_work(is_fused: bool) -> None:
    program = capture_program(Words(is_fused), _words(), {}, True)
    applied = planned(program, "cp2").values.applied
    assert not applied.note
    cut = applied.problem.graph
    attention = (Work.ATTENTION, Work.ATTENTION_BACKWARD)
    before, after = (
        [one.extents[op].tolist() for op in range(one.n_ops) if Work(one.work[op]) in attention]
        for one in (program.graph, cut)
    )
    assert len(after) == 2 * len(before) == 8
    assert {tuple(one) for one in before} == {(16.0, 12.0, 12.0, 4.0, 0.5)}
    assert {tuple(one) for one in after} == {(16.0, 6.0, 12.0, 4.0, 0.5)}


def test_parts_have_a_stretch_of_each_half() -> None:
    plan = planned(capture_program(Words(is_fused=True), _words(), {}, True), "cp3")
    assert [plan.input_layout("words", rank).runs(1) for rank in range(3)] == [
        ((0, 2), (10, 12)),
        ((2, 4), (8, 10)),
        ((4, 6), (6, 8)),
    ]
    by_heads = planned(capture_program(Words(is_fused=True), _words(), {}, True), "cp2 ulysses")
    assert by_heads.input_layout("words", 0).runs(1) == ((0, 6),)  # heads are even already


def test_lengths_that_do_not_divide_are_cut_into_stretches() -> None:
    plan = planned(capture_program(Words(is_fused=True), _words(), {}, True), "cp4")
    assert plan.input_layout("words", 1).runs(1) == ((3, 6),)
    assert "the last of 4 stretches has 1.75 times the mean of its work" in plan.values.applied.note
    assert "a multiple of 8" in plan.values.applied.note
