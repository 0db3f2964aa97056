"""Sizes of published models, for tables that say names alone."""

from __future__ import annotations

import re
from typing import Any

from truth_experts import Experts, Latent
from truth_models import Shape
from truth_runs import NotBuilt


def _known(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, words: int = 128_256, **more: Any) -> Shape:
    return Shape(layers, hidden, inner, heads, kv_heads, words, 4096, **more)


# Models by name without separators: Touvron et al., "Llama 2", 2023; Grattafiori et al., "The Llama 3 herd of models",
# 2024, table 3; config.json of Qwen, DeepSeek-AI, Moonshot AI, OpenAI and Mistral AI.
MODELS = {
    r"llama2\.?7b": _known(32, 4096, 11_008, 32, 32, 32_000),
    r"llama2\.?13b": _known(40, 5120, 13_824, 40, 40, 32_000),
    r"llama2\.?70b": _known(80, 8192, 28_672, 64, 8, 32_000),
    r"llama3\.?[0-3]?8b": _known(32, 4096, 14_336, 32, 8),
    r"llama3\.?[0-3]?70b": _known(80, 8192, 28_672, 64, 8),
    r"llama3\.?[0-3]?405b": _known(126, 16_384, 53_248, 128, 8),
    r"qwen2\.?5?7b": _known(28, 3584, 18_944, 28, 4, 152_064),
    r"qwen2\.?5?32b": _known(64, 5120, 27_648, 40, 8, 152_064),
    r"qwen2\.?5?72b": _known(80, 8192, 29_568, 64, 8, 152_064),
    r"qwen330b": _known(48, 2048, 6144, 32, 4, 151_936, head=128, head_norms=True, experts=Experts(128, 8, 768)),
    r"qwen3235b": _known(94, 4096, 12_288, 64, 4, 151_936, head=128, head_norms=True, experts=Experts(128, 8, 1536)),
    r"gptoss20b": _known(24, 2880, 2880, 64, 8, 201_088, head=64, experts=Experts(32, 4, 2880)),
    r"gptoss120b": _known(36, 2880, 2880, 64, 8, 201_088, head=64, experts=Experts(128, 4, 2880)),
    r"mixtral8x7b": _known(32, 4096, 14_336, 32, 8, 32_000, experts=Experts(8, 2, 14_336)),
    r"mixtral8x22b": _known(56, 6144, 16_384, 48, 8, 32_768, experts=Experts(8, 2, 16_384)),
    r"moonlight": _known(
        *(27, 2048, 11_264, 16, 16, 163_840), experts=Experts(64, 6, 1408, 2816, 1), latent=Latent(0, 512)
    ),
    r"deepseekv2lite": _known(
        *(27, 2048, 10_944, 16, 16, 102_400), experts=Experts(64, 6, 1408, 2816, 1), latent=Latent(0, 512)
    ),
    r"deepseekv2": _known(
        *(60, 5120, 12_288, 128, 128, 102_400), experts=Experts(160, 6, 1536, 3072, 1), latent=Latent(1536, 512)
    ),
    r"deepseekv3": _known(
        *(61, 7168, 18_432, 128, 128, 129_280), experts=Experts(256, 8, 2048, 2048, 3), latent=Latent(1536, 512)
    ),
}


def model_of(name: str) -> Shape:
    """The sizes of a published model, by what tables call it; its tokens are the reader's.

    Raises:
        NotBuilt: it is not known.
    """
    plain = re.sub(r"[^a-z0-9.]", "", name.lower())
    found = next((shape for word, shape in MODELS.items() if re.match(word, plain)), None)
    if found is None:
        raise NotBuilt(f"sizes of the model {name!r} are not known")
    return found
