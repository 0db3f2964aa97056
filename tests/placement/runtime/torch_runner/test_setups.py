"""What strategies say to modules that are cut as one, and which of them they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placement
from graphs.errors import MismatchError, PlacementError
from placement.runtime.setups.context_plan import context_plan
from placement.runtime.setups.expert_plan import expert_plan
from placement.runtime.setups.facts_of import facts_of
from placement.runtime.setups.tensor_plan import tensor_plan

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
