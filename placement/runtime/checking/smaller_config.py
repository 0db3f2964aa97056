"""Models of transformers, built anew with smaller sizes in their configuration."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "num_decoder_attention_heads",
)
_OWN_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim")
_INNER = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim"),
    *("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEAD, _HEAD_WIDTH, _INNER_WIDTH, _VOCABULARY = 4, 16, 128, 128
_OTHERS = {
    "head_dim": _HEAD_WIDTH,
    "d_kv": _HEAD_WIDTH,
    "attention_head_size": _HEAD_WIDTH,
    "rotary_dim": _HEAD_WIDTH // 2,
    "vocab_size": _VOCABULARY,
    "image_size": 64,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": _HEAD_WIDTH,
}


def is_of_transformers(model: object) -> bool:
    """Whether a configuration makes the model."""
    return hasattr(type(model), "_from_config") and hasattr(getattr(model, "config", None), "to_dict")


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Layers in its longest list, and what its first parameter with several dimensions has in the last one."""
    lists = (len(one) for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential)))
    return max(lists, default=0), next((p.shape[-1] for p in model.parameters() if p.ndim > 1), 0)


def rebuilt(model: Any, layers: int, is_narrow: bool) -> nn.Module:
    """The same kind of model with random weights.

    Args:
        layers: of each of its lists.
        is_narrow: all other sizes are smaller, too.
    """
    config = copy.deepcopy(model.config)
    _shrink(config, layers, is_narrow)
    made: nn.Module = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return made.train(model.training)


def _shrink(config: Any, layers: int, is_narrow: bool) -> None:
    known = vars(config)
    before = {known[name] for name in _LAYERS if type(known.get(name)) is int}
    for name, value in list(known.items()):
        if hasattr(value, "to_dict"):
            _shrink(value, layers, is_narrow)
        elif isinstance(value, list) and len(value) in before and len(value) > layers:
            setattr(config, name, _some(value, layers))
        elif name.endswith("drop") or "dropout" in name:
            setattr(config, name, 0.0 if isinstance(value, float) else value)
    for name in _LAYERS:
        if type(known.get(name)) is int:
            setattr(config, name, min(known[name], layers))
    if is_narrow:
        _narrow(config)


def _some(kinds: list[Any], most: int) -> list[Any]:
    """So many of the kinds of layers, the last one another kind than the first where there is one."""
    other = [kind for kind in kinds[most:] if kind not in kinds[:most]]
    return [*kinds[: most - 1], other[0]] if other else kinds[:most]


def _narrow(config: Any) -> None:
    known = vars(config)
    numbers = {name: value for name, value in known.items() if type(value) is int}
    heads = next((numbers[name] for name in _HEADS if name in numbers), 0)
    width = next((numbers[name] for name in _WIDTHS if name in numbers), 0)
    sizes = dict(_OTHERS)
    sizes |= dict.fromkeys(_HEADS, _HEAD) | dict.fromkeys(_INNER, _INNER_WIDTH) | dict.fromkeys(_EXPERTS, 4)
    for name in _OWN_HEADS:
        sizes[name] = _HEAD if numbers.get(name) == heads else _HEAD // 2
    for name in _WIDTHS:
        sizes[name] = _HEAD * _HEAD_WIDTH if numbers.get(name) == width else _HEAD * _HEAD_WIDTH // 2
    for name, value in numbers.items():
        if name in sizes:
            setattr(config, name, min(value, sizes[name]))
        elif name.endswith("_token_id") and value >= _VOCABULARY:
            setattr(config, name, 1)
