"""Models of Hugging Face transformers, placed: as without a placement."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_models import check_equal
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Case = tuple[nn.Module, dict[str, Any], dict[str, Any]]  # model, inputs, what training adds
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(3, 50, (2, 8)), "attention_mask": mask}


def bert() -> Case:
    config = transformers.BertConfig(vocab_size=50, **SIZES)
    return transformers.BertForSequenceClassification(config), text(), {"labels": torch.tensor([0, 1])}


def gpt2() -> Case:
    inputs = text()
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config), inputs, {"labels": inputs["input_ids"]}


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    inputs = text()
    return transformers.T5ForConditionalGeneration(config), {**inputs, "labels": inputs["input_ids"].clone()}, {}


def whisper() -> Case:
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    tokens = text()["input_ids"]
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": tokens}
    return transformers.WhisperForConditionalGeneration(config), inputs, {"labels": tokens.clone()}


def clip() -> Case:
    ends = {"eos_token_id": 2, "bos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 50, "max_position_embeddings": 16, **SIZES, **ends},
        vision_config={"image_size": 16, "patch_size": 8, **SIZES},
        projection_dim=16,
    )
    return transformers.CLIPModel(config), {**text(), "pixel_values": torch.randn(2, 3, 16, 16)}, {"return_loss": True}


def resnet() -> Case:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], num_labels=5)
    images = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.ResNetForImageClassification(config), images, {"labels": torch.tensor([0, 1])}


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        vocab_size=50, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        output_router_logits=True, **SIZES,
    )  # fmt: skip
    inputs = text()
    return transformers.MixtralForCausalLM(config), inputs, {"labels": inputs["input_ids"].clone()}


# Where experts are products of groups of rows, inference is captured with another kernel for these than runs unplaced.
TOLERANCE = {mixtral: 1e-5}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("case", [bert, gpt2, t5, whisper, clip, resnet, mixtral], ids=lambda case: case.__name__)
def test_outputs_and_gradients(case: Callable[[], Case], train: bool) -> None:
    model, inputs, more = case()
    kwargs = {**inputs, **(more if train else {})}
    check_equal(model, (), kwargs, train=train, tolerance=TOLERANCE.get(case, 0.0))
