"""Models whose samples meet: contrastive losses, balanced experts, entries looked up for each sample."""

from __future__ import annotations

import pytest
import torch
import transformers
from parallel.sharded_models import check, check_inference
from torch import nn
from torch.nn import functional

from graphs.errors import StrategyError


class Pairs(nn.Module):
    """Two towers, of text as CLIP has it and of images, and the loss of each sample against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.text = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        last = x[torch.arange(len(tokens)), tokens.argmax(-1)]
        text, image = functional.normalize(self.text(last), dim=-1), functional.normalize(self.image(pixels), dim=-1)
        logits = text @ image.t() * self.scale.exp()
        target = torch.arange(len(tokens))
        return functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(16, (8, 5)), torch.randn(8, 6)


@pytest.mark.parametrize(
    "strategy",
    ["dp2", "dp2 shares=3:1", "mb2", "dp2 | mb2", "pp2 gpipe mb4", "dp2 | pp2 gpipe mb2", "pp2 gpipe mb2 | tp2"],
)
def test_a_contrastive_loss_is_that_of_all_samples(strategy: str) -> None:
    check(Pairs(), pairs(), strategy)


def test_a_contrastive_loss_needs_all_forward_passes_first() -> None:
    with pytest.raises(StrategyError, match=r"all samples of the batch, .*; take the order gpipe"):
        check(Pairs(), pairs(), "pp2 1f1b mb2")


class Positions(nn.Module):
    """Looks up learned positions by an index, whose gradient is added up entry by entry, as Whisper's decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(16, 8), nn.Parameter(torch.randn(12, 8))
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(tokens.shape[1])[None].repeat(len(tokens), 1)
        return self.head(self.body(self.table(tokens) + self.places[numbers]).relu())


@pytest.mark.parametrize("strategy", ["dp2", "mb8", "dp2 | pp2 1f1b mb2", "cp2", "tp2 sp"])
def test_gradients_at_indices_are_added_up_over_parts(strategy: str) -> None:
    check(Positions(), (torch.randint(16, (8, 6)),), strategy)


class Router(nn.Module):
    """A loss that balances the load of experts: the product of two means over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.head = nn.LayerNorm(8), nn.Linear(8, 4, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.head(self.norm(x))
        shares = self.gate(x).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 4).float()
        balance = (shares.mean((0, 1)) * chosen.mean((0, 1))).mean()
        return x.square().mean() + balance


@pytest.mark.parametrize("strategy", ["tp2 sp", "dp2", "mb2"])
def test_means_over_all_tokens_are_put_together_before_their_product(strategy: str) -> None:
    check(Router(), (torch.randn(8, 6, 8),), strategy)


class Language(nn.Module):
    """With a head that has the weights of its table, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(tokens)
        logits = functional.linear(self.norm(x + self.body(x)), self.table.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


def test_a_tied_head_is_cut_as_its_table_is() -> None:
    check_inference(Language(), (torch.randint(16, (4, 6)),), "tp2 sp")


@pytest.fixture(scope="module")
def mixture() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=16, num_hidden_layers=1, num_local_experts=4, max_position_embeddings=8, use_cache=False, **sizes
    )
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def labelled() -> dict[str, torch.Tensor]:
    tokens = torch.randint(16, (4, 4))
    return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize("strategy", ["cp2", "dp2 | pp2 1f1b mb2"])
def test_each_part_sorts_its_own_tokens_by_expert(mixture: nn.Module, strategy: str) -> None:
    check(mixture, (), strategy, labelled())


@pytest.mark.parametrize("strategy", ["ep2", "ep3", "tp2 sp", "tp3", "dp2 | ep2", "ep2 | tp2", "ep2 | mb2"])
def test_products_by_groups_read_the_lists_of_all_parts(mixture: nn.Module, strategy: str) -> None:
    """Under ``ep3`` parts have 2, 1 and 1 experts; under ``tp3`` rows of 6 or 5 numbers, odd for torch's kernel."""
    check(mixture, (), strategy, labelled())


class Biased(nn.Module):
    """Each token with the bias of its two experts, looked up in the order of experts, as GPT-OSS does."""

    def __init__(self, by_argsort: bool) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.bias, self.by_argsort = nn.Parameter(torch.randn(4, 8)), by_argsort

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x).topk(2, -1)
        experts = experts.reshape(-1)
        expert, order = torch.sort(experts)
        if self.by_argsort:
            order = torch.argsort(experts)
            expert = experts[order]
        made = (self.first(x)[order // 2] + self.bias[expert]) * weights.reshape(-1)[order, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return self.last(made[inverse].view(len(x), 2, 8).sum(1))


@pytest.mark.parametrize("by_argsort", [True, False])
@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 zero3"])
def test_biases_of_experts_are_looked_up_by_expert_not_by_place(by_argsort: bool, strategy: str) -> None:
    check(Biased(by_argsort), (torch.randn(4, 8),), strategy)
