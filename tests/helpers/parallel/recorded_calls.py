"""The calls of captured models, each with the letters of its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel.row_numbers import RecordedCall
from torch import Tensor, nn
from torch.nn import functional

from graphs.capture import capture
from graphs.capture.rows import assembly
from graphs.capture.trace import Layout, flat


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


def recorded(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, args: Any, train: bool, loss: Any = None
) -> list[RecordedCall]:
    """The calls of a captured model with real numbers, each kind with its first two shapes."""
    found: dict[Any, RecordedCall] = {}
    original = assembly._letters

    def record(target: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        call, letters = original(target, args, kwargs, outputs)
        is_real = not any(leaf.dtype.is_complex for leaf in flat((args, kwargs, outputs)) if type(leaf) is Layout)
        if call is not None and is_real and sum(key[0] is target for key in found) < 2:
            found[target, str((args, kwargs, outputs))] = RecordedCall(target, args, kwargs, outputs, letters)
        return call, letters

    monkeypatch.setattr(assembly, "_letters", record)
    capture(model, args, train=train, loss=loss)
    return list(found.values())


# Of images [N, 4, 8, 8], each by itself.
APART: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(functional, name)
        for name in (
            *("leaky_relu", "elu", "selu", "celu", "softplus", "mish", "relu6", "hardtanh", "hardsigmoid", "hardswish"),
            *("softshrink", "hardshrink", "logsigmoid", "tanhshrink", "silu", "gelu", "softsign"),
        )
    },
    "threshold": lambda h: functional.threshold(h, 0.1, 0.2),
    "glu": lambda h: functional.glu(h, 1),
    "pixel_shuffle": lambda h: functional.pixel_shuffle(h, 2),
    "channel_shuffle": lambda h: torch.channel_shuffle(h, 2),
    "fold": lambda h: functional.fold(functional.unfold(h, 2), (8, 8), 2),
    "windows": lambda h: h.unfold(3, 2, 1) * 2,
    "reflected": lambda h: functional.pad(h, (1, 2, 2, 1), mode="reflect"),
    "replicated": lambda h: functional.pad(h, (1, 2, 2, 1), mode="replicate"),
    "reflected vectors": lambda h: functional.pad(h.flatten(2), (1, 2), mode="reflect"),
    "replicated vectors": lambda h: functional.pad(h.flatten(2), (1, 2), mode="replicate"),
    "turned": lambda h: torch.rot90(h, 1, (2, 3)),
    "flipped": lambda h: h.flip(2).roll(1, 3),
    "cummax": lambda h: h.cummax(2)[0],
    "logcumsumexp": lambda h: h.logcumsumexp(2),
    "diagonals": lambda h: torch.diag_embed(h).diagonal(0, 2, 3),
    "distances": lambda h: torch.cdist(h.flatten(2), h.flatten(2).flip(1)),
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda h: torch.linalg.eigvalsh(h @ h.mT),
    "solved": lambda h: torch.linalg.solve(h @ h.mT + torch.eye(8), h),
    "determinant": lambda h: torch.linalg.slogdet(h @ h.mT + torch.eye(8))[1],
    "cholesky": lambda h: torch.linalg.cholesky(h @ h.mT + torch.eye(8)),
    "spectrum": lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2),
    "frames": lambda h: torch.stft(h.flatten(1), 16, return_complex=True, window=torch.hann_window(16)).abs(),
    "kth": lambda h: h.kthvalue(2, -1)[0] + h.median(-1)[0] + h.quantile(0.3, -1),
    "index_add": lambda h: torch.zeros_like(h).index_add(2, torch.tensor([1, 3, 5, 1, 0, 2, 4, 6]), h),
    "index_copy": lambda h: h.index_copy(2, torch.tensor([1, 3]), h[:, :, :2]),
    "buckets": lambda h: h * torch.searchsorted(torch.linspace(-2, 2, 9), h.detach().contiguous()),
    "resized": lambda h: functional.interpolate(h, scale_factor=2, mode="nearest-exact"),
    "resized vectors": lambda h: functional.interpolate(h.flatten(2), scale_factor=2, mode="linear"),
    "volumes": lambda h: functional.interpolate(h.unflatten(1, (2, 2)), scale_factor=2, mode="trilinear"),
    "adaptive": lambda h: functional.adaptive_max_pool3d(h.unflatten(1, (2, 2)), 2),
    "pooled": lambda h: functional.max_pool3d(h.unflatten(1, (2, 2)), 2),
    "fewer bits": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "complex": lambda h: torch.complex(h, h * 2).angle() * h,
}


class SampleBySample(nn.Module):
    """All of `APART`, and layers with parameters that are like them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.prelu, self.bilinear = nn.Conv2d(4, 4, 1), nn.PReLU(4), nn.Bilinear(8, 4, 3)
        self.instance = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        made = [apart(h) for apart in APART.values()]
        vectors = h[:, 0]
        losses = [
            functional.huber_loss(vectors, x[:, 0]),
            functional.soft_margin_loss(vectors, x[:, 0].sign()),
            functional.multi_margin_loss(vectors[:, 0], x[:, 0, 0].argmax(1)),
        ]
        return (*made, *losses, self.prelu(h), self.bilinear(vectors, vectors[..., :4]), self.instance(h) * x)


def squares(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss of several results."""
    return torch.stack([output.float().square().mean() for output in outputs]).sum()
