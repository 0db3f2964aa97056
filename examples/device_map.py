"""A model that fits on no single GPU, loaded by transformers where a placement says.

python examples/device_map.py      # needs: pip install transformers accelerate
"""

from __future__ import annotations

import dataclasses
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import placement
from env.cluster import Cluster, both_ways

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, vocab_size=1000
)
model = LlamaForCausalLM(config).eval()
args = (torch.randint(0, 999, (1, 32)),)
graph = placement.capture(model, args, {"use_cache": False})

# Two GPUs with room for three quarters of the weights each.
room = int(graph.kept_bytes.sum()) * 3 // 4
small = {"memory_bytes": room, "reserved_bytes": 0}
gpus = [dataclasses.replace(gpu, **small) for gpu in Cluster.preset("4xV100-pcie").devices[:2]]
cluster = Cluster("two small GPUs", tuple(gpus), both_ways("gpu0", "gpu1", 1e10, 1e-5))
result = placement.optimize(graph, cluster, seed=0, evaluations=1000, strategy="none")
device_map = placement.export(result, "device_map", model=model)
print(device_map)

# Where there are no two GPUs, show it with the main memory and the disk in their places.
if torch.cuda.device_count() < 2:
    device_map = {path: "disk" if place == 1 else "cpu" for path, place in device_map.items()}
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=f"{folder}/offloaded")
    with torch.no_grad():
        same = torch.allclose(loaded.eval()(*args).logits.cpu(), model(*args).logits, atol=1e-5)
print("loaded in", len(set(device_map.values())), "places, same outputs:", same)
