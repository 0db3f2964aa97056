"""Train a small Llama on text under the strategy that is found for a cluster, one process for each of its devices.

    python examples/train_llama.py two_cores.toml
    python examples/train_llama.py four_cores.toml

It needs transformers (`pip install transformers`; `make .venv/.test` has it).
The second run goes on where the first one ended, on twice as many processes and under another strategy. A run that was
killed goes on like that, too: from its last checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM

import placement

torch.manual_seed(0)  # every process makes the same model, and then keeps its part of it
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes))
text = torch.frombuffer(bytearray(Path(__file__).parents[1].joinpath("LICENSE").read_bytes()), dtype=torch.uint8)
lines = text.long().unfold(0, 32, 32)  # a character is a token

if "RANK" not in os.environ:  # find a strategy, and start the processes
    cluster = placement.Cluster.from_toml(Path(__file__).with_name(sys.argv[1]))
    graph = placement.capture(model, (), {"input_ids": lines[:16], "labels": lines[:16]}, train=True)
    result = placement.optimize(graph, cluster, seed=0)
    print(f"strategy {result.strategy}", flush=True)
    result.save("found.json")
    torchrun(["--standalone", f"--nproc-per-node={result.strategy.devices}", __file__])
    sys.exit()

placed = placement.apply(model, "found.json", (), {"input_ids": lines[:16], "labels": lines[:16]})
adam = torch.optim.AdamW(placed.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100)
done = placed.load_run("run", adam) or {"epoch": 0, "scheduler": scheduler.state_dict()}
scheduler.load_state_dict(done["scheduler"])
for epoch in range(done["epoch"], done["epoch"] + 2):
    draw = RandomSampler(lines, generator=torch.Generator().manual_seed(epoch))  # the same on every process
    batches = placement.ShardSampler(BatchSampler(draw, 16, drop_last=True))
    for own in DataLoader(lines, batch_sampler=batches):  # this process's samples alone
        loss = placed.step(input_ids=own, labels=own)
        placed.clip_grad_norm_(1.0)
        adam.step()
        adam.zero_grad()
    scheduler.step()
    placed.save_run("run", adam, epoch=epoch + 1, scheduler=scheduler.state_dict())
    print(f"rank {placed.rank}, epoch {epoch}: loss {loss.item():.4f}\n", end="", flush=True)
