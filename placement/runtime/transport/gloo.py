"""Tensors by torch.distributed's gloo, in groups that are ours alone, whatever groups the caller makes and destroys."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from placement.runtime.transport.channels import Channel, PeerEndedError, Pending

LOOPBACK = {"hostname": "127.0.0.1"}


def interface_of(address: str) -> dict[str, str]:
    """Where processes that meet at an address reach each other, as `gloo_group` takes it."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        return {"interface": name.split(",")[0]}
    return {"hostname": address} if address in ("127.0.0.1", "localhost", "::1") else {}


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
