"""Pieces of models of images `[BATCH, CHANNELS, SIDE, SIDE]` and of signals `[BATCH, CHANNELS, SPAN]`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.helpers.wide_net.pieces import Function, Table

CHANNELS, SIDE, SPAN = 4, 6, 8
_PADDINGS = ("zeros", "circular", "reflect", "replicate")


def _shared(dims: int) -> Table:
    """Pieces of images and signals alike."""
    conv, transposed = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
    pads, pixels = ("Reflection", "Replication", "Zero", "Circular"), SIDE**2 if dims == 2 else SPAN
    return {
        "conv": lambda: conv(CHANNELS, CHANNELS, 3, padding=1),
        "conv_without_bias": lambda: conv(CHANNELS, CHANNELS, 3, padding=1, bias=False),
        "conv_of_ones": lambda: conv(CHANNELS, CHANNELS, 1),
        "conv_grouped": lambda: conv(CHANNELS, CHANNELS, 3, padding=1, groups=2),
        "conv_depthwise": lambda: conv(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
        "conv_dilated": lambda: conv(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
        "conv_same": lambda: conv(CHANNELS, CHANNELS, 3, padding="same"),
        "conv_strided": lambda: nn.Sequential(conv(CHANNELS, 6, 2, 2), transposed(6, CHANNELS, 2, 2)),
        "conv_transposed": lambda: transposed(CHANNELS, CHANNELS, 3, padding=1),
        "conv_transposed_grouped": lambda: transposed(CHANNELS, CHANNELS, 3, padding=1, groups=2),
        **{
            f"conv_{mode}": lambda mode=mode: conv(CHANNELS, CHANNELS, 3, padding=1, padding_mode=mode)
            for mode in _PADDINGS[1:]
        },
        **{
            f"{name}_pad": lambda name=name: nn.Sequential(
                getattr(nn, f"{name}Pad{dims}d")(1), conv(CHANNELS, CHANNELS, 3)
            )
            for name in pads
        },
        "conv_weight_norm": lambda: parametrizations.weight_norm(conv(CHANNELS, CHANNELS, 3, padding=1)),
        "conv_spectral_norm": lambda: parametrizations.spectral_norm(conv(CHANNELS, CHANNELS, 3, padding=1)),
        "conv_gate": lambda: Function(lambda h, inner: torch.mul(*inner(h).chunk(2, 1)), conv(CHANNELS, 8, 1)),
        "conv_glu": lambda: Function(lambda h, inner: functional.glu(inner(h), 1), conv(CHANNELS, 8, 3, padding=1)),
        "conv_twice": lambda: Function(lambda h, inner: inner(inner(h).relu()), conv(CHANNELS, CHANNELS, 3, padding=1)),
        "conv_residual": lambda: Function(lambda h, inner: h + inner(h), conv(CHANNELS, CHANNELS, 3, padding=1)),
        "batch_norm": lambda: getattr(nn, f"BatchNorm{dims}d")(CHANNELS),
        "batch_norm_plain": lambda: getattr(nn, f"BatchNorm{dims}d")(CHANNELS, affine=False, track_running_stats=False),
        "instance_norm": lambda: getattr(nn, f"InstanceNorm{dims}d")(CHANNELS),
        "instance_norm_affine": lambda: getattr(nn, f"InstanceNorm{dims}d")(CHANNELS, affine=True),
        "group_norm": lambda: nn.GroupNorm(2, CHANNELS),
        "channel_norm": lambda: Function(
            lambda h, norm: norm(h.movedim(1, -1)).movedim(-1, 1), nn.LayerNorm(CHANNELS, eps=1e-3)
        ),
        "channel_scale": lambda: Function(lambda h, a: h * a.view(-1, *[1] * (h.ndim - 2)), torch.rand(CHANNELS) + 0.5),
        "channel_softmax": lambda: nn.Softmax(1),
        "channel_dropout": lambda: getattr(nn, f"Dropout{dims}d")(0.3),
        "channel_shuffle": lambda: Function(
            lambda h: h.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2) + functional.channel_shuffle(h, 2)
        ),
        "channels_flipped": lambda: Function(lambda h: h.flip(1)),
        "channel_halves": lambda: Function(lambda h: torch.cat([h[:, :2] * h[:, 2:], h[:, :2]], 1)),
        "squeeze_excite": lambda: Function(
            lambda h, inner: h * inner(h.flatten(2).mean(2)).sigmoid().view(*h.shape[:2], *[1] * (h.ndim - 2)),
            nn.Sequential(nn.Linear(CHANNELS, 2), nn.ReLU(), nn.Linear(2, CHANNELS)),
        ),
        "local_response": lambda: nn.LocalResponseNorm(2),
        "max_pool": lambda: getattr(nn, f"MaxPool{dims}d")(3, 1, 1),
        "avg_pool": lambda: getattr(nn, f"AvgPool{dims}d")(3, 1, 1),
        "lp_pool": lambda: Function(
            lambda h: nn.Upsample(scale_factor=2)(getattr(nn, f"LPPool{dims}d")(2, 2)(h.abs() + 0.1))
        ),
        "adaptive_pool": lambda: Function(lambda h: h + getattr(functional, f"adaptive_avg_pool{dims}d")(h, 1)),
        "adaptive_max": lambda: Function(lambda h: h + getattr(functional, f"adaptive_max_pool{dims}d")(h, 1)),
        "pooled_and_back": lambda: nn.Sequential(getattr(nn, f"MaxPool{dims}d")(2), nn.Upsample(scale_factor=2)),
        "pixels_flipped": lambda: Function(lambda h: h.flip(-1) + h),
        "pixels_softmax": lambda: Function(lambda h: h.flatten(2).softmax(-1).view(h.shape)),
        "pixels_rolled": lambda: Function(lambda h: h.roll(1, -1)),
        "attention_of_pixels": lambda: Function(
            lambda h, inner: (
                h + inner(*[h.flatten(2).transpose(1, 2)] * 3, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
            ),
            nn.MultiheadAttention(CHANNELS, 2, batch_first=True),
        ),
        "linear_of_channels": lambda: Function(
            lambda h, inner: inner(h.movedim(1, -1)).movedim(-1, 1), nn.Linear(CHANNELS, CHANNELS)
        ),
        "linear_of_pixels": lambda: Function(
            lambda h, inner: inner(h.flatten(2)).view(h.shape), nn.Linear(pixels, pixels)
        ),
    }


def _moved(h: Tensor, angle: Tensor) -> Tensor:
    """A spatial transformer that turns images."""
    turn = torch.stack([angle.cos(), -angle.sin(), angle.new_zeros(()), angle.sin(), angle.cos(), angle.new_zeros(())])
    grid = functional.affine_grid(turn.view(1, 2, 3).expand(len(h), -1, -1), list(h.shape), align_corners=False)
    return functional.grid_sample(h, grid, align_corners=False)


def _spectrogram(h: Tensor) -> Tensor:
    found = torch.stft(h.flatten(0, 1), 4, 2, return_complex=True, window=torch.ones(4, dtype=h.dtype))
    return found.abs().mean((1, 2)).view(*h.shape[:2], 1)


def _by_images(h: Tensor, kernels: nn.Module) -> Tensor:
    """A convolution with a kernel that each image makes for itself."""
    weight = kernels(h.mean((2, 3))).view(-1, 1, 3, 3)
    return functional.conv2d(h.reshape(1, -1, SIDE, SIDE), weight, padding=1, groups=len(weight)).view(h.shape)


def _in_windows(h: Tensor) -> Tensor:
    """Windows of 3 x 3, as Swin has them."""
    windows = h.roll((1, 1), (2, 3)).unflatten(3, (2, 3)).unflatten(2, (2, 3)).permute(0, 2, 4, 3, 5, 1)
    windows = windows.reshape(-1, 9, CHANNELS).softmax(1).view(-1, 2, 2, 3, 3, CHANNELS)
    return windows.permute(0, 5, 1, 3, 2, 4).reshape(h.shape)


OF_IMAGES: Table = _shared(2) | {
    "layer_norm_of_images": lambda: nn.LayerNorm([CHANNELS, SIDE, SIDE]),
    "pixel_shuffle": lambda: nn.Sequential(nn.Conv2d(CHANNELS, 16, 1), nn.PixelShuffle(2), nn.MaxPool2d(2)),
    "pixel_unshuffle": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 16, 1), nn.PixelShuffle(2)),
    "unfold_fold": lambda: Function(
        lambda h: functional.fold(functional.unfold(h, 3, padding=1), (SIDE, SIDE), 3, padding=1)
    ),
    "bilinear_upsampled": lambda: Function(
        lambda h: functional.avg_pool2d(functional.interpolate(h, scale_factor=2, mode="bilinear"), 2)
    ),
    "bicubic_resized": lambda: Function(lambda h: functional.interpolate(h, (SIDE, SIDE), mode="bicubic") + h),
    "rotated_quarter": lambda: Function(lambda h: h.rot90(1, (2, 3))),
    "spatial_transformer": lambda: Function(_moved, torch.tensor(0.3)),
    "windows": lambda: Function(_in_windows),
    "filtered_by_fft": lambda: Function(
        lambda h, w: torch.fft.irfft2(torch.fft.rfft2(h) * w, s=(SIDE, SIDE)),
        torch.randn(CHANNELS, SIDE, 4, dtype=torch.complex128),
    ),
    "channels_last": lambda: Function(
        lambda h, inner: inner(h.to(memory_format=torch.channels_last)), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    ),
    "images_transposed": lambda: Function(lambda h: h.mT.contiguous() + h),
    "conv_by_images": lambda: Function(
        _by_images,
        nn.Linear(CHANNELS, 9 * CHANNELS),
    ),
    "fractional_stride": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, 1, 1, dilation=1),
    "unpooled": lambda: Function(
        lambda h: functional.max_unpool2d(*functional.max_pool2d(h, 2, return_indices=True), 2)
    ),
    "total_variation": lambda: Function(lambda h: h * (h.diff(dim=-1).abs().mean((1, 2, 3), keepdim=True) + 1)),
}
OF_SIGNALS: Table = _shared(1) | {
    "signals_fft": lambda: Function(
        lambda h, w: torch.fft.irfft(torch.fft.rfft(h) * w, n=SPAN), torch.randn(CHANNELS, 5, dtype=torch.complex128)
    ),
    "mixed_spectrum": lambda: Function(
        lambda h, w: torch.fft.irfft(torch.einsum("bik,iok->bok", torch.fft.rfft(h), w), n=SPAN),
        torch.randn(CHANNELS, CHANNELS, 5, dtype=torch.complex128) / 2,
    ),
    "linear_upsampled": lambda: Function(
        lambda h: functional.avg_pool1d(functional.interpolate(h, scale_factor=2, mode="linear"), 2)
    ),
    "gated_dilated": lambda: Function(
        lambda h, a, b: h + a(h).tanh() * b(h).sigmoid(),
        nn.Conv1d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
        nn.Conv1d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
    ),
    "spectrogram": lambda: Function(lambda h: h + _spectrogram(h)),
    "recurrent_signal": lambda: Function(
        lambda h, inner: inner(h.permute(2, 0, 1))[0].permute(1, 2, 0), nn.GRU(CHANNELS, CHANNELS)
    ),
}
