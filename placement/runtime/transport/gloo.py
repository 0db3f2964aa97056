"""Groups of torch.distributed's gloo that are ours alone, whatever groups the caller makes and destroys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = {"hostname": "127.0.0.1"}


def gloo_group(store: Any, rank: int, size: int, limit: timedelta, where: dict[str, str]) -> Any:
    """A new group.

    Args:
        store: where its processes meet.
        rank, size: of this process, of the group.
        limit: how long one exchange may take.
        where: the ``interface`` to use or the ``hostname`` whose interface is used; empty for this host's name.

    Raises:
        RuntimeError: there is no such interface, or the processes do not meet.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(**where) if where else gloo.create_default_device()]
    return gloo(store, rank, size, options)
