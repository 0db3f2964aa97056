"""Models whose memory is counted: checkpointed, adapters, tables, convolutions, recurrence, attention, odd buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Chain(nn.Module):
    """Narrow layers and a large batch: all activations."""

    def __init__(self, layers: int = 30, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


class Block(nn.Module):
    """A residual block of a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Residual blocks, each checkpointed or none."""

    def __init__(self, again: bool, layers: int = 8, width: int = 64) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Block(width) for _ in range(layers)), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank (LoRA)."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Packed(nn.Module):
    """Weights of four bits in a buffer of bytes, with an adapter (QLoRA)."""

    def __init__(self, width: int, out: int, rank: int = 8) -> None:
        super().__init__()
        self.shape = out, width
        self.register_buffer("packed", torch.randint(0, 255, (out * width // 2,), dtype=torch.uint8))
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten().int()
        return functional.linear(x, self.table[numbers].view(self.shape)) + self.up(self.down(x))


class Quantised(nn.Module):
    """Weights of eight bits with a scale for each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.randint(-128, 127, (width, width), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.numbers.to(x.dtype)) * self.scale


class Fourier(nn.Module):
    """Complex weights on the frequencies of a signal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.fft.irfft(torch.fft.rfft(x) * self.weights, n=x.shape[-1]))


class Bags(nn.Module):
    """Tables whose rows are added up, and a perceptron (DLRM)."""

    def __init__(self, rows: int = 2000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(4))
        self.top = nn.Sequential(nn.Linear(4 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(numbers) for table in self.tables], 1)).sigmoid()


class Convolutions(nn.Module):
    """Convolutions with batch norms, residual."""

    def __init__(self, inplace: bool, channels: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


class Unet(nn.Module):
    """Down and up again, with skips that wait."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if k == 0 else channels, channels, 3, padding=1) for k in range(3))
        self.up = nn.ModuleList(nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            skips.append(layer(x).relu())
            x = functional.max_pool2d(skips[-1], 2)
        for layer in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, skips.pop()], 1)).relu()
        return x


class Recurrent(nn.Module):
    """A recurrent network over time, and a head on its last state."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 64) -> None:
        super().__init__()
        self.body, self.head = kind(width, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def _of(make: Callable[..., nn.Module], *shape: int) -> Made:
    return make(), (torch.randn(*shape),), {}


def _bags() -> Made:
    return Bags(), (torch.randint(0, 2000, (4096, 8)),), {}


def _encoder(**more: Any) -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (torch.randn(16, 64, 64),), {}


def _language(kind: str, again: bool = False, **more: Any) -> Made:
    config = transformers.AutoConfig.for_model(kind, vocab_size=256, pad_token_id=0, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(1, 256, (8, 64))
    return model, (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def _bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256
    )
    tokens = torch.randint(1, 512, (8, 64))
    return transformers.BertForMaskedLM(config).train(), (), {"input_ids": tokens, "labels": tokens}


_LLAMA = {
    **{"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}

MODELS: dict[str, Callable[[], Made]] = {
    "chain": partial(_of, Chain, 8192, 64),
    "perceptron": partial(_of, lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), 64, 512),
    "blocks": partial(_of, partial(Blocks, False), 4096, 64),
    "blocks, checkpointed": partial(_of, partial(Blocks, True), 4096, 64),
    "adapters": partial(_of, lambda: nn.Sequential(*(Adapted(256) for _ in range(6))), 1024, 256),
    "packed 4 bits": partial(_of, lambda: nn.Sequential(Packed(256, 1024), nn.GELU(), Packed(1024, 256)), 4096, 256),
    "quantised 8 bits": partial(_of, lambda: nn.Sequential(*(Quantised(512) for _ in range(4))), 1024, 512),
    "complex": partial(_of, lambda: nn.Sequential(*(Fourier(256) for _ in range(4))), 2048, 256),
    "embedding bags": _bags,
    "convolutions": partial(_of, partial(Convolutions, False), 16, 3, 32, 32),
    "convolutions, in place": partial(_of, partial(Convolutions, True), 16, 3, 32, 32),
    "unet": partial(_of, Unet, 8, 3, 64, 64),
    "gru": partial(_of, partial(Recurrent, nn.GRU), 64, 32, 64),
    "lstm": partial(_of, partial(Recurrent, nn.LSTM), 64, 32, 64),
    "encoder": _encoder,
    "encoder, norm first": partial(_encoder, norm_first=True, activation="gelu"),
    "bert": _bert,
    "gpt2": partial(_language, "gpt2", n_embd=64, n_layer=4, n_head=4, n_positions=64),
    "llama": partial(_language, "llama", **_LLAMA),
    "llama, checkpointed": partial(_language, "llama", True, **_LLAMA),
}
