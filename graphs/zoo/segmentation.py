"""U-Net: every pixel of an image gets a class, along a path that narrows and one that widens.

Paper: O. Ronneberger, P. Fischer, T. Brox, "U-Net: convolutional networks for biomedical image segmentation", 2015,
figure 1: 572x572 grey images, convolutions without padding, four halvings from 64 to 1024 channels, 388x388 pixels of
two classes. Between the paths, maps are cropped and put beside each other. The paper trains on single images; the
batch here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.records import ZooModel, in_batches


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
