"""`RankLink`: parcels between processes, all of them on their way while both ends compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from placement.runtime.ranks.process_group import Crew
from placement.runtime.ranks.transports import ByGloo, ByMail, Direct, Transport
from placement.runtime.transport.nccl import Pair
from placement.runtime.transport.packing import Way


class RankLink:
    """`placement.runtime.program.transfers.Link` of one rank for the parcels of one pass through a model.

    Args:
        pairs: the ranks that parcels go to and come from GPU to GPU. To others of this host they go in memory that both
            have, to all others by gloo.
    """

    def __init__(self, crew: Crew, ways: Mapping[int, Way], place: torch.device, pairs: Mapping[int, Pair]) -> None:
        self._ways, self._place, self._pairs, self._near = ways, place, pairs, crew.near
        self._rank, self._direct = crew.rank, Direct(crew, pairs, place)
        self._by_mail, self._by_gloo = ByMail(crew), ByGloo(crew)
        self._coming: dict[int, Any] = {}

    def __del__(self) -> None:
        # What was expected and is not wanted any more (a pass that has failed) comes all the same.
        for tag, coming in self._coming.items():
            self._transport(self._ways[tag].source).drop(self._ways[tag], coming)

    def begin(self, tags: Iterable[int]) -> None:
        """A section begins, in which each rank sends its parcels among these in this order."""
        mine = [way for tag in tags if (way := self._ways[tag]).target == self._rank] if self._pairs else []
        self._direct.begin(way for way in mine if way.n_bytes and way.source in self._pairs)

    def expect(self, tag: int) -> None:
        """Let a parcel come in as soon as it is sent."""
        way = self._ways[tag]
        if way.n_bytes and tag not in self._coming:
            self._coming[tag] = self._transport(way.source).expect(way)

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a parcel.

        Raises:
            RankError: it will never come.
        """
        way = self._ways[tag]
        if not way.n_bytes:
            layout = way.carrier.layout
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._place)
        self.expect(tag)
        memory = self._transport(way.source).receive(way, self._coming[tag])
        del self._coming[tag]
        return way.carrier.unpacked(memory).to(self._place)

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a parcel, without waiting for it to arrive; the tensor must stay as it is until it has."""
        way = self._ways[tag]
        if way.n_bytes:
            self._transport(way.target).send(way, tensor)

    def _transport(self, rank: int) -> Transport:
        if rank in self._pairs:
            return self._direct
        return self._by_mail if rank in self._near else self._by_gloo
