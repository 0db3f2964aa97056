"""What strategies say to modules that are cut as one, and which of them they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placement
from graphs.capture import capture_program
from graphs.errors import MismatchError, PlacementError
from placement.runtime.checking.ops_in_parts import ops_in_parts
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.setups.context_plan import context_plan, expert_plan
from placement.runtime.setups.facts_of import facts_of, setup_of
from placement.runtime.setups.tensor_plan import tensor_plan
from placement.runtime.torch_runner.batch import laid_out
from placement.runtime.torch_runner.setup import Setup
from placement.runtime.torch_runner.step import of_all_samples
from placement.solving.strategy_row import strategy_row

CLUSTER = placement.Cluster.preset("4xV100-pcie")
WORDS = torch.arange(32).reshape(4, 8)


class Encoder(nn.Module):
    """Two layers of torch's own."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, heads, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.words = nn.Embedding(32, 24)
        self.encoder, self.scores = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 32)

    def forward(self, words: Tensor, labels: Tensor, padding: Tensor | None = None) -> Tensor:
        scores = self.scores(self.encoder(self.words(words), src_key_padding_mask=padding))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def captured(model: nn.Module, **more: Any) -> Any:
    return placement.capture(model, (), {"words": WORDS, "labels": WORDS.flip(1), **more}, train=True)


def strategy(text: str) -> Any:
    return placement.Strategy.parse(text)


def test_attention_is_cut_as_one() -> None:
    model = Encoder()
    plan = tensor_plan(captured(model), strategy("tp2"), model, [], local=False)
    assert plan.styles["encoder.layers.*.self_attn"] == "AttentionParallel()"
    assert not plan.whole


def test_heads_that_are_not_divided_are_refused() -> None:
    model = Encoder(heads=3)
    with pytest.raises(MismatchError, match=r"self_attn has 3 heads, which tp2 does not divide"):
        tensor_plan(captured(model), strategy("tp2"), model, [], local=False)


def test_stages_have_whole_layers() -> None:
    model = Encoder()
    graph = captured(model)
    result = placement.optimize(graph, CLUSTER, strategy="pp2 1f1b mb2", target="any", seed=0)
    stages = facts_of(result, graph, model).stages
    assert stages is not None
    assert [path for own in stages.modules for path in own if "self_attn" in path] == []
    assert stages.modules[0] == ("words", "encoder.layers.0")


def test_modules_that_compute_parts_again_hold_no_other_such() -> None:
    model = Encoder()
    graph = captured(model)
    result = placement.optimize(graph, CLUSTER, strategy="recompute=kind:*", target="any", seed=0)
    found = facts_of(result, graph, model).cores
    assert not [path for path in found for other in found if path.startswith(f"{other}.") or (path and not other)]


def test_what_is_not_by_samples_is_named_where_parts_meet() -> None:
    mixed = {"words": torch.zeros(8, 2), "labels": torch.zeros(4, 2)}
    replicas = SimpleNamespace(_setup=Setup({}, batch=8, replicas=2, cuts_batch=True), _mesh=None)
    with pytest.raises(
        MismatchError, match=r"'labels' has 4 in dimension 0, .* 'words' has 8, all of it; give both in"
    ):
        StrategyModule._check_batch(replicas, mixed)  # type: ignore[arg-type]
    mesh: Any = None
    with pytest.raises(ValueError, match=r"shape \(16, 4\), which is not by samples, .* a loss that balances experts"):
        laid_out(torch.zeros(16, 4, requires_grad=True), 2, mesh, is_cut=False)
    caches = SimpleNamespace(keys=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"returns a SimpleNamespace, .* with use_cache=False"):
        of_all_samples(caches, mesh, Setup({}, batch=8, replicas=2))


def test_sequences_are_cut_between_attention() -> None:
    model = Encoder()
    plan = context_plan(captured(model), strategy("cp2 ulysses | tp2"), model)
    assert plan is not None
    assert plan.variant == "ulysses"
    assert plan.inputs == {"words": 1, "labels": 1}
    assert plan.modules == ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn")


def test_attention_that_hides_its_kernel_is_refused() -> None:
    model = Encoder()
    with pytest.raises(MismatchError, match=r"nn\.MultiheadAttention of .*take dp2"):
        context_plan(captured(model), strategy("cp2"), model)


def test_masks_of_parts_of_sequences_are_refused() -> None:
    model = Encoder()
    with pytest.raises(MismatchError, match=r"has a mask, .*take dp2"):
        context_plan(captured(model, padding=WORDS > 30), strategy("cp2"), model)


def test_experts_that_are_not_stacked_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PlacementError):
        expert_plan(placement.capture(model, (torch.randn(4, 4),), train=True), strategy("ep2"), model)


class Head(nn.Module):
    """A linear head on [batch, height, width, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 2, 20)
        return nn.functional.cross_entropy(self.head(x).permute(0, 3, 1, 2), labels, weight=weight)


def test_a_loss_of_images_reads_whole_scores() -> None:
    model, args = Head(), (torch.randn(8, 6, 6, 16), torch.randint(20, (8, 6, 6)))
    graph = placement.capture(model, args, train=True)
    row = strategy_row(graph, placement.Cluster.preset("4xV100-pcie"), placement.Strategy.parse("tp2"))
    assert not setup_of(row.result, graph, model).cuts_loss


def test_a_weighted_loss_is_right_in_parts() -> None:
    program = capture_program(Head(), (torch.randn(8, 6, 6, 16), torch.randint(20, (8, 6, 6))), train=True)
    assert not ops_in_parts(program, placement.Strategy.parse("dp2"), math.inf).problem
