"""Tensor parallelism of decoders with RMSNorm and rotary tables: Megatron-LM's collectives, no product whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphs import OpGraph
from graphs.capture import capture
from graphs.transforms.derived import Derived
from graphs.transforms.splitting import split
from graphs.transforms.splitting.op_states import normalised
from graphs.transforms.strategy import Strategy

LAYERS, SAMPLES, TOKENS, WIDTH = 2, 2, 16, 16
HIDDEN_BYTES = SAMPLES * TOKENS * WIDTH * 4
PRODUCTS = ("mm", "attention")


def of_transformers(kind: str) -> Callable[[bool], OpGraph]:
    def made(train: bool) -> OpGraph:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=20,
            use_cache=False,
        )
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).train(train)
        words = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
        return capture(model, (), {"input_ids": words} | ({"labels": words} if train else {}), train=train)

    return made


DECODERS = pytest.mark.parametrize("decoder", [of_transformers("Llama"), of_transformers("Mistral")])


def split_by(graph: OpGraph, text: str) -> Derived:
    return split(graph, [rule.axis() for rule in Strategy.parse(text).mesh])


def of_hidden_states(derived: Derived) -> Counter[str]:
    return Counter(collective.kind for collective in derived.collectives if collective.bytes == HIDDEN_BYTES)


def product_flops(graph: OpGraph) -> float:
    kinds = zip(graph.kinds, graph.flops.tolist(), strict=True)
    counted = (flops for kind, flops in kinds if any(word in kind for word in PRODUCTS) and "embedding" not in kind)
    return float(sum(counted))


@DECODERS
def test_each_layer_has_two_all_reduces_in_each_pass(decoder: Callable[[bool], OpGraph]) -> None:
    """One more is of the gradient that the output leaves behind; the table's columns are gathered once."""
    for train, all_reduces in ((False, 2 * LAYERS), (True, 4 * LAYERS + 1)):
        graph = decoder(train)
        derived = split_by(graph, "tp2")
        assert of_hidden_states(derived)["all_reduce"] == all_reduces
        assert of_hidden_states(derived)["all_gather"] == 1
        assert product_flops(derived.graph) == product_flops(graph)


@DECODERS
def test_along_the_sequence_they_are_reduce_scatters_and_all_gathers(decoder: Callable[[bool], OpGraph]) -> None:
    """Rotary tables and masks do not cut attention along the sequence. Inputs of columns are gathered once more."""
    graph = decoder(True)
    derived = split_by(graph, "tp2 sp")
    found = of_hidden_states(derived)
    assert found["all_reduce"] == 0
    assert found["reduce_scatter"] == 4 * LAYERS + 1
    assert found["all_gather"] == 4 * LAYERS + 1 + 2 * LAYERS + 1
    assert product_flops(derived.graph) == product_flops(graph)


class Narrow(nn.Module):
    """Two products, and a norm in between if asked for; the loss is a mean."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.has_norm = has_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.has_norm:
            hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        loss: torch.Tensor = self.second(hidden).pow(2).mean()
        return loss


@pytest.mark.parametrize("has_norm", [False, True])
def test_sums_of_each_sample_are_norms_and_losses_and_gradients_of_biases_are_none(has_norm: bool) -> None:
    graph = capture(Narrow(has_norm), (torch.ones(2, 3, 4),), train=True)
    found = normalised(graph)
    of_kinds = {graph.kinds[op] for op, dims in zip(graph.tensor_producer.tolist(), found, strict=True) if dims}
    assert of_kinds >= {"aten.pow", "aten.addmm"} if has_norm else not of_kinds
