"""Downpour SGD for real, on two processes of this host: a worker that pushes gradients, and the weights' server."""

from pathlib import Path

import torch
from torch import nn

import placement


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


torch.manual_seed(0)
inputs = torch.randn(600, 16)
targets = (inputs @ torch.randn(16, 4)).argmax(1)
cluster = placement.Cluster.from_toml(Path(__file__).with_name("two_cores.toml"))
method = "downpour:fetch=2+adagrad"  # a worker fetches the weights every second step
found = placement.fit(Classifier(), (inputs, targets), cluster, method, workers=1, updates=200, lr=0.1, real=True)
for point in found.runs[0].points:
    print(f"after {point.updates} updates: loss {point.loss:.3f}, {point.bytes:,} bytes sent")
