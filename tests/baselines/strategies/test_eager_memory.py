"""The peak predicted for an eager step beside the tensors that a step of PyTorch really holds, and what it rests on."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import peak_of_step
from torch import nn
from torch.nn import functional

from baselines.strategies.applied import applied
from baselines.strategies.searching.scoring import scored
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from env.simulation.timeline import memory_steps
from graphs.capture import capture
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy

ONE, TWO = Cluster.preset("1xH100"), Cluster.preset("8xH100-nvswitch")


class Fused(nn.Dropout):
    """Dropout as a GPU does it: one kernel, and a mask of truth values."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(input, self.p, self.training)[0]


class Block(nn.Module):
    def __init__(self, dropout: type[nn.Dropout] = nn.Dropout, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = self.dropout((q @ k.transpose(2, 3)).softmax(3))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


def blocks(dropout: type[nn.Dropout] = nn.Dropout) -> nn.Module:
    return nn.Sequential(Block(dropout), Block(dropout), nn.Linear(32, 100))


def wide(dropout: type[nn.Dropout] = nn.Dropout) -> nn.Module:
    """More parameters than activations, most of them in the layers that the backward pass reaches last."""
    return nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), dropout(0.1), nn.Linear(64, 32))


@pytest.mark.parametrize(("make", "rows"), [(blocks, 4), (blocks, 1), (wide, 64)])
def test_a_step_holds_the_tensors_of_pytorch(make: Any, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 24, 32)
    real = make(Fused)
    truth = peak_of_step(real, lambda: real(x).mean(), x)
    graph = capture(make(), (x,), train=True, loss=lambda y: y.mean())
    assert scored(graph, ONE, Strategy()).peak_bytes == pytest.approx(truth, rel=0.03)


def llama(heads: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=heads, use_cache=False)
    tokens = torch.zeros(2, 48, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def test_transformers_sees_no_packed_sequences_where_nobody_gives_positions() -> None:
    model, given = llama()
    truth = peak_of_step(model, lambda: model(**given).loss, given)
    graph = capture(model, (), given, train=True)
    assert scored(graph, ONE, Strategy()).peak_bytes == pytest.approx(truth, rel=0.03)
    assert not any("where" in kind for kind in graph.kinds)
    packed = capture(model, (), given | {"position_ids": torch.zeros(2, 48, dtype=torch.long)}, train=True)
    assert any("where" in kind for kind in packed.kinds)


def graph_of(make: Any = wide) -> OpGraph:
    return capture(make(), (torch.zeros(8, 4, 32),), train=True, loss=lambda y: y.mean())


def test_gradients_come_in_the_backward_pass_and_stay() -> None:
    graph = graph_of()
    assert (graph.standing_bytes == graph.parameter_bytes + graph.optimizer_bytes).all()
    assert graph.coming_bytes.sum() == graph.gradient_bytes.sum()
    assert all(graph.phase[graph.coming_bytes > 0] == Phase.BACKWARD)
    problem, plan = Problem(graph, ONE), Plan(np.zeros(graph.n_ops, dtype=np.int64), np.arange(graph.n_ops))
    score, schedule = Simulator(problem).schedule(plan)
    (times_s, held), *_ = memory_steps(problem, schedule)
    before = schedule.op_start_s[graph.coming_bytes > 0].min()
    assert held.max() == score.peak_bytes[0]
    assert held[times_s < before].max() < held.max() - graph.gradient_bytes.sum() // 2
    # All are there until the last update has ended, as `zero_grad` comes after it.
    assert held[times_s < schedule.op_end_s.max()][-1] >= graph.kept_bytes.sum()


def test_buffers_are_there_from_the_beginning() -> None:
    graph = graph_of()
    fused = on_stack(graph, "fused")  # as Megatron's
    unknown = dataclasses.replace(graph, tensor_in_place=np.zeros(graph.n_tensors, dtype=np.bool_))
    for each in (fused, unknown):
        assert (each.standing_bytes == each.kept_bytes).all()
        assert not each.coming_bytes.any()


@pytest.mark.parametrize(
    ("text", "comes"),
    [
        *(("none", True), ("mb2", True), ("tp2", True), ("dp2 zero2", True), ("dp2 zero3 | mb2", True)),
        *(("dp2", False), ("dp2 zero1", False), ("dp2 | mb2", False)),
    ],
)
def test_buckets_are_kept_for_the_whole_step(text: str, comes: bool) -> None:
    split = applied(graph_of(), TWO, Strategy.parse(text)).derived.graph
    assert split.coming_bytes.sum() == (split.gradient_bytes.sum() if comes else 0)


@pytest.mark.parametrize("stack", ["eager", "compiled", "fused"])
@pytest.mark.parametrize("text", ["none", "mb2", "dp2", "dp2 zero3 | mb2", "pp2 1f1b mb2 | dp2 zero2", "tp2 sp"])
def test_the_reference_agrees(stack: str, text: str) -> None:
    made = applied(on_stack(graph_of(), stack), TWO, Strategy.parse(text))
    graph = made.problem.graph
    reference = simulate_reference(graph, made.problem.cluster, made.plan)
    assert reference.peak_bytes == tuple(Simulator(made.problem).score(made.plan).peak_bytes.tolist())
