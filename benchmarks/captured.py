"""Training steps of configurations of transformers in full size, captured on ``meta``: models that no zoo holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from graphs.capture import capture
from graphs.opgraph import OpGraph

BATCH, TOKENS = 16, 128
_TEXT = {"input_ids": torch.zeros(BATCH, TOKENS, dtype=torch.long, device="meta")}
_LABELS = {"labels": _TEXT["input_ids"]}


def _t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.T5Config(decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config), _TEXT | _LABELS


def _mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = transformers.MixtralConfig(use_cache=False, num_key_value_heads=4, **sizes)
    return transformers.MixtralForCausalLM(config), _TEXT | _LABELS


def _whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(use_cache=False)
    sounds = torch.zeros(BATCH, config.num_mel_bins, 2 * config.max_source_positions, device="meta")
    given = {"input_features": sounds, "decoder_input_ids": _TEXT["input_ids"], **_LABELS}
    return transformers.WhisperForConditionalGeneration(config), given


def _clip() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.CLIPConfig()
    words = torch.zeros(BATCH, config.text_config.max_position_embeddings, dtype=torch.long, device="meta")
    side = config.vision_config.image_size
    images = torch.zeros(BATCH, 3, side, side, device="meta")
    given = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": images, "return_loss": True}
    return transformers.CLIPModel(config), given


def _bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    return transformers.BertForMaskedLM(transformers.BertConfig()), _TEXT | _LABELS


def _llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes)), _TEXT | _LABELS


def _bart() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.BartConfig(use_cache=False, encoder_layers=6, decoder_layers=6)
    return transformers.BartForConditionalGeneration(config), _TEXT | _LABELS


def _vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig()
    images = torch.zeros(BATCH, 3, config.image_size, config.image_size, device="meta")
    labels = torch.zeros(BATCH, dtype=torch.long, device="meta")
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


Make = Callable[[], tuple[torch.nn.Module, dict[str, Any]]]
MODELS: dict[str, Make] = {"t5": _t5, "mixtral": _mixtral, "whisper": _whisper, "clip": _clip}
# What `pretrain.py` trains on; `MODELS` are held out.
FOR_TRAINING: dict[str, Make] = {"hf_bert": _bert, "hf_llama": _llama, "hf_bart": _bart, "hf_vit": _vit}


def captured(name: str) -> OpGraph:
    """The training step of a model of `MODELS` or `FOR_TRAINING`."""
    with torch.device("meta"):
        model, given = (MODELS | FOR_TRAINING)[name]()
    return capture(model, (), given, train=True, name=name)
