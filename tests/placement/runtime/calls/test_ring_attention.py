"""Attention in a ring: keys and values come block by block, and results and gradients are those of one call."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.sharded_models import Ranks, check, planned
from torch import Tensor, nn
from torch.nn import functional

from graphs.capture import capture_program
from graphs.capture.record import argument_leaves, default_loss
from graphs.errors import StrategyError
from placement.runtime.calls.ring_calls import pieces_of
from placement.runtime.program.on_device import attention, attention_backward, run_on
from placement.runtime.writing.writer import write

LENGTH, WIDTH = 16, 12


class Attention(nn.Module):
    """Attention of three heads, and what it makes of its results; masks of two kinds, or none."""

    def __init__(self, mask: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 5)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (3, -1)).transpose(1, 2) for one in self.inputs)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if self.mask == "given" else None
        attended = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=self.mask == "causal")
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("mask", ["", "causal"])
@pytest.mark.parametrize("strategy", ["cp2 ring", "cp4 ring", "dp2 | cp2 ring"])
def test_gradients_are_those_of_whole_attention(mask: str, strategy: str) -> None:
    """In float64, to the last digits but a few."""
    model = Attention(mask).double()
    args = (torch.randn(2, LENGTH, WIDTH, dtype=torch.float64),)
    program = capture_program(copy.deepcopy(model), args, {}, True)
    ranks = Ranks(planned(program, strategy), copy.deepcopy(model), argument_leaves(model, args, {}))
    given_by_ranks = ranks.step()
    plain = copy.deepcopy(model)
    expected = default_loss(plain(*args))
    expected.backward()
    torch.testing.assert_close(given_by_ranks[0]["loss", 0], expected.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in plain.named_parameters():
        gradient = given_by_ranks[0]["gradient", name]
        torch.testing.assert_close(gradient.reshape(parameter.shape), parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("mask", "dropout"), [("given", 0.0), ("causal", 0.5)])
def test_masks_and_dropout_are_refused_and_heads_take_masks(mask: str, dropout: float) -> None:
    args = (torch.randn(2, LENGTH, WIDTH),)
    program = capture_program(Attention(mask, dropout), args, {}, True)
    with pytest.raises(StrategyError, match=r"without mask and dropout.*leave out 'ring'.*'ulysses'"):
        planned(program, "cp2 ring")
    if mask == "given":
        check(Attention(mask), args, "cp3 ulysses")
        check(Attention(mask), args, "cp2")


def test_lengths_and_inference_are_refused() -> None:
    args = (torch.randn(2, LENGTH, WIDTH),)
    with pytest.raises(StrategyError, match="of a length that 3 divides"):
        planned(capture_program(Attention("causal"), args, {}, True), "cp3 ring")
    with pytest.raises(StrategyError, match="one call in a training step"):
        planned(capture_program(Attention("causal").eval(), args, {}, False), "cp2 ring")


@given(st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_pieces_are_the_pairs_of_a_causal_mask(parts: int, words: int, is_balanced: bool) -> None:
    """Each query sees the keys up to its own place once, whatever block they come in."""
    length = 2 * parts * words
    seen = torch.zeros(length, length, dtype=torch.int64)
    stretches = [(i * words, (i + 1) * words) for i in range(2 * parts)]
    runs = [(stretches[r], stretches[-1 - r]) for r in range(parts)]
    if not is_balanced:
        runs = [((2 * r * words, 2 * (r + 1) * words),) for r in range(parts)]  # type: ignore[misc]
    places = [torch.cat([torch.arange(*run) for run in each]) for each in runs]
    for queries, at in zip(runs, places, strict=True):
        for keys, of in zip(runs, places, strict=True):
            for piece in pieces_of(queries, keys, is_causal=True):
                block = torch.ones(piece.high - piece.low, piece.keys, dtype=torch.int64)
                block = block.tril() if piece.is_causal else block
                seen[at[piece.low : piece.high, None], of[None, : piece.keys]] += block
    assert torch.equal(seen, torch.ones_like(seen).tril())


def test_balanced_parts_have_the_same_to_do() -> None:
    runs = [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]
    pairs = [
        [sum((p.high - p.low) * p.keys / (2 if p.is_causal else 1) for p in pieces_of(q, k, True)) for k in runs]
        for q in runs
    ]
    assert pairs == [[8.0] * 4] * 4
    assert all(len(pieces_of(q, k, True)) == 1 for q in runs for k in runs)  # one call of the operator


@pytest.mark.parametrize("strategy", ["cp2", "cp2 ring"])
def test_code_of_a_gpu_calls_its_kernels(strategy: str) -> None:
    """The operators inside of what stands in for attention are those of the device."""
    plan = planned(capture_program(Attention("causal"), (torch.randn(2, LENGTH, WIDTH),), {}, True), strategy)
    module = write(plan, 0).routine.module
    run_on(module.graph, torch.device("cuda"))
    kernels = [getattr(node.target, "target", None) for node in module.graph.nodes]
    turns = 2 if "ring" in strategy else 1
    assert kernels.count(attention) == kernels.count(attention_backward) == turns
    assert not any("for_cpu" in str(node.target) for node in module.graph.nodes)
