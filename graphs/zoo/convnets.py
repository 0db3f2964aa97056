"""Convolutional networks: AlexNet, VGG-16, ResNet-50 and ResNet-152, and U-Net.

Papers: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (the single-column
AlexNet); K. Simonyan, A. Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015,
Table 1, column D; K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2016, Table 1.
Batch sizes: D. Narayanan et al., "PipeDream", 2019, section 5.1 (AlexNet, VGG-16, ResNet-50); A. Mirhoseini et al.,
"A hierarchical model for device placement", 2018 (ResNet-152).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.registry import ZooModel, in_batches


def logits_or_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """The logits [N, classes], or with labels [N] their mean cross-entropy."""
    return logits if labels is None else F.cross_entropy(logits, labels)


def with_images(model: nn.Module, batch_size: int, image_side: int, classes: int) -> ZooModel:
    """The model with images [N, 3, side, side] and labels [N]."""
    images = torch.randn(batch_size, 3, image_side, image_side)
    return ZooModel(model, (images,), (images, torch.randint(classes, (batch_size,))))


@dataclass(frozen=True)
class AlexNetConfig:
    """``image_side`` pixels in give a ``feature_side`` map after the last pooling."""

    batch_size: int = 256
    image_side: int = 224
    feature_side: int = 6
    channels: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    hidden: int = 4096
    classes: int = 1000


@dataclass(frozen=True)
class VGGConfig:
    """Each stage is (convolutions, channels) and halves the side of its feature map."""

    batch_size: int = 64
    image_side: int = 224
    stages: tuple[tuple[int, int], ...] = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    hidden: int = 4096
    classes: int = 1000


@dataclass(frozen=True)
class ResNetConfig:
    """``blocks`` bottlenecks in each of four stages; ``width`` channels inside the first stage's."""

    blocks: tuple[int, int, int, int]
    batch_size: int = 128
    image_side: int = 224
    width: int = 64
    classes: int = 1000


class AlexNet(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes]; with labels [N], to the mean cross-entropy."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = config.channels
        self.features = nn.Sequential(
            *(nn.Conv2d(3, c1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(c4, c5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(c5 * config.feature_side**2, config.hidden), nn.ReLU()),
            *(nn.Dropout(), nn.Linear(config.hidden, config.hidden), nn.ReLU()),
            nn.Linear(config.hidden, config.classes),
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return logits_or_loss(self.classifier(self.features(images).flatten(1)), labels)


class VGG(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes]; with labels [N], to the mean cross-entropy."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.features = nn.Sequential(*_vgg_features(config))
        feature_side = config.image_side // 2 ** len(config.stages)
        self.classifier = nn.Sequential(
            *(nn.Linear(config.stages[-1][1] * feature_side**2, config.hidden), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(config.hidden, config.hidden), nn.ReLU(), nn.Dropout()),
            nn.Linear(config.hidden, config.classes),
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return logits_or_loss(self.classifier(self.features(images).flatten(1)), labels)


def _vgg_features(config: VGGConfig) -> Iterator[nn.Module]:
    """Convolutions and ReLUs, and a pooling at the end of each stage."""
    channels = 3
    for convolutions, width in config.stages:
        for _ in range(convolutions):
            yield nn.Conv2d(channels, width, 3, padding=1)
            yield nn.ReLU()
            channels = width
        yield nn.MaxPool2d(2)


class ConvNorm(nn.Sequential):
    """Convolution without bias, then batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out),
        )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the first one carries the stride, as in the paper."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.reduce = ConvNorm(channels_in, width, 1, stride)
        self.conv = ConvNorm(width, width, 3)
        self.expand = ConvNorm(width, channels_out, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = ConvNorm(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.conv(F.relu(self.reduce(x))))
        return F.relu(self.expand(inner) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes]; with labels [N], to the mean cross-entropy."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, config.width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        stages: list[nn.Module] = []
        channels = config.width
        for stage, blocks in enumerate(config.blocks):
            width = config.width * 2**stage
            layers: list[nn.Module] = []
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width * Bottleneck.expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        features = self.stages(self.stem(images)).mean((2, 3))
        return logits_or_loss(self.classifier(features), labels)


def alexnet(small: bool, batch_size: int | None) -> ZooModel:
    """AlexNet on images of 224 x 224."""
    config = AlexNetConfig()
    if small:
        config = AlexNetConfig(2, image_side=64, feature_side=1, channels=(4, 8, 8, 8, 8), hidden=16, classes=10)
    config = in_batches(config, batch_size)
    return with_images(AlexNet(config), config.batch_size, config.image_side, config.classes)


def vgg16(small: bool, batch_size: int | None) -> ZooModel:
    """VGG-16 on images of 224 x 224."""
    config = VGGConfig()
    if small:
        stages = ((2, 4), (2, 4), (3, 8), (3, 8), (3, 8))
        config = VGGConfig(2, image_side=32, stages=stages, hidden=16, classes=10)
    config = in_batches(config, batch_size)
    return with_images(VGG(config), config.batch_size, config.image_side, config.classes)


def resnet50(small: bool, batch_size: int | None) -> ZooModel:
    """ResNet-50 on images of 224 x 224."""
    return _resnet(ResNetConfig((3, 4, 6, 3)), small, batch_size)


def resnet152(small: bool, batch_size: int | None) -> ZooModel:
    """ResNet-152 on images of 224 x 224."""
    return _resnet(ResNetConfig((3, 8, 36, 3)), small, batch_size)


def _resnet(config: ResNetConfig, small: bool, batch_size: int | None) -> ZooModel:
    """A ResNet and its images; ``small`` keeps the deepest stage the deepest."""
    if small:
        blocks = (1, 2, 2, 1) if config.blocks[2] == 6 else (1, 2, 3, 1)
        config = ResNetConfig(blocks, 2, image_side=64, width=4, classes=10)
    config = in_batches(config, batch_size)
    return with_images(ResNet(config), config.batch_size, config.image_side, config.classes)


# -- Segmentation ---------------------------------------------------------------------------------------------------
# U-Net: every pixel of an image gets a class, along a path that narrows and one that widens.
#
# Paper: O. Ronneberger, P. Fischer, T. Brox, "U-Net: convolutional networks for biomedical image segmentation", 2015,
# figure 1: 572x572 grey images, convolutions without padding, four halvings from 64 to 1024 channels, 388x388 pixels of
# two classes. Between the paths, maps are cropped and put beside each other. The paper trains on single images; the
# batch here is ours.


@dataclass(frozen=True)
class UNetConfig:
    """Grey images of ``image_side``; ``channels`` of the first level, doubled on each of ``levels - 1`` others."""

    batch_size: int = 8
    image_side: int = 572
    channels: int = 64
    levels: int = 5
    classes: int = 2
    dropout: float = 0.5


class TwoConvolutions(nn.Module):
    """Two 3x3 convolutions without padding, each with a ReLU; [N, C, H, W] to [N, C', H - 4, W - 4]."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3)
        self.second = nn.Conv2d(after, after, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


class Widening(nn.Module):
    """Twice the side and half the channels, beside the middle of an earlier map, through two convolutions."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(before, before // 2, 2, stride=2)
        self.convolutions = TwoConvolutions(before, before // 2)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        x = self.up(x)
        margin, side = (earlier.shape[2] - x.shape[2]) // 2, x.shape[2]
        middle = earlier[:, :, margin : margin + side, margin : margin + side]
        result: Tensor = self.convolutions(torch.cat([middle, x], dim=1))
        return result


class UNet(nn.Module):
    """Images [N, 1, S, S] to logits [N, classes, S', S']; with labels [N, S', S'], to the mean cross-entropy."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.channels * 2**level for level in range(config.levels)]
        self.narrowing = nn.ModuleList(
            TwoConvolutions(before, after) for before, after in zip([1, *widths], widths, strict=False)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.widening = nn.ModuleList(Widening(width) for width in widths[:0:-1])
        self.output = nn.Conv2d(config.channels, config.classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # section 3: variance 2 / fan-in
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = images
        maps: list[Tensor] = []
        for level in self.narrowing:
            x = level(F.max_pool2d(x, 2) if maps else x)
            maps.append(x)
        x = self.dropout(x)
        for level, earlier in zip(self.widening, maps[-2::-1], strict=True):
            x = level(x, earlier)
        logits: Tensor = self.output(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def _output_side(side: int, levels: int) -> int:
    """Pixels on a side that are left: each pair of convolutions takes four."""
    for _ in range(levels - 1):
        side = (side - 4) // 2
    for _ in range(levels - 1):
        side = (side - 4) * 2
    return side - 4


def unet(small: bool, batch_size: int | None) -> ZooModel:
    """U-Net on images of 572x572."""
    config = UNetConfig(2, image_side=44, channels=4, levels=3) if small else UNetConfig()
    config = in_batches(config, batch_size)
    side = _output_side(config.image_side, config.levels)
    images = torch.randn(config.batch_size, 1, config.image_side, config.image_side)
    labels = torch.randint(config.classes, (config.batch_size, side, side))
    return ZooModel(UNet(config), (images,), (images, labels))
