"""Inception-v3: C. Szegedy, V. Vanhoucke, S. Ioffe, J. Shlens, Z. Wojna, "Rethinking the Inception architecture for
computer vision", 2016, Table 1 and figures 5, 6, 7 and 10, with the channel numbers of the authors' release.

The auxiliary classifier, a training aid that the paper finds to act as a regulariser, is left out. Batch size:
A. Mirhoseini et al., "Device placement optimization with reinforcement learning", 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.convnets import logits_or_loss, with_images
from graphs.zoo.registry import ZooModel, in_batches

Kernel = int | tuple[int, int]


@dataclass(frozen=True)
class InceptionConfig:
    """Every channel number of the paper is divided by ``narrowing``."""

    batch_size: int = 32
    image_side: int = 299
    narrowing: int = 1
    classes: int = 1000


class ConvNormReLU(nn.Sequential):
    """Convolution without bias, batch normalisation and ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel: Kernel, stride: int = 1, pad: bool = True) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if pad else (0, 0)
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(channels_out, eps=1e-3),
            nn.ReLU(),
        )


def _path(channels_in: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions one after the other, each given as (channels out, kernel)."""
    modules: list[nn.Module] = []
    for channels_out, kernel in layers:
        modules.append(ConvNormReLU(channels_in, channels_out, kernel))
        channels_in = channels_out
    return nn.Sequential(*modules)


class Block(nn.Module):
    """Branches that read the same input, their outputs joined along the channels."""

    def __init__(self, branches: dict[str, nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches.values()], dim=1)


class Fork(nn.Module):
    """A path whose end is read by a 1x3 and a 3x1 convolution side by side (figure 7)."""

    def __init__(self, stem: nn.Module, channels: int) -> None:
        super().__init__()
        self.stem = stem
        self.wide = ConvNormReLU(channels, channels, (1, 3))
        self.tall = ConvNormReLU(channels, channels, (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.wide(x), self.tall(x)], dim=1)


def _average_pool() -> nn.Module:
    """3x3 average pooling that keeps the grid."""
    return nn.AvgPool2d(3, stride=1, padding=1)


def _block_35(channels: int, pool_channels: int, k: int) -> Block:
    """Figure 5: 5x5 as in the release, and a double 3x3."""
    return Block(
        {
            "conv1": _path(channels, (64 // k, 1)),
            "conv5": _path(channels, (48 // k, 1), (64 // k, 5)),
            "conv3_3": _path(channels, (64 // k, 1), (96 // k, 3), (96 // k, 3)),
            "pool": nn.Sequential(_average_pool(), *_path(channels, (pool_channels, 1))),
        }
    )


def _reduction_35_to_17(channels: int, k: int) -> Block:
    """Figure 10: halves the grid by strided convolutions beside a pooling."""
    return Block(
        {
            "conv3": ConvNormReLU(channels, 384 // k, 3, stride=2, pad=False),
            "conv3_3": nn.Sequential(
                *_path(channels, (64 // k, 1), (96 // k, 3)),
                ConvNormReLU(96 // k, 96 // k, 3, stride=2, pad=False),
            ),
            "pool": nn.MaxPool2d(3, 2),
        }
    )


def _block_17(channels: int, inner: int, k: int) -> Block:
    """Figure 6: 7x7 factored into 1x7 and 7x1."""
    out = 192 // k
    return Block(
        {
            "conv1": _path(channels, (out, 1)),
            "conv7": _path(channels, (inner, 1), (inner, (1, 7)), (out, (7, 1))),
            "conv7_7": _path(channels, (inner, 1), (inner, (7, 1)), (inner, (1, 7)), (inner, (7, 1)), (out, (1, 7))),
            "pool": nn.Sequential(_average_pool(), *_path(channels, (out, 1))),
        }
    )


def _reduction_17_to_8(channels: int, k: int) -> Block:
    """The second reduction, as in the release: 3x3 and 7x7 branches beside a pooling."""
    c = 192 // k
    return Block(
        {
            "conv3": nn.Sequential(*_path(channels, (c, 1)), ConvNormReLU(c, 320 // k, 3, stride=2, pad=False)),
            "conv7_3": nn.Sequential(
                *_path(channels, (c, 1), (c, (1, 7)), (c, (7, 1))),
                ConvNormReLU(c, c, 3, stride=2, pad=False),
            ),
            "pool": nn.MaxPool2d(3, 2),
        }
    )


def _block_8(channels: int, k: int) -> Block:
    """Figure 7: the filter bank widened by forks."""
    c = 384 // k
    return Block(
        {
            "conv1": _path(channels, (320 // k, 1)),
            "conv3": Fork(_path(channels, (c, 1)), c),
            "conv3_3": Fork(_path(channels, (448 // k, 1), (c, 3)), c),
            "pool": nn.Sequential(_average_pool(), *_path(channels, (192 // k, 1))),
        }
    )


class InceptionV3(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes]; with labels [N], to the mean cross-entropy."""

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        k = config.narrowing
        self.stem = nn.Sequential(
            ConvNormReLU(3, 32 // k, 3, stride=2, pad=False),
            ConvNormReLU(32 // k, 32 // k, 3, pad=False),
            ConvNormReLU(32 // k, 64 // k, 3),
            nn.MaxPool2d(3, 2),
            ConvNormReLU(64 // k, 80 // k, 1),
            ConvNormReLU(80 // k, 192 // k, 3, pad=False),
            nn.MaxPool2d(3, 2),
        )
        self.blocks = nn.Sequential(
            _block_35(192 // k, 32 // k, k),
            _block_35(256 // k, 64 // k, k),
            _block_35(288 // k, 64 // k, k),
            _reduction_35_to_17(288 // k, k),
            _block_17(768 // k, 128 // k, k),
            _block_17(768 // k, 160 // k, k),
            _block_17(768 // k, 160 // k, k),
            _block_17(768 // k, 192 // k, k),
            _reduction_17_to_8(768 // k, k),
            _block_8(1280 // k, k),
            _block_8(2048 // k, k),
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(2048 // k, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        features = F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)
        return logits_or_loss(self.classifier(self.dropout(features)), labels)


def inception_v3(small: bool, batch_size: int | None) -> ZooModel:
    """Inception-v3 on images of 299 x 299."""
    config = InceptionConfig(2, image_side=75, narrowing=16, classes=10) if small else InceptionConfig()
    config = in_batches(config, batch_size)
    return with_images(InceptionV3(config), config.batch_size, config.image_side, config.classes)
