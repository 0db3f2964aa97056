"""The calls of captured models, each with the letters of its rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.row_numbers import RecordedCall
from torch import nn

from graphs.capture import capture
from graphs.capture.rows import assembly

# Made of the same kinds of ops as another model of the zoo.
LIKE_OTHERS = {
    *("rnnlm", "nmt2", "nmt4", "nmt8", "s2vt", "vgg16", "resnet152", "inception_v3", "vit_l16", "llama3_70b"),
    *("gpt2_medium", "gpt2_large", "gpt2_xl", "gpt_long"),
}


class Layers(nn.Module):
    """Kinds that the zoo lacks: grouped, strided and transposed convolution, group norm, fused attention, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.strided = nn.Conv2d(8, 8, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.strided(self.grouped(x))))
        x = nn.functional.interpolate(self.up(x), scale_factor=2.0)
        x = nn.functional.avg_pool2d(nn.functional.max_pool2d(x, 2), 2)
        x = self.line(x.flatten(2)).transpose(1, 2)
        heads = x.view(3, -1, 2, 4).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        x, _ = self.attention(x, x, x)
        result: torch.Tensor = self.recurrent(x)[0]
        return result


def recorded(monkeypatch: pytest.MonkeyPatch, model: nn.Module, args: Any, train: bool) -> list[RecordedCall]:
    """The calls of a captured model, each kind with its first two shapes."""
    found: dict[Any, RecordedCall] = {}
    original = assembly._letters

    def record(target: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        call, letters = original(target, args, kwargs, outputs)
        if call is not None and sum(key[0] is target for key in found) < 2:
            found[target, str((args, kwargs, outputs))] = RecordedCall(target, args, kwargs, outputs, letters)
        return call, letters

    monkeypatch.setattr(assembly, "_letters", record)
    capture(model, args, train=train)
    return list(found.values())
