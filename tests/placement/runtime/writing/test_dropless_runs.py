"""Dropless experts of transformers that are spread over ranks: the numbers of one device, however uneven the load."""

from __future__ import annotations

import pytest
import torch
import transformers
from parallel.sharded_models import check
from torch import nn

from graphs.errors import StrategyError

SIZES = {
    **{"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 8, "max_position_embeddings": 16},
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=words, labels=words, use_cache=False).loss
        return loss


def qwen3(experts: int = 4) -> nn.Module:
    config = transformers.Qwen3MoeConfig(moe_intermediate_size=16, num_experts=experts, num_experts_per_tok=2, **SIZES)
    return WithLoss(transformers.Qwen3MoeForCausalLM(config))


def with_a_shared_expert() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2, **SIZES
    )
    return WithLoss(transformers.Qwen2MoeForCausalLM(config))


@pytest.mark.parametrize(
    "strategy",
    [
        "ep2",
        "dp2 zero3 | ep2 | mb2",
        "dp2 | dp2 zero1 | ep2",
        "ep2 zero2",
        pytest.param("ep2 | tp2", marks=pytest.mark.slow),
        pytest.param("ep4 | recompute=model.model.layers.*", marks=pytest.mark.slow),
        pytest.param("pp2 1f1b mb2 | ep2", marks=pytest.mark.slow),
    ],
)
def test_training(strategy: str) -> None:
    check(qwen3(), (torch.randint(20, (8, 4)),), strategy)


def test_a_shared_expert_beside_them() -> None:
    check(with_a_shared_expert(), (torch.randint(20, (4, 4)),), "ep2")


def test_an_expert_that_nobody_asks() -> None:
    """Fewer requests than experts: some devices have no tokens at all."""
    check(qwen3(experts=16), (torch.randint(20, (2, 2)),), "ep2")


def test_a_sequence_cut_beside_them_is_refused() -> None:
    with pytest.raises(StrategyError, match="cannot be run"):
        check(qwen3(), (torch.randint(20, (8, 4)),), "ep2 | tp2 sp")
