"""Models of transformers from ``config.json``: the class's own graph, inputs of every kind, and files that are none."""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs.errors import CaptureError, GraphFileError, PlacementError, UnknownNameError
from placement.cli import run
from placement.inputs.examples import read_example
from placement.inputs.functions import make_model
from placement.inputs.sources import check_name, read_model, read_source
from placement.inputs.transformers_config import is_configuration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WORDS = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, **WORDS}
BERT = {"model_type": "bert", **WORDS}
MOE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, **WORDS}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
PICTURES = {"image_size": 16, "patch_size": 8, "num_channels": 3, **WORDS}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, **WORDS},
    "gemma2": {
        **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 8},
        **WORDS,
    },
    "phi3": {
        **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 3, "eos_token_id": 3},
        **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, **WORDS},
    },
    "gpt2": {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4},
        **{"vocab_size": 40, "n_positions": 32},
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, **MOE},
    "qwen3_moe": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 8},
        **{"moe_intermediate_size": 8, **MOE},
    },
    "bert words": {"architectures": ["BertForMaskedLM"], **BERT},
    "bert both tasks": {"architectures": ["BertForPreTraining"], **BERT},
    "bert classes": {"architectures": ["BertForSequenceClassification"], "id2label": {0: "a", 1: "b", 2: "c"}, **BERT},
    "bert answers": {"architectures": ["BertForQuestionAnswering"], **BERT},
    "no head": {"architectures": ["BertModel"], **BERT},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "decoder_start_token_id": 0, **T5},
    "vit": {"architectures": ["ViTForImageClassification"], "model_type": "vit", **PICTURES},
    "whisper": {
        **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 16},
        **{"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 10},
        **{"max_target_positions": 12, "vocab_size": 40, "pad_token_id": 0, "decoder_start_token_id": 1},
    },
    "clip": {
        **{"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 8},
        **{"text_config": {"max_position_embeddings": 12, "eos_token_id": 2, **WORDS}, "vision_config": PICTURES},
    },
}


def written(folder: Path, document: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_training_step_is_captured(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, CONFIGURATIONS[name])
    graph = read_source(path, train=True, dims={"batch": 3, "sequence": 8}).graph
    model = read_model(path)
    assert type(model).__name__ == (CONFIGURATIONS[name]["architectures"][0]) == graph.name
    assert graph.origin.batch_size == 3
    trained = {id(p): p.numel() * p.itemsize for p in model.parameters() if p.requires_grad}
    assert graph.parameter_bytes.sum() >= sum(trained.values())
    unused = 2 * 16 * 16 if name == "no head" else 0  # nothing
    assert graph.gradient_bytes.sum() >= sum(trained.values()) - unused


@pytest.mark.parametrize("precision", [None, "mixed"])
def test_the_graph_is_that_of_the_class_with_weights(tmp_path: Path, precision: str | None) -> None:
    from graphs.capture import capture

    path = written(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"})
    graph = read_source(path, train=True, dims={"batch": 2, "sequence": 8}, precision=precision).graph
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **WORDS)
    words = torch.randint(0, 40, (2, 8))
    own = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kwargs = {"input_ids": words, "labels": words.clone()}
    assert graph.hash == capture(own, (), kwargs, train=True, precision=precision).hash


def test_a_graph_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "kept"))
    path, dims = written(tmp_path, LLAMA), {"batch": 2, "sequence": 8}
    graph = read_source(path, train=True, dims=dims).graph
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text(kept.read_text().replace('"LlamaForCausalLM"', '"FromDisk"', 1))
    again = read_source(path, train=True, dims=dims).graph
    assert (again.name, again.hash) == ("FromDisk", graph.hash)
    assert read_source(path, train=True, dims={**dims, "batch": 4}).graph.name == "LlamaForCausalLM"
    written(tmp_path, {**LLAMA, "vocab_size": 48})
    assert read_source(path, train=True, dims=dims).graph.hash != graph.hash


def test_a_script_makes_the_model_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, LLAMA)
    words = ["optimize", "config.json", "--train", "--dim", "batch=4", "--dim", "sequence=8", "--cluster"]
    assert run([*words, "2xK40-pcie", "--strategy", "tp2", "-o", "found.json"]) == 0
    assert run(["export", "found.json", "--to", "torch", "--model", "config.json", "-o", "script.py"]) == 0, capsys
    model, _, inputs = runpy.run_path("script.py")["make"]()
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.vocab_size == 40
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"input_ids": (4, 8), "labels": (4, 8)}


def test_inference_has_no_loss(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    graph = read_source(path, dims={"batch": 2, "sequence": 8}).graph
    assert not any("loss" in kind for kind in graph.kinds)
    assert "labels" not in make_model(path, train=False)[2]
    decoder_words = make_model(written(tmp_path, CONFIGURATIONS["t5"]), {"target": 5}, train=False)[2]
    assert decoder_words["decoder_input_ids"].shape == (8, 5)


def test_sizes_are_those_of_the_configuration_unless_told(tmp_path: Path) -> None:
    shapes = {
        "llama": ({}, {"input_ids": (8, 2048)}),
        "gpt2": ({"batch": 2}, {"input_ids": (2, 32), "labels": (2, 32)}),
        "vit": ({"batch": 2}, {"pixel_values": (2, 3, 16, 16), "labels": (2,)}),
        "whisper": ({"batch": 2}, {"input_features": (2, 8, 20), "labels": (2, 12)}),
        "t5": ({"batch": 2, "sequence": 9, "target": 5}, {"input_ids": (2, 9), "labels": (2, 5)}),
    }
    for name, (dims, expected) in shapes.items():
        _, _, kwargs = make_model(written(tmp_path, CONFIGURATIONS[name]), dims)
        assert {key: tuple(kwargs[key].shape) for key in expected} == expected


def test_an_example_has_weights_and_a_folder_names_its_configuration(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    example = read_example(str(tmp_path), train=True, dims={"batch": 2, "sequence": 8})
    assert example.name == "LlamaForCausalLM"
    loss = example.model(*example.args, **example.kwargs).loss
    assert loss.isfinite()


def test_without_architectures_the_model_type_says_which(tmp_path: Path) -> None:
    for kind, name in (
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("vit", "ViTForImageClassification"),
    ):
        with torch.device("meta"):
            assert (
                type(make_model(written(tmp_path, {"model_type": kind, **WORDS}), {"sequence": 8})[0]).__name__ == name
            )


@pytest.mark.parametrize("infinite", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinity_is_what_transformers_takes_it_for(tmp_path: Path, infinite: str) -> None:
    bamba = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "time_step_limit": [0.0, "LIMIT"], **WORDS}
    small = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(bamba | small).replace('"LIMIT"', infinite), encoding="utf-8")
    with torch.device("meta"):
        model = make_model(str(path), {"sequence": 8})[0]
    assert model.config.time_step_limit == (0.0, float("inf"))


REFUSED: dict[str, tuple[dict[str, Any], type[PlacementError], str]] = {
    "an unknown class": ({"architectures": ["FooForCausalLM"]}, GraphFileError, "FooForCausalLM.*does not have"),
    "an unknown type": ({"model_type": "foo"}, GraphFileError, "model_type 'foo'.*does not have"),
    "no model": ({"architectures": ["BertTokenizer"], **BERT}, GraphFileError, "BertTokenizer"),
    "sizes that do not fit": ({**LLAMA, "num_attention_heads": 5}, CaptureError, "LlamaForCausalLM"),
    "layers below none": ({**LLAMA, "num_hidden_layers": -3}, GraphFileError, "num_hidden_layers = -3; expected 1 to"),
    "too many layers": ({**LLAMA, "num_hidden_layers": 200_000}, GraphFileError, "= 200000; expected 1 to 2,000"),
    "choices": ({"architectures": ["BertForMultipleChoice"], **BERT}, CaptureError, "labels is not known here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_model_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    document, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        read_source(written(tmp_path, document), train=True, dims={"batch": 2, "sequence": 8})


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'length'"):
        read_source(written(tmp_path, LLAMA), dims={"length": 3})
    with pytest.raises(GraphFileError, match="sequence=0"):
        read_source(written(tmp_path, LLAMA), dims={"sequence": 0})


def test_transformers_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(GraphFileError, match="pip install transformers"):
        read_source(written(tmp_path, LLAMA))


def test_a_quantized_model_is_captured_in_its_dtype(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}})
    with pytest.warns(UserWarning, match="quantization_config.*bfloat16"):
        assert read_model(path).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "document",
    [[], {"train_batch_size": 8}, {"schema": "placement.opgraph", "model_type": 1}, {"nodes": [], "edges": []}, "x"],
)
def test_other_json_is_no_configuration(tmp_path: Path, document: Any) -> None:
    assert not is_configuration(written(tmp_path, document))
    with pytest.raises(PlacementError):
        read_source(str(tmp_path / "config.json"))


def test_a_json_of_another_kind_is_told_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match="architectures"):
        read_source(written(tmp_path, {"train_batch_size": 8}))


def test_a_name_of_the_hub_is_told_that_nothing_is_downloaded() -> None:
    with pytest.raises(GraphFileError, match=r"give its config\.json"):
        check_name("meta-llama/Llama-3.1-8B")
