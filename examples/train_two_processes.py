"""Train a transformer on two devices, neither of which could hold it: one process for each, started by torchrun.

    torchrun --standalone --nproc-per-node=2 examples/train_two_processes.py

On two hosts, one device on each (--node-rank=1 on the second), with host0 the name of the first:

    torchrun --nnodes=2 --node-rank=0 --master-addr=host0 --master-port=29500 examples/train_two_processes.py
"""

import torch
from torch import nn

import placement
from env.cluster import Device, both_ways

torch.manual_seed(0)  # every process makes the same model, and then keeps its share of it
model = nn.Transformer(64, 4, 2, 2, 256, batch_first=True)
source, target = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
graph = placement.capture(model, (source, target), train=True)
cores = tuple(Device(f"cpu{i}", "cpu", 6_000_000, {"float32": 5e10}, 1e10, 2e-6) for i in range(2))  # 8.4 MB needed
cluster = placement.Cluster("two cores", cores, both_ways("cpu0", "cpu1", 1e9, 1e-4))
result = placement.optimize(graph, cluster, method="m_sct", seed=0)
placed = placement.apply(model, result, (source, target))
adam = torch.optim.Adam(placed.parameters())  # of this process's own parameters
for step in range(10):
    adam.zero_grad()
    loss = nn.functional.mse_loss(placed(source, target), target)
    loss.backward()
    adam.step()
    print(f"rank {placed.rank}, step {step}: loss {loss.item():.4f}\n", end="", flush=True)
placed.save("transformer.safetensors")  # all of it, with the model's own keys
