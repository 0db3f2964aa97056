"""Parts that the image classifiers share: the end of their forward pass, and a batch of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.records import ZooModel


def logits_or_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """The logits [N, classes], or with labels [N] their mean cross-entropy."""
    return logits if labels is None else F.cross_entropy(logits, labels)


def with_images(model: nn.Module, batch_size: int, image_side: int, classes: int) -> ZooModel:
    """The model with images [N, 3, side, side] and labels [N]."""
    images = torch.randn(batch_size, 3, image_side, image_side)
    return ZooModel(model, (images,), (images, torch.randint(classes, (batch_size,))))
