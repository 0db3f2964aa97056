"""Models with fewer and narrower layers, fewer samples and shorter sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphs.origin import ModelCall
from graphs.transforms.strategy import Strategy
from placement.runtime.checking.smaller_model import NoValuesError, Smaller, smaller, truncated
from placement.runtime.checking.strategy_check import scaled_down

transformers = pytest.importorskip("transformers")


def smallest(model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> Smaller:
    return next(smaller(ModelCall(model, args, kwargs), None, 16, 4, 2))()


def test_like_layers_are_left_out() -> None:
    layers = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(8, 2)]
    found = truncated(nn.Sequential(*layers), 2)
    assert [str(layer) for layer in found.children()] == [
        *(str(layer) for layer in layers[:3]),
        *("Tanh()" for _ in range(3)),
        str(layers[-1]),
    ]
    assert found(torch.zeros(1, 4)).shape == (1, 2)


def test_sequences_samples_and_words_are_fewer() -> None:
    model = nn.Embedding(10, 4)
    found = smallest(model, torch.arange(16 * 50).view(16, 50))
    (words,) = found.call.args
    assert words.shape == (4, 16)
    assert int(words.max()) < 10
    assert found.said == "4 samples"


def test_what_is_on_meta_gets_values() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), torch.zeros(16, 3)
    found = smallest(model, x)
    assert found.call.model(*found.call.args).isfinite().all()
    assert found.call.args[0].shape == (4, 3)
    with torch.device("meta"):
        model.register_buffer("mask", torch.ones(3))
    with pytest.raises(NoValuesError):
        smallest(model, x)


def test_nothing_is_dropped() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)
    calm = smallest(model, torch.zeros(16, 5, 8)).call.model
    x = torch.rand(4, 5, 8)
    assert calm(x).equal(calm(x))
    assert model.dropout.p == 0.5


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("GPT2LMHeadModel", {"n_layer": 5}),
        ("LlamaForCausalLM", {"num_hidden_layers": 5, "num_key_value_heads": 8}),
        ("BertForMaskedLM", {"num_hidden_layers": 5}),
        ("Gemma3ForCausalLM", {"num_hidden_layers": 7}),
        ("MixtralForCausalLM", {"num_hidden_layers": 3}),
    ],
)
def test_models_of_transformers_are_built_anew(kind: str, config: dict[str, int]) -> None:
    made = getattr(transformers, kind)
    with torch.device("meta"):
        model = made(made.config_class(**config, use_cache=False))
    words = torch.randint(5000, (16, 60))
    found = smallest(model, input_ids=words, labels=words)
    assert found.said == f"2 of {next(iter(config.values()))} layers, width 64, 4 samples"
    assert sum(p.numel() for p in found.call.model.parameters()) < 500_000
    loss = found.call.model(*found.call.args, **found.call.kwargs).loss
    assert loss.isfinite()
    if kind.startswith("Gemma3"):
        assert set(found.call.model.config.layer_types) == set(model.config.layer_types)


@pytest.mark.parametrize(
    ("text", "batch", "expected", "samples"),
    [
        ("dp8 zero3", 64, "dp2 zero3", 8),
        ("dp4 | pp4 1f1b mb16", 128, "dp2 | pp2 1f1b mb4", 8),
        ("dp4", 66, "dp2", 9),
        ("dp4 shares=11:8:8:5", 32, "dp2 shares=5:3", 8),
        ("tp4 sp | recompute=layers.[0-5]", 8, "tp2 sp | recompute=layers.*", 8),
        ("mb8 | offload=parameters+layers.[0-9]+layers.1[0-2]", 8, "mb2 | offload=parameters+layers.*", 8),
        (
            "recompute=layers.*+!kind:aten.mm@layers.[1-2].inner+!layers.3",
            8,
            "recompute=layers.*+!kind:aten.mm@layers.*.inner",
            8,
        ),
        ("dp16 | devices=a+b+c+d+e+f+g+h+i+j+k+l+m+n+o+p | statistics=sync", 32, "dp2 | statistics=sync", 8),
    ],
)
def test_strategies_are_scaled_down(text: str, batch: int, expected: str, samples: int) -> None:
    assert scaled_down(Strategy.parse(text), batch) == (Strategy.parse(expected), samples)
