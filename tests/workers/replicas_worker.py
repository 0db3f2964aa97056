"""The small transformer in two processes, as DistributedDataParallel and as FSDP2: what they exchange in a step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from parallel.transformer import Transformer, batch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

BUCKET_BYTES = 20_000
_WHOLE = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class Exchanged(TorchDispatchMode):
    """Collectives of this rank: kind and bytes of the whole tensor, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            kind = _WHOLE[op._overloadpacket.__name__]
            whole = args[0][0] if kind == "all_reduce" else args[kind == "reduce_scatter"]
            self.made.append((kind, whole.nbytes))
        return op(*args, **(kwargs or {}))


def half(rank: int) -> list[torch.Tensor]:
    return [part.chunk(2)[rank] for part in batch()]


def replicated(rank: int) -> list[tuple[str, int]]:
    """Collectives of DistributedDataParallel in its third step; in the second one it makes its buckets anew."""
    model = DistributedDataParallel(Transformer(), bucket_cap_mb=BUCKET_BYTES / 2**20)
    for _ in range(2):
        model(*half(rank)).backward()
    with Exchanged() as exchanged:
        model(*half(rank)).backward()
    return exchanged.made


def sharded(rank: int) -> list[tuple[str, int]]:
    """Collectives of FSDP2, which gathers the parameters of each layer for the forward and for the backward pass."""
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    with Exchanged() as exchanged:
        model(*half(rank)).backward()
    return exchanged.made


def padded() -> list[tuple[str, int]]:
    """Collectives of FSDP2 where rows do not divide: a weight [5, 4] and a bias [5] of 4 bytes each."""
    model = nn.Linear(4, 5)
    fully_shard(model, reshard_after_forward=True)
    with Exchanged() as exchanged:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return exchanged.made


def work(rank: int, folder: Path) -> None:
    """One rank; the first one writes ``exchanged.json``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    found = {"replicated": replicated(rank), "sharded": sharded(rank), "padded": padded()}
    if rank == 0:
        (folder / "exchanged.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    time.sleep(1)  # gloo's threads clean up after the last collective; one that Python's end meets would abort
