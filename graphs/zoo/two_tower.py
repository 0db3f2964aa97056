"""Retrieval by two towers: a user network and an item network that meet only in a dot product.

Papers: P.-S. Huang et al., "Learning deep structured semantic models for web search using clickthrough data", 2013,
section 3 (two deep networks, cosine similarity, softmax over candidates); X. Yi et al., "Sampling-bias-corrected
neural modeling for large corpus item recommendations", 2019, section 3 (the other items of the batch are the
candidates). The sizes are ours: eight wide layers in each tower, so that computing outweighs everything else and two
devices can be nearly twice as fast as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.zoo.registry import ZooModel, in_batches


@dataclass(frozen=True)
class TwoTowerConfig:
    """Each side has ``fields`` categorical features, all from one vocabulary per side."""

    batch_size: int = 4096
    fields: int = 16
    vocabulary: int = 100_000
    embedded: int = 128
    width: int = 4096
    layers: int = 8
    output: int = 256
    temperature: float = 0.05


class Tower(nn.Module):
    """Categories [N, fields] to a unit vector [N, output]."""

    def __init__(self, config: TwoTowerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.embedded)
        layers: list[nn.Module] = []
        size = config.fields * config.embedded
        for _ in range(config.layers):
            layers += [nn.Linear(size, config.width), nn.ReLU()]
            size = config.width
        self.layers = nn.Sequential(*layers, nn.Linear(size, config.output))

    def forward(self, categories: Tensor) -> Tensor:
        vectors: Tensor = self.layers(self.embedding(categories).flatten(1))
        return F.normalize(vectors, dim=1)


class TwoTower(nn.Module):
    """User and item categories, [N, fields] each, to the score of each pair [N]; with labels [N], to the loss.

    A label is the row of the item that the user chose; the loss is the cross-entropy over all items of the batch.
    """

    def __init__(self, config: TwoTowerConfig) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.user = Tower(config)
        self.item = Tower(config)

    def forward(self, users: Tensor, items: Tensor, labels: Tensor | None = None) -> Tensor:
        user, item = self.user(users), self.item(items)
        if labels is None:
            scores: Tensor = (user * item).sum(1)
            return scores
        return F.cross_entropy(torch.matmul(user, item.T) / self.temperature, labels)


def two_tower(small: bool, batch_size: int | None) -> ZooModel:
    """Two towers of eight layers, 16 categorical features for each."""
    config = TwoTowerConfig()
    if small:
        config = TwoTowerConfig(2, fields=3, vocabulary=20, embedded=4, width=16, layers=3, output=8)
    config = in_batches(config, batch_size)
    users, items = torch.randint(config.vocabulary, (2, config.batch_size, config.fields)).unbind(0)
    labels = torch.randint(config.batch_size, (config.batch_size,))
    return ZooModel(TwoTower(config), (users, items), (users, items, labels))
