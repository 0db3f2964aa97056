"""Models whose kernels are counted: the zoo in its small configurations, and five of transformers with two layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves

import graphs.zoo
from graphs.capture import capture
from graphs.opgraph import OpGraph

BATCH, TOKENS = 4, 64
_SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
Given = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model to count the kernels of.

    Attributes:
        name: for people.
        make: gives the model and its arguments, on the CPU or on meta, as the default device says.
    """

    name: str
    make: Callable[[bool], Given]

    def captured(self, train: bool) -> OpGraph:
        """Its step as a graph."""
        with torch.device("meta"):
            model, args, kwargs = self.make(train)
        return capture(model, args, kwargs, train=train, name=self.name)

    def callable(self, train: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The same as a function for torch.compile: in training it gives the loss that a capture takes."""
        torch.manual_seed(0)
        model, args, kwargs = self.make(train)
        model.train(train)

        def function(*given: Any) -> Any:
            output = model(*given, **kwargs)
            return _loss(output) if train else output

        return function, args


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return torch.stack([leaf.mean() for leaf in tree_leaves(output) if leaf.is_floating_point()]).sum()


def _words(train: bool) -> dict[str, torch.Tensor]:
    words = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    return {"input_ids": words, "labels": words} if train else {"input_ids": words}


def _bert(train: bool) -> Given:
    config = transformers.BertConfig(intermediate_size=1024, vocab_size=2000, **_SIZES)
    return transformers.BertForMaskedLM(config), (), _words(train)


def _gpt2(train: bool) -> Given:
    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=2000, use_cache=False)
    return transformers.GPT2LMHeadModel(config), (), _words(train)


def _llama(train: bool) -> Given:
    config = transformers.LlamaConfig(
        intermediate_size=704, vocab_size=2000, num_key_value_heads=2, use_cache=False, **_SIZES
    )
    return transformers.LlamaForCausalLM(config), (), _words(train)


def _images(side: int, train: bool) -> dict[str, torch.Tensor]:
    images = {"pixel_values": torch.zeros(BATCH, 3, side, side)}
    return images | ({"labels": torch.zeros(BATCH, dtype=torch.long)} if train else {})


def _vit(train: bool) -> Given:
    config = transformers.ViTConfig(intermediate_size=1024, image_size=64, **_SIZES)
    return transformers.ViTForImageClassification(config), (), _images(64, train)


def _resnet(train: bool) -> Given:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1])
    return transformers.ResNetForImageClassification(config), (), _images(64, train)


def _zoo(name: str) -> Case:
    def make(train: bool) -> Given:
        net = graphs.zoo.build(name, device=str(torch.get_default_device()), small=True)
        return net.model, tuple(net.train_args if train else net.args), {}

    return Case(name, make)


CASES = {
    case.name: case
    for case in (
        *(_zoo(name) for name in graphs.zoo.MODELS),
        Case("hf_bert", _bert),
        Case("hf_gpt2", _gpt2),
        Case("hf_llama", _llama),
        Case("hf_vit", _vit),
        Case("hf_resnet", _resnet),
    )
}
