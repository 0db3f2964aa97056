"""Three ways to train one's own model on four GPUs: which reaches a loss first, if every gradient may straggle?"""

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
cluster = placement.Cluster.preset("4xV100-pcie")
methods = ["sync", "local_sgd:period=8", "downpour:fetch=5+adagrad"]
found = placement.fit(
    Classifier(), (inputs, targets), cluster, methods, until=0.6, lr=0.1, stragglers="exponential:mean=1"
)
print(found.advice())
for run in found.runs:
    print(f"{run.method}: loss {run.loss:.3f}, {run.seconds * 1e3:.2f} ms, {run.bytes:,} bytes")
