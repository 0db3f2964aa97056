"""Process groups of torch.distributed that are ours alone, whatever groups the caller makes, and where they meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NO_LIMIT = timedelta(days=7)  # a participant may compute for long before it says anything


def file_store(path: str) -> Any:
    """Where processes of this host meet: a file in a folder of this user, so that no port is open for it."""
    store: Any = dist.FileStore  # type: ignore[attr-defined]
    return store(path)


def gloo_group(store: Any, rank: int, size: int) -> Any:
    """A group of gloo, for tensors of the CPU; its processes alone meet in the store.

    Raises:
        RuntimeError: the processes do not meet.
    """
    return dist.ProcessGroupGloo(store, rank, size, NO_LIMIT)


def nccl_group(store: Any, rank: int, size: int, place: torch.device) -> Any:
    """A group of NCCL, for tensors of this process's GPU."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NO_LIMIT
    with torch.cuda.device(place):
        return nccl(store, rank, size, options)


def gpu_identity(place: torch.device) -> str:
    """A text that tells a GPU from all others; empty where tensors cannot go by NCCL."""
    if place.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(place).uuid)


def settle(work: Any, place: torch.device) -> None:
    """Let the host wait for a collective of NCCL."""
    with torch.cuda.device(place):
        work.wait()
        torch.cuda.current_stream().synchronize()
