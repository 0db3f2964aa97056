"""Decoders of given sizes: those of published models, variants that run and train, sizes that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from graphs.capture import capture
from graphs.errors import GraphError, UnknownNameError
from graphs.origin import step_of
from graphs.zoo.cache import decoder_graph
from graphs.zoo.decoders import DecoderConfig, decoder
from graphs.zoo.mixture import DeepSeekConfig

# Sizes and numbers of parameters of the releases on huggingface.co (config.json, and the count of the safetensors).
PUBLISHED = {
    "gpt2": (
        DecoderConfig(
            *(1, 1024, 12, 768),
            **{"heads": 12, "key_value_heads": 12, "inner_width": 3072, "vocabulary": 50_257, "gated": False},
            **{"activation": "gelu", "norm": "layer", "positions": "learned", "biases": True, "tied": True},
        ),
        124_439_808,
    ),
    "llama3_405b": (DecoderConfig(1, 8, 126, 16_384, 128, 8, 53_248, 128_256), 405_853_388_800),
    "qwen2.5-7b": (DecoderConfig(1, 8, 28, 3584, 28, 4, 18_944, 152_064, input_biases=True), 7_615_616_512),
    "qwen3-8b": (
        DecoderConfig(1, 8, 36, 4096, 32, 8, 12_288, 151_936, head_width=128, head_norms=True),
        8_190_735_360,
    ),
    "qwen3-30b-a3b": (
        DecoderConfig(
            *(1, 8, 48, 2048, 32, 4, 768, 151_936),
            **{"head_width": 128, "head_norms": True, "experts": 128, "experts_asked": 8},
        ),
        30_532_122_624,
    ),
}
SMALL = DecoderConfig(2, 8, 2, 16, heads=4, key_value_heads=2, inner_width=32, vocabulary=20, dtype=torch.float32)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "gated": False,
        "activation": "gelu",
        "norm": "layer",
        "positions": "learned",
        "biases": True,
        "tied": True,
    },
    "dropout": {"dropout": 0.1},
    "nemotron": {"gated": False, "activation": "squared_relu", "head_width": 8},
    "qwen": {"head_norms": True, "input_biases": True, "head_width": 8},
    "no positions": {"positions": "none"},
    "experts": {"experts": 4, "shared_width": 8, "dense_layers": 1, "dense_width": 24},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config, expected = PUBLISHED[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in decoder(config).model.parameters()) == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_and_see_no_later_word(name: str) -> None:
    torch.manual_seed(0)
    zoo = decoder(dataclasses.replace(SMALL, **VARIANTS[name]))
    zoo.model(*zoo.train_args).backward()
    assert all(p.grad is not None for p in zoo.model.parameters())
    if "experts" not in VARIANTS[name]:  # whose seats are shared out by the whole sequence
        model, (words,) = zoo.model.eval(), zoo.args
        later = words.clone()
        later[:, 5:] = (later[:, 5:] + 1) % 20
        before, after = model(words), model(later)
        torch.testing.assert_close(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])


def test_latent_queries_train() -> None:
    sizes = {"latent_width": 8, "plain_width": 8, "rotary_width": 4, "value_width": 8, "query_latent_width": 6}
    config = DeepSeekConfig(2, 8, 2, 16, 2, 2, inner_width=8, vocabulary=20, dtype=torch.float32, **sizes)
    zoo = decoder(config)
    zoo.model(*zoo.train_args).backward()
    assert all(p.grad is not None for p in zoo.model.parameters())


def test_a_graph_of_sizes_is_kept_and_that_of_the_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path))
    graph = decoder_graph(SMALL, precision="mixed", name="mine")
    assert (graph.name, graph.origin.batch_size) == ("mine", 2)
    again = decoder_graph(SMALL, precision="mixed", name="mine")
    zoo = decoder(SMALL)
    assert graph.hash == again.hash == capture(zoo.model, zoo.train_args, train=True, precision="mixed").hash
    assert decoder_graph(dataclasses.replace(SMALL, tokens=9), precision="mixed", name="mine").hash != graph.hash


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"heads": 3, "key_value_heads": 1}, "divide the width"),
        ({"key_value_heads": 3}, "divide the heads"),
        ({"layers": 0}, "layers=0"),
        ({"experts": 4, "gated": False}, "gated by silu"),
        ({"experts": 4, "experts_asked": 5}, "5 of 4 experts"),
    ],
)
def test_sizes_that_make_no_decoder_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        dataclasses.replace(SMALL, **sizes)


@pytest.mark.parametrize("kind", ["activation", "norm", "positions"])
def test_unknown_parts_are_refused(kind: str) -> None:
    with pytest.raises(UnknownNameError, match="gelo"):
        dataclasses.replace(SMALL, **{kind: "gelo"})


def test_a_model_that_is_captured_now_is_not_captured_again_for_its_step(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path))
    now, read = (decoder_graph(SMALL, precision="mixed", name="mine") for _ in range(2))
    steps = step_of(now), step_of(read)
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0].program() is steps[0].program()
    assert steps[0].identity() == steps[1].identity()
    assert steps[0].program().graph.op_names == steps[1].program().graph.op_names == read.op_names
