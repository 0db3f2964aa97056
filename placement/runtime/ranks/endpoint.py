"""`RankEndpoint`: one rank's end of the transfers of a pass, all of them on their way while both ends compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from placement.runtime.transport.nccl import NcclTransport, Pair

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup
    from placement.runtime.transport.channels import Channel, Transport


class RankEndpoint:
    """`placement.runtime.program.transfers.Endpoint` of one rank for the transfers of one pass through a model.

    Args:
        pairs: the ranks that tensors go to and come from GPU to GPU. To others of this host they go in memory that both
            have, to all others by gloo.
    """

    def __init__(
        self, group: ProcessGroup, channels: Mapping[int, Channel], place: torch.device, pairs: Mapping[int, Pair]
    ) -> None:
        self._group, self._channels, self._place, self._pairs = group, channels, place, pairs
        self._nccl = NcclTransport(pairs, place)
        self._coming: dict[int, Any] = {}

    def __del__(self) -> None:
        # Tensors expected and not wanted any more (after a pass that has failed) come all the same.
        for tag, coming in self._coming.items():
            channel = self._channels[tag]
            self._group.drop(self._transport(channel.source), channel, coming)

    def begin(self, tags: Iterable[int]) -> None:
        """A section begins, in which each rank sends its transfers among these in this order."""
        rank, pairs = self._group.rank, self._pairs
        mine = [channel for tag in tags if (channel := self._channels[tag]).target == rank] if pairs else []
        self._nccl.begin(channel for channel in mine if channel.n_bytes and channel.source in pairs)

    def expect(self, tag: int) -> None:
        """Let a tensor come in as soon as it is sent."""
        channel = self._channels[tag]
        if channel.n_bytes and tag not in self._coming:
            self._coming[tag] = self._group.expect(self._transport(channel.source), channel)

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a tensor.

        Raises:
            RankError: it will never come.
        """
        channel = self._channels[tag]
        if not channel.n_bytes:
            layout = channel.packing.layout
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._place)
        self.expect(tag)
        memory = self._group.receive(self._transport(channel.source), channel, self._coming[tag])
        del self._coming[tag]
        return channel.packing.unpacked(memory).to(self._place)

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a tensor, without waiting for it to arrive; it must stay as it is until it has."""
        channel = self._channels[tag]
        if channel.n_bytes:
            self._group.send(self._transport(channel.target), channel, tensor)

    def _transport(self, rank: int) -> Transport:
        return self._nccl if rank in self._pairs else self._group.transport_to(rank)
