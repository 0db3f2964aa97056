"""Tensors by torch.distributed's gloo, in groups that are ours alone, whatever groups the caller makes and destroys."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from placement.processes.processes import own_network
from placement.runtime.transport.channels import Channel, PeerEndedError, Pending

_LOOPBACK = "127.0.0.1"


def gloo_group(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """A new group. On one host it listens on the loopback interface alone; gloo asks nobody who he is.

    Args:
        store: where its processes meet, and nobody else.
        rank, size: of this process, of the group.
        limit: how long one exchange may take.

    Raises:
        RuntimeError: there is no interface as `GLOO_SOCKET_IFNAME` says, or the processes do not meet.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    where = _interface(store, rank, size)
    options._devices = [gloo.create_device(**where) if where else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _interface(store: Any, rank: int, size: int) -> dict[str, str]:
    """The interface by which processes reach each other, as gloo takes it; empty for that of this host's name."""
    store.set(f"network/{rank}", own_network())
    if len({store.get(f"network/{other}") for other in range(size)}) == 1:
        return {"hostname": _LOOPBACK}
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return {"interface": name.split(",")[0]} if name else {}


class GlooTransport:
    """`placement.runtime.transport.channels.Transport` between any two processes, through the memory of their hosts.

    Args:
        group: of `gloo_group`.
    """

    is_near = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, channel: Channel, tensor: torch.Tensor) -> Pending:
        """As of any transport."""
        memory = channel.packing.packed(tensor)
        try:
            return Pending(self._group.send([memory], channel.target, channel.tag), memory)
        except RuntimeError as error:
            raise PeerEndedError(str(error)) from None

    def expect(self, channel: Channel) -> Pending:
        """As of any transport."""
        memory = channel.packing.empty()
        try:
            return Pending(self._group.recv([memory], channel.source, channel.tag), memory)
        except RuntimeError as error:
            raise PeerEndedError(str(error)) from None

    def receive(self, channel: Channel, coming: Pending) -> torch.Tensor:
        """As of any transport."""
        coming.wait()
        return coming.memory

    def drop(self, channel: Channel, coming: Pending) -> Pending:
        """The transfer, to be waited for later: its memory is still being filled."""
        return coming
