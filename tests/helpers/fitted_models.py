"""Small models with data, to be fitted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from env.cluster import Cluster, Device, both_ways


class Classifier(nn.Module):
    """A network of one hidden layer whose output is its loss."""

    def __init__(self, *hidden: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


def classifier(*hidden: nn.Module, samples: int = 200) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model, and samples of three classes that a linear map tells apart."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 3, generator=generator)).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier(*hidden), (inputs, targets)


def cores(count: int) -> Cluster:
    """CPU cores on a bus, with round figures."""
    devices = [Device(f"core{k}", "cpu", 2**30, {"float32": 1e9}, 1e9) for k in range(count)]
    links = [link for device in devices for link in both_ways(device.name, "bus", 1e9, 1e-6)]
    return Cluster("cores", tuple(devices), tuple(links))
