"""Tiny models of transformers with random weights, and batches for them, as `Case`s of runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.wide_net.runs import Case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import transformers

BATCH, LENGTH, VOCABULARY = 4, 8, 48
TOLERANCE = 1e-4  # norms and attention of many families compute in single precision
IN_SINGLE = 2e-3  # of families whose kernels take single precision alone
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL = {"vocab_size": VOCABULARY, **SIZES}
OWN_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CACHELESS = {"use_cache": False}
CAUSAL = {**SMALL, **CACHELESS, **OWN_ENDS, "max_position_embeddings": 32}
GROUPED = {**CAUSAL, "num_key_value_heads": 2}
FEW = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **CACHELESS}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **CACHELESS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQUENCES = {
    **OWN_ENDS,
    **CACHELESS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
}
VISION = {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 4}


def words() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def masked() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": words(), "attention_mask": mask}


def language() -> dict[str, Tensor]:
    given = masked()
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def unmasked() -> dict[str, Tensor]:
    given = words()
    return {"input_ids": given, "labels": given.clone()}


def classes() -> dict[str, Tensor]:
    return {**masked(), "labels": torch.arange(BATCH) % 2}


def images(side: int = 16, classes: int = 4) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, side, side).double(), "labels": torch.arange(BATCH) % classes}


def unlabelled_images(side: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": images(side)["pixel_values"]}


def sounds() -> dict[str, Tensor]:
    spoken = words()
    return {"input_features": torch.randn(BATCH, 8, 20).double(), "decoder_input_ids": spoken, "labels": spoken.clone()}


def both() -> dict[str, Any]:
    return {**masked(), **unlabelled_images(), "return_loss": True}


def case(config: str, model: str, given: Callable[[], dict[str, Any]], **settings: Any) -> Case:
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return Case(made.double(), (), given(), TOLERANCE)


def in_single(make: Callable[[], Case]) -> Callable[[], Case]:
    """The case in single precision."""

    def made() -> Case:
        found = make()
        return Case(found.model.float(), (), found.kwargs, IN_SINGLE)

    return made


def family(name: str, kind: str, given: Callable[[], dict[str, Any]], **settings: Any) -> Callable[[], Case]:
    return partial(case, f"{name}Config", f"{name}{kind}", given, **settings)


CLASSIFIER, CAUSAL_HEAD, IMAGE_HEAD = "ForSequenceClassification", "ForCausalLM", "ForImageClassification"
