"""Models that several tests of capturing take."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rnn = nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.bilinear = nn.Bilinear(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.conv(x)).flatten(2).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(y, y, y)
        y, _ = self.attention(y, y, y, need_weights=False)
        y, _ = self.rnn(y)
        return self.bilinear(y, y).sum() + torch.einsum("bij,bkj->bik", y, y).sum()
