"""NASNet-A: B. Zoph, V. Vasudevan, J. Shlens, Q. V. Le, "Learning transferable architectures for scalable image
recognition", 2018, figures 2 and 4 and Table 2 (6 @ 4032: six normal cells per stack, 4032 channels at the end).

Each cell reads the two cells before it and joins five two-branch blocks, so that several separable convolutions can
run side by side. The stem, and the choice that the cell after a reduction skips it, follow the authors' release; the
auxiliary classifier is left out. The batch size is ours: the paper states none for a single step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.convnets import logits_or_loss, with_images
from graphs.zoo.registry import ZooModel, in_batches

BATCH_NORM_EPS = 1e-3


@dataclass(frozen=True)
class NASNetConfig:
    """``filters`` per block in the first stack; a stack ends with ``6 * filters`` channels, the next has twice that."""

    batch_size: int = 32
    image_side: int = 331
    cells_per_stack: int = 6
    filters: int = 168
    stem_channels: int = 96
    classes: int = 1000


def _norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation with the epsilon of the release."""
    return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)


class SeparableBranch(nn.Module):
    """ReLU, depthwise and pointwise convolution, normalisation; all of it twice, as the paper applies them."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.first = self._half(channels_in, channels_out, kernel, stride)
        self.second = self._half(channels_out, channels_out, kernel, 1)

    @staticmethod
    def _half(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_in, kernel, stride, kernel // 2, groups=channels_in, bias=False),
            nn.Conv2d(channels_in, channels_out, 1, bias=False),
            _norm(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class Squeeze(nn.Sequential):
    """ReLU, 1x1 convolution and normalisation: brings a cell's input to its number of filters."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(channels_in, channels_out, 1, bias=False), _norm(channels_out))


class FactorizedReduction(nn.Module):
    """Halves the grid without losing half the pixels: two strided 1x1 convolutions, one of them shifted by a pixel."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - channels_out // 2, 1, stride=2, bias=False)
        self.norm = _norm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        result: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return result


def _average_pool(x: Tensor, stride: int = 1) -> Tensor:
    """3x3 average pooling that does not count the padding."""
    return F.avg_pool2d(x, 3, stride, padding=1, count_include_pad=False)


def _max_pool(x: Tensor) -> Tensor:
    """3x3 max pooling that halves the grid."""
    return F.max_pool2d(x, 3, stride=2, padding=1)


@dataclass(frozen=True)
class Feature:
    """Channels of a cell's output, and how many times the image has been halved there."""

    channels: int
    halvings: int


def _adjust(source: Feature, target_halvings: int, filters: int) -> nn.Module:
    """Bring the output of an earlier cell to this cell's grid and filters."""
    if source.halvings != target_halvings:
        return FactorizedReduction(source.channels, filters)
    return Squeeze(source.channels, filters) if source.channels != filters else nn.Identity()


class NormalCell(nn.Module):
    """Figure 4, left: (last, one before) to the ``6 * filters`` channels of its blocks, on the same grid."""

    def __init__(self, last: Feature, before: Feature, filters: int) -> None:
        super().__init__()
        self.squeeze_last = Squeeze(last.channels, filters)
        self.adjust_before = _adjust(before, last.halvings, filters)
        self.block1_left = SeparableBranch(filters, filters, 5)
        self.block1_right = SeparableBranch(filters, filters, 3)
        self.block2_left = SeparableBranch(filters, filters, 5)
        self.block2_right = SeparableBranch(filters, filters, 3)
        self.block5_left = SeparableBranch(filters, filters, 3)
        self.output = Feature(6 * filters, last.halvings)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        last, before = self.squeeze_last(last), self.adjust_before(before)
        blocks = [
            before,
            self.block1_left(last) + self.block1_right(before),
            self.block2_left(before) + self.block2_right(before),
            _average_pool(last) + before,
            _average_pool(before) + _average_pool(before),
            self.block5_left(last) + last,
        ]
        return torch.cat(blocks, dim=1)


class ReductionCell(nn.Module):
    """Figure 4, right: (last, one before) to the ``4 * filters`` channels of its blocks, on half the grid.

    ``before=None`` stands for the first cell of the network, which reads the stem twice.
    """

    def __init__(self, last: Feature, before: Feature | None, filters: int) -> None:
        super().__init__()
        self.squeeze_last = Squeeze(last.channels, filters)
        # The release hands the raw stem to the first cell, so its separable branches see more channels.
        self.adjust_before = nn.Identity() if before is None else _adjust(before, last.halvings, filters)
        wide = last.channels if before is None else filters
        self.block1_left = SeparableBranch(filters, filters, 5, stride=2)
        self.block1_right = SeparableBranch(wide, filters, 7, stride=2)
        self.block2_right = SeparableBranch(wide, filters, 7, stride=2)
        self.block3_right = SeparableBranch(wide, filters, 5, stride=2)
        self.block5_left = SeparableBranch(filters, filters, 3)
        self.output = Feature(4 * filters, last.halvings + 1)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        last, before = self.squeeze_last(last), self.adjust_before(before)
        pooled = _max_pool(last)
        block1 = self.block1_left(last) + self.block1_right(before)
        block2 = pooled + self.block2_right(before)
        block3 = _average_pool(last, stride=2) + self.block3_right(before)
        block4 = _average_pool(block1) + block2
        block5 = self.block5_left(block1) + pooled
        return torch.cat([block2, block3, block4, block5], dim=1)


class NASNetA(nn.Module):
    """Images [N, 3, side, side] to logits [N, classes]; with labels [N], to the mean cross-entropy."""

    def __init__(self, config: NASNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, config.stem_channels, 3, stride=2, bias=False), _norm(config.stem_channels)
        )
        stem = Feature(config.stem_channels, 1)
        self.stem_cell1 = ReductionCell(stem, None, config.filters // 4)
        self.stem_cell2 = ReductionCell(self.stem_cell1.output, stem, config.filters // 2)
        before, last = self.stem_cell1.output, self.stem_cell2.output
        self.reductions = nn.ModuleList()
        self.stacks = nn.ModuleList()
        for stack in range(3):
            filters = config.filters * 2**stack
            if stack > 0:
                reduction = ReductionCell(last, before, filters)
                self.reductions.append(reduction)
                # `before` stays where it was: the first cell of a stack reads past the reduction.
                last = reduction.output
            cells = nn.ModuleList()
            for _ in range(config.cells_per_stack):
                cell = NormalCell(last, before, filters)
                cells.append(cell)
                before, last = last, cell.output
            self.stacks.append(cells)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(last.channels, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        stem = self.stem(images)
        before = self.stem_cell1(stem, stem)
        last = self.stem_cell2(before, stem)
        for stack, cells in enumerate(self.stacks):
            if stack > 0:
                last = self.reductions[stack - 1](last, before)
            assert isinstance(cells, nn.ModuleList)
            for cell in cells:
                before, last = last, cell(last, before)
        features = F.relu(last).mean((2, 3))
        return logits_or_loss(self.classifier(self.dropout(features)), labels)


def nasnet_large(small: bool, batch_size: int | None) -> ZooModel:
    """NASNet-A (6 @ 4032) on images of 331 x 331."""
    config = NASNetConfig()
    if small:
        config = NASNetConfig(2, image_side=67, cells_per_stack=2, filters=16, stem_channels=8, classes=10)
    config = in_batches(config, batch_size)
    return with_images(NASNetA(config), config.batch_size, config.image_side, config.classes)
