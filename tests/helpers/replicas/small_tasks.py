"""Problems of a few hundred weights that replicas fit within milliseconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from env.cluster import Cluster
from placement.fitting.methods import FitMethod
from placement.fitting.participants import Participant, Role
from placement.fitting.task import FitTask
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Speeds

LEARNING_RATE = 0.05


def regression(samples: int = 96, batch: int = 4, seed: int = 0, width: int = 10) -> FitTask:
    """Two linear layers with a tanh between them, on the outputs of such a network with some noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(6, 3, generator=generator)) + 0.1 * torch.randn(
        samples, 3, generator=generator
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
            for value in self.parameters():
                value.data = 0.3 * torch.randn(value.shape, generator=generator)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return (self.layers(inputs) - targets).square().mean()

    return FitTask(Model(), (inputs, targets), (inputs[:16], targets[:16]), batch, loss=lambda value: value)


def engine(task: FitTask, method: str, workers: int = 4, seed: int = 0) -> VirtualEngine:
    """A method on as many GPUs of a node as it has workers and servers, a millisecond for a gradient."""
    parts = FitMethod.parse(method)
    rate = parts.learning_rate or LEARNING_RATE
    everyone = workers + len(parts.exchange.servers(workers))
    roles = [Role(number, workers, task.weights(), task.layout, parts, rate, seed) for number in range(everyone)]
    participants: list[Participant] = [parts.exchange.participant(role) for role in roles]
    cluster = Cluster.preset("8xH100-nvswitch")
    speeds = Speeds([number % 8 for number in range(everyone)], lambda *_: 1e-3, lambda _: 1e-5)
    return VirtualEngine(task, cluster, workers, participants, speeds)
