"""`on_ranks`: a function on several forks of this process, which have loaded what it has, as ranks of one group."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphs.disk import temporary_folder
from placement.processes.starting import Parent, Workers
from placement.runtime.ranks.launch import met_store

LIMIT_S = 240.0


def on_ranks(work: str, description: Any = None, size: int = 2) -> list[Any]:
    """What ``module:function`` returns of a description, by rank; as `launch` runs it in new interpreters."""
    with temporary_folder() as folder:
        life = partial(_life, work, description, str(folder / "store"), size)
        workers = Workers.forked([partial(life, rank) for rank in range(size)])
        try:
            return workers.collect(LIMIT_S)
        finally:
            workers.end()


def _life(work: str, description: Any, store: str, size: int, rank: int, parent: Parent) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=met_store(store), rank=rank, world_size=size)
    module, _, name = work.partition(":")
    try:
        parent.answer(getattr(importlib.import_module(module), name)(description))
    except Exception as error:
        parent.fail(f"{type(error).__name__}: {error}")
    dist.barrier()  # whoever leaves first would end what others are in
