"""Training of a transformer placed on two devices, neither of which could hold it: one process for each."""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun

import placement

if "RANK" not in os.environ:
    torchrun(["--standalone", "--nproc-per-node=2", __file__])
    sys.exit()


class Trained(torch.nn.Module):
    """A transformer with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Transformer(64, 4, 2, 2, 256, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.transformer(source, target), target)


torch.manual_seed(0)  # every process makes the same model, and then keeps its share of it
model = Trained()  # needs 8.4 MB to train, a device has 6 MB
source, target = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
graph = placement.capture(model, (source, target), train=True)
cluster = placement.Cluster.from_toml(Path(__file__).parents[2] / "examples" / "two_cores.toml")
result = placement.optimize(graph, cluster, method="m_sct", seed=0)
placed = placement.apply(model, result, (source, target))
adam = torch.optim.Adam(placed.parameters())  # of this process's own parameters
for step in range(10):
    loss = placed.step(source, target)
    adam.step()
    adam.zero_grad()
    print(f"rank {placed.rank}, step {step}: loss {loss.item():.4f}\n", end="", flush=True)
placed.save("transformer.safetensors")  # all of it, with the model's own keys
