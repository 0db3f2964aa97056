"""How much of every model can be split along the batch, and along one more axis.

    python benchmarks/rows.py [--markdown] [NAME ...]

Models of the zoo in full size and models of transformers in small ones; inference and training step. The goal
is 99 % of the FLOPs along the batch and 90 % along one more axis.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from table import Printer, parser
from torch import nn

from graphs.capture import capture
from graphs.transforms.coverage import BATCH, coverage
from graphs.zoo import MODELS, build

Case = tuple[nn.Module, dict[str, Any], dict[str, Any]]  # with arguments of inference and what training adds
TOKENS = torch.zeros(4, 8, dtype=torch.long)
IMAGES = torch.zeros(4, 3, 32, 32)
LABELS = torch.zeros(4, dtype=torch.long)


def transformer(config: str, model: str, inputs: dict[str, Any], extra: dict[str, Any], **settings: Any) -> Case:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made, inputs, extra


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CASES: dict[str, Callable[[], Case]] = {
    "bert": lambda: transformer(
        "BertConfig", "BertForSequenceClassification", TEXT, {"labels": LABELS}, intermediate_size=64, **SMALL
    ),
    "gpt2": lambda: transformer(
        "GPT2Config", "GPT2LMHeadModel", TEXT, {"labels": TOKENS}, vocab_size=64, n_embd=32, n_layer=2, n_head=4
    ),
    "t5": lambda: transformer(
        *("T5Config", "T5ForConditionalGeneration", {"input_ids": TOKENS, "labels": TOKENS}, {}),
        **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        decoder_start_token_id=0,
    ),
    "whisper": lambda: transformer(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"input_features": torch.zeros(4, 80, 64), "decoder_input_ids": TOKENS},
        {"labels": TOKENS},
        **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32},
        **{"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1},
    ),
    "clip": lambda: transformer(
        "CLIPConfig",
        "CLIPModel",
        {**TEXT, "pixel_values": IMAGES},
        {"return_loss": True},
        text_config={**TOWER, "vocab_size": 64, "eos_token_id": 2},
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    ),
    "vit": lambda: transformer(
        *("ViTConfig", "ViTForImageClassification", {"pixel_values": IMAGES}, {"labels": LABELS}),
        **TOWER,
        image_size=32,
        patch_size=8,
    ),
    "llama": lambda: transformer(
        *("LlamaConfig", "LlamaForCausalLM", TEXT, {"labels": TOKENS}),
        intermediate_size=64,
        num_key_value_heads=2,
        **SMALL,
    ),
    "mixtral": lambda: transformer(
        *("MixtralConfig", "MixtralForCausalLM", TEXT, {"labels": TOKENS}),
        **SMALL,
        **{"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "resnet": lambda: transformer(
        *("ResNetConfig", "ResNetForImageClassification", {"pixel_values": IMAGES}, {"labels": LABELS}),
        **{"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
    ),
}


def shares(name: str, train: bool) -> tuple[float, str, float]:
    """FLOPs that can be split along the batch, the next best axis and its share."""
    if name in CASES:
        model, inputs, extra = CASES[name]()
        graph = capture(model, (), {**inputs, **(extra if train else {})}, train)
    else:
        made = build(name)
        graph = capture(made.model, made.train_args if train else made.args, train=train)
    found = coverage(graph).shares
    axis, share = max(((a, s) for a, s in found.items() if a != BATCH), key=lambda item: item[1])
    return found.get(BATCH, 0.0), axis, share


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME")
    arguments = options.parse_args()
    printer = Printer("Split rows", arguments.markdown)
    rows = []
    for name in arguments.names or [*MODELS, *CASES]:
        for train in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batch, axis, share = shares(name, train)
            step = "training" if train else "inference"
            rows.append(
                (
                    name,
                    step,
                    f"{batch:.2%}",
                    f"{share:.2%}",
                    axis,
                    "met" if batch >= 0.99 and share >= 0.9 else "missed",
                )
            )
    columns = ("model", "step", "batch", "best other", "axis", "goal")
    printer.table("Share of the FLOPs that can be split along an axis", columns, rows)


if __name__ == "__main__":
    main()
