"""Values with which a model on meta begins: those that it would give itself in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placement.runtime.modules.local_tensors import entries, initial_values, outlines_of


class Layered(nn.Module):
    """Modules that reset themselves, one used twice, tied weights, a module of its own parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.inner[0]
        self.out.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(4))


class InTorchtitansForm(nn.Module):
    """The model gives its layers their values, and makes its table anew."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", self.made(), persistent=False)

    def made(self) -> Tensor:
        return torch.polar(torch.ones(3, 2), torch.arange(6.0).view(3, 2))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        nn.init.trunc_normal_(self.layer.weight, std=0.02)
        nn.init.zeros_(self.layer.bias)
        with torch.device(buffer_device or self.table.device):
            self.table = self.made()


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def found_for(model: nn.Module) -> dict[str, Tensor]:
    outlines = outlines_of(model)
    torch.manual_seed(0)
    with torch.no_grad():
        found = {name: value.detach().clone() for name, value in initial_values(model, outlines)}
    assert all(tensor.is_meta for _, tensor in entries(model)), "the model is as it was"
    return found


def test_modules_give_themselves_what_they_would_in_one_process() -> None:
    found = found_for(on_meta(Layered))
    plain = on_meta(Layered).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in plain.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    expected = dict(entries(plain))
    assert set(found) == set(expected) - {"scale", "again.weight", "again.bias"}, "it does not say how it begins"
    for name in set(found) - {"words.weight"}:
        assert torch.equal(found[name], expected[name]), name


def test_a_model_that_fills_itself_is_called_as_a_whole() -> None:
    found = found_for(on_meta(InTorchtitansForm))
    plain = InTorchtitansForm()
    torch.manual_seed(0)
    plain.init_weights()
    assert set(found) == {"layer.weight", "layer.bias", "table"}
    for name, value in entries(plain):
        assert torch.equal(found[name], value), name


def test_models_of_transformers_fill_their_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=2, initializer_range=0.02, **sizes)
    plain = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    found = found_for(empty)
    assert set(found) == set(dict(entries(plain)))
    assert float(found["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert torch.equal(found["model.norm.weight"], torch.ones(16))
    assert torch.equal(found["model.rotary_emb.inv_freq"], plain.model.rotary_emb.inv_freq)
