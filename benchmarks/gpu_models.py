"""Training steps that `gpu.py` runs: configurations of transformers, models of the zoo, and small ones for a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.zoo import MODELS, build

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
# The zoo, what people ask for first before what takes long or is exotic.
ZOO = (
    *("gpt2", "resnet50", "bert_base", "vit_b16", "gpt2_medium", "transformer_moe", "two_tower", "alexnet", "vgg16"),
    *("inception_v3", "unet", "gpt2_large", "resnet152", "vit_l16", "nasnet_large", "gpt2_xl", "rnnlm", "gpt_long"),
    *("llama3_8b", "nmt2", "nmt4", "nmt8", "gnmt", "s2vt", "mixtral_8x7b", "llama3_70b"),
)


# Of transformers: samples, and tokens of each.
_FIRST = (("Gpt2", 8, 1024), ("Bert", 32, 512), ("Llama", 4, 2048), ("Vit", 64, 0), ("T5", 16, 512))


@dataclass(frozen=True)
class Subject:
    """A training step.

    Attributes:
        name: of the row.
        make: the model with random weights, and arguments with which it gives a loss, on a device.
        why_not: why it cannot be made here; empty where it can.
    """

    name: str
    make: Callable[[torch.device], Made]
    why_not: str = ""


def subjects(is_small: bool) -> Iterator[Subject]:
    """All of them, the most important ones first; small ones in place of those of a GPU."""
    for kind, batch, length in (
        ("Gpt2", 8, 1024),
        ("Bert", 32, 512),
        ("Llama", 4, 2048),
        ("Vit", 64, 0),
        ("T5", 16, 512),
    ):
        make = partial(_of_transformers, kind, *((2, 16) if is_small else (batch, length)), is_small)
        yield Subject(f"hf {kind.lower()}", make, "" if HAS_TRANSFORMERS else "transformers is not installed")
    if is_small:
        yield Subject("perceptron", _perceptron)
    for name in ("gpt2", "resnet50") if is_small else (*ZOO, *(name for name in MODELS if name not in ZOO)):
        yield Subject(name, partial(_of_zoo, name, is_small))


def in_bfloat16(made: Made) -> Made:
    """The same in bfloat16, but for batch norms, whose statistics nobody keeps in 8 bits of digits."""
    model, args, kwargs = made
    model.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()

    def turned(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_float else value

    return (
        model,
        tuple(turned(value) for value in args),
        {name: turned(value) for name, value in kwargs.items()},
    )


def _of_zoo(name: str, is_small: bool, place: torch.device) -> Made:
    made = build(name, str(place), is_small)
    return made.model.train(), made.train_args, {}


class _Perceptron(nn.Module):
    """Layers of one width, and a loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _perceptron(place: torch.device) -> Made:
    with place:
        return _Perceptron(), (torch.randn(32, 64),), {}


# -- transformers ------------------------------------------------------------------------------------------------


def _of_transformers(kind: str, batch: int, length: int, is_small: bool, place: torch.device) -> Made:
    """Base sizes, without dropout, whose random numbers no prediction counts; Llama with a billion parameters."""
    import transformers

    transformers.logging.set_verbosity_error()
    names = {"Gpt2": "GPT2", "Vit": "ViT"}
    config_of = getattr(transformers, f"{names.get(kind, kind)}Config")
    config = config_of(**_SIZES[kind](is_small))
    heads = {"Gpt2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM"}
    heads |= {"Vit": "ViTForImageClassification", "T5": "T5ForConditionalGeneration"}
    with place:
        model = getattr(transformers, heads[kind])(config).train()
        if kind == "Vit":
            side = config.image_size
            given = {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.zeros(batch, dtype=torch.long)}
        else:
            # Not zeros: a GPU multiplies rows that are alike faster, since fewer of its bits turn over.
            tokens = torch.randint(config.vocab_size, (batch, length))
            given = {"input_ids": tokens, "labels": tokens.clone()}
    return model, (), given


def _sizes(is_small: bool, names: tuple[str, str, str, str], dropouts: tuple[str, ...], **more: Any) -> dict[str, Any]:
    sizes = dict(zip(names, (32, 64, 2, 2), strict=True)) if is_small else {}
    return {**dict.fromkeys(dropouts, 0.0), **more, **({"vocab_size": 64} | sizes if is_small else {})}


def _without_words(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name != "vocab_size"}


_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
_SIZES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "Gpt2": lambda small: _sizes(
        small,
        ("n_embd", "n_inner", "n_layer", "n_head"),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        use_cache=False,
        **({"bos_token_id": 0, "eos_token_id": 0} if small else {}),
    ),
    "Bert": lambda small: _sizes(small, _NAMES, _HIDDEN),
    "Llama": lambda small: _sizes(
        small, _NAMES, (), use_cache=False, num_key_value_heads=2 if small else 4, **({} if small else _LLAMA)
    ),
    "Vit": lambda small: _without_words(
        _sizes(small, _NAMES, _HIDDEN, **({"image_size": 32, "patch_size": 8} if small else {}))
    ),
    "T5": lambda small: _sizes(
        small,
        ("d_model", "d_ff", "num_layers", "num_heads"),
        ("dropout_rate",),
        use_cache=False,
        decoder_start_token_id=0,
        **({"d_kv": 16} if small else {}),
    ),
}
