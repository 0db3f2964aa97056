"""Run it: train under the strategy that was found, one process for each device, neither of which could hold the model.

    python examples/run_it.py

starts the two of this host, as `torchrun --standalone --nproc-per-node=2` does. On two hosts, one device on each
(--node-rank=1 on the second), with host0 the name of the first:

    torchrun --nnodes=2 --node-rank=0 --master-addr=host0 --master-port=29500 examples/run_it.py

train_llama.py goes on from there: checkpoints, clipping, restarts, other numbers of processes.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.run import main as torchrun

import placement

if "RANK" not in os.environ:
    torchrun(["--standalone", "--nproc-per-node=2", __file__])
    sys.exit()


class Translator(nn.Module):
    """A transformer with its loss: it needs 8.4 MB to train, and a device has 6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(64, 4, 2, 2, 256, batch_first=True, dropout=0.0)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.transformer(source, target), target)


torch.manual_seed(0)  # every process makes the same model, and then keeps its share of it
model = Translator()
args = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
graph = placement.capture(model, args, train=True)
cluster = placement.Cluster.from_toml(Path(__file__).with_name("two_cores.toml"))
result = placement.optimize(graph, cluster, seed=0, evaluations=500)  # the same answer in every process
placed = placement.apply(model, result, args)
adam = torch.optim.Adam(placed.parameters())  # of this process's own parameters
for step in range(10):
    loss = placed.step(*args)  # forward, loss and backward, with the exchanges of the strategy
    adam.step()
    adam.zero_grad()
    print(f"rank {placed.rank} of {result.strategy.text!r}, step {step}: loss {loss.item():.4f}\n", end="", flush=True)
placed.save("translator.safetensors")  # all of it, with the model's own keys
