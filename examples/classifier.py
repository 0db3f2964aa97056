"""Model of the tutorials: a text classifier whose output is the loss, and the arguments of one call.

`classifier.py:make` is what a command line calls it: `placement capture examples/classifier.py:make --train`.
"""

import torch
from torch import nn


class Classifier(nn.Module):
    """An embedding, four transformer layers, ten classes: 5.2 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, words: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        states = self.encoder(self.embed(words)).mean(1)
        return nn.functional.cross_entropy(self.head(states), classes)


def make(batch: int = 64) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model, and a global batch of 64 texts with 64 words each."""
    torch.manual_seed(0)
    return Classifier(), (torch.randint(8000, (batch, 64)), torch.randint(10, (batch,)))
