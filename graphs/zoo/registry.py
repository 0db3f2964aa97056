"""The registry of the zoo: `ModelSpec` describes a model, `build` makes it from its name, ready to capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from graphs.entry_points import imported
from graphs.errors import GraphError, UnknownNameError

if TYPE_CHECKING:
    from torch import nn


ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class ModelSpec:
    """One line of the registry; reading it loads no torch.

    Attributes:
        name: the registry name.
        summary: one line for people.
        source: paper and year.
        batch_size: samples in one step of the full configuration.
        build: ``"module:function"``; the function takes ``small`` and ``batch_size`` and returns a `ZooModel`.
    """

    name: str
    summary: str
    source: str
    batch_size: int
    build: str


@dataclass(frozen=True)
class ZooModel:
    """A model with inputs of the right shapes.

    Attributes:
        model: called with ``args`` it returns logits, called with ``train_args`` the scalar loss.
        args: inputs of one inference step.
        train_args: the same inputs followed by the targets.
    """

    model: nn.Module
    args: tuple[Any, ...]
    train_args: tuple[Any, ...]


def in_batches(config: ConfigT, batch_size: int | None) -> ConfigT:
    """The configuration with another batch size, its own for None."""
    return config if batch_size is None else dataclasses.replace(config, batch_size=batch_size)  # type: ignore[type-var]


MODELS: dict[str, ModelSpec] = {
    "alexnet": ModelSpec(
        name="alexnet",
        summary="5 convolutions and 3 fully connected layers, 224x224 images",
        source="Krizhevsky 2014; batch of PipeDream, SOSP 2019",
        batch_size=256,
        build="graphs.zoo.convnets:alexnet",
    ),
    "vgg16": ModelSpec(
        name="vgg16",
        summary="13 convolutions and 3 fully connected layers, 224x224 images",
        source="Simonyan and Zisserman 2015; batch of PipeDream, SOSP 2019",
        batch_size=64,
        build="graphs.zoo.convnets:vgg16",
    ),
    "inception_v3": ModelSpec(
        name="inception_v3",
        summary="11 inception blocks of up to 4 branches, 299x299 images",
        source="Szegedy et al. 2016; batch of Mirhoseini et al. 2017",
        batch_size=32,
        build="graphs.zoo.inception:inception_v3",
    ),
    "resnet50": ModelSpec(
        name="resnet50",
        summary="16 bottleneck blocks, 224x224 images",
        source="He et al. 2016; batch of PipeDream, SOSP 2019",
        batch_size=128,
        build="graphs.zoo.convnets:resnet50",
    ),
    "resnet152": ModelSpec(
        name="resnet152",
        summary="50 bottleneck blocks, 224x224 images",
        source="He et al. 2016; batch of Mirhoseini et al. 2018",
        batch_size=128,
        build="graphs.zoo.convnets:resnet152",
    ),
    "nasnet_large": ModelSpec(
        name="nasnet_large",
        summary="NASNet-A 6@4032: 22 cells of 5 two-branch blocks, 331x331 images",
        source="Zoph et al. 2018",
        batch_size=32,
        build="graphs.zoo.nasnet:nasnet_large",
    ),
    "vit_b16": ModelSpec(
        name="vit_b16",
        summary="12-layer vision transformer, 16x16 patches of 224x224 images",
        source="Dosovitskiy et al. 2021",
        batch_size=64,
        build="graphs.zoo.transformers:vit_b16",
    ),
    "vit_l16": ModelSpec(
        name="vit_l16",
        summary="24-layer vision transformer, 16x16 patches of 224x224 images",
        source="Dosovitskiy et al. 2021",
        batch_size=64,
        build="graphs.zoo.transformers:vit_l16",
    ),
    "unet": ModelSpec(
        name="unet",
        summary="segmentation: 5 levels of convolutions down and up, 572x572 images",
        source="Ronneberger et al. 2015",
        batch_size=8,
        build="graphs.zoo.convnets:unet",
    ),
    "rnnlm": ModelSpec(
        name="rnnlm",
        summary="2-layer LSTM language model, hidden 2048, 40 steps unrolled by cell",
        source="Jozefowicz et al. 2016; sizes of Mirhoseini et al. 2018",
        batch_size=64,
        build="graphs.zoo.recurrent:rnnlm",
    ),
    "nmt2": ModelSpec(
        name="nmt2",
        summary="2+2-layer LSTM translation with attention, hidden 1024, 40 steps unrolled by cell",
        source="Luong et al. 2015; sizes of Mirhoseini et al. 2018",
        batch_size=64,
        build="graphs.zoo.translation:nmt2",
    ),
    "nmt4": ModelSpec(
        name="nmt4",
        summary="4+4-layer LSTM translation with attention, hidden 1024, 24 steps unrolled by cell",
        source="Luong et al. 2015; sizes of Mirhoseini et al. 2018",
        batch_size=64,
        build="graphs.zoo.translation:nmt4",
    ),
    "nmt8": ModelSpec(
        name="nmt8",
        summary="8+8-layer LSTM translation with attention, hidden 1024, 14 steps unrolled by cell",
        source="Luong et al. 2015; sizes of Mirhoseini et al. 2018",
        batch_size=64,
        build="graphs.zoo.translation:nmt8",
    ),
    "gnmt": ModelSpec(
        name="gnmt",
        summary="8+8-layer residual LSTM translation, bidirectional first layer, 12 steps unrolled by cell",
        source="Wu et al. 2016; batch of PipeDream, SOSP 2019",
        batch_size=64,
        build="graphs.zoo.translation:gnmt",
    ),
    "s2vt": ModelSpec(
        name="s2vt",
        summary="video captioning: two stacked LSTMs over frames, then words, 80 steps unrolled by cell",
        source="Venugopalan et al. 2015; batch of PipeDream, SOSP 2019",
        batch_size=80,
        build="graphs.zoo.recurrent:s2vt",
    ),
    "bert_base": ModelSpec(
        name="bert_base",
        summary="12-layer bidirectional encoder with both pre-training heads, 128 tokens",
        source="Devlin et al. 2019",
        batch_size=32,
        build="graphs.zoo.transformers:bert_base",
    ),
    "gpt2": ModelSpec(
        name="gpt2",
        summary="12-layer causal language model, fused attention, embedding tied to the output layer, 512 tokens",
        source="Radford et al. 2019",
        batch_size=64,
        build="graphs.zoo.transformers:gpt2",
    ),
    "gpt2_medium": ModelSpec(
        name="gpt2_medium",
        summary="24-layer causal language model of width 1024, 1024 tokens",
        source="Radford et al. 2019",
        batch_size=8,
        build="graphs.zoo.transformers:gpt2_medium",
    ),
    "gpt2_large": ModelSpec(
        name="gpt2_large",
        summary="36-layer causal language model of width 1280, 1024 tokens",
        source="Radford et al. 2019",
        batch_size=8,
        build="graphs.zoo.transformers:gpt2_large",
    ),
    "gpt2_xl": ModelSpec(
        name="gpt2_xl",
        summary="48-layer causal language model of width 1600, 1024 tokens",
        source="Radford et al. 2019",
        batch_size=8,
        build="graphs.zoo.transformers:gpt2_xl",
    ),
    "gpt_long": ModelSpec(
        name="gpt_long",
        summary="gpt2 on 32,768 tokens",
        source="Radford et al. 2019; length ours",
        batch_size=8,
        build="graphs.zoo.transformers:gpt_long",
    ),
    "llama3_8b": ModelSpec(
        name="llama3_8b",
        summary="32-layer decoder: grouped-query attention, SwiGLU, rotary embedding; bfloat16, 8192 tokens",
        source="Grattafiori et al. 2024",
        batch_size=8,
        build="graphs.zoo.decoders:llama3_8b",
    ),
    "llama3_70b": ModelSpec(
        name="llama3_70b",
        summary="80-layer decoder: grouped-query attention, SwiGLU, rotary embedding; bfloat16, 8192 tokens",
        source="Grattafiori et al. 2024",
        batch_size=8,
        build="graphs.zoo.decoders:llama3_70b",
    ),
    "mixtral_8x7b": ModelSpec(
        name="mixtral_8x7b",
        summary="32-layer decoder, 8 experts per layer as batched products, top-2 routing; bfloat16, 4096 tokens",
        source="Jiang et al. 2024",
        batch_size=8,
        build="graphs.zoo.decoders:mixtral_8x7b",
    ),
    "deepseek_v2_lite": ModelSpec(
        name="deepseek_v2_lite",
        summary="27-layer decoder, 64 small experts and 2 shared per layer, latent attention; bfloat16, 4096 tokens",
        source="DeepSeek-AI 2024",
        batch_size=8,
        build="graphs.zoo.mixture:deepseek_v2_lite",
    ),
    "transformer_moe": ModelSpec(
        name="transformer_moe",
        summary="8-layer causal transformer, 8 experts per layer as parallel branches, top-2 routing",
        source="Lepikhin et al. 2021",
        batch_size=16,
        build="graphs.zoo.mixture:transformer_moe",
    ),
    "two_tower": ModelSpec(
        name="two_tower",
        summary="retrieval: deep user and item towers that meet in a dot product",
        source="Huang et al. 2013; loss of Yi et al. 2019",
        batch_size=4096,
        build="graphs.zoo.two_tower:two_tower",
    ),
}


def build(name: str, device: str = "meta", small: bool = False, batch_size: int | None = None) -> ZooModel:
    """Make a model of the zoo and inputs for it.

    Args:
        name: a key of `MODELS`.
        device: where parameters and inputs live; on ``"meta"`` nothing is allocated, elsewhere they are random
            (seed torch for the same ones again).
        small: a reduced configuration of the same structure, cheap enough to run anywhere.
        batch_size: samples in a step; None for those of the configuration.

    Raises:
        UnknownNameError: no model of that name.
        GraphError: a batch size below 1.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    if batch_size is not None and batch_size < 1:
        raise GraphError(f"got a batch of {batch_size}; expected 1 sample or more.")
    import torch

    builder = cast(Callable[[bool, int | None], ZooModel], imported(MODELS[name].build))
    with torch.device(device):
        return builder(small, batch_size)
