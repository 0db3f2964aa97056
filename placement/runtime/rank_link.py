"""`RankLink`: parcels between processes, all of them on their way while both ends compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from placement.runtime.carrier import Way
from placement.runtime.crew import Crew
from placement.runtime.mailbox import Coming


class RankLink:
    """`placement.runtime.routines.Link` of one rank for the parcels of one pass through a model.

    Processes of one host hand parcels over in memory that both have (`placement.runtime.mailbox`), others by gloo.
    """

    def __init__(self, crew: Crew, ways: Mapping[int, Way], place: torch.device) -> None:
        self._crew, self._ways, self._place = crew, ways, place
        self._coming: dict[int, tuple[Any, torch.Tensor] | Coming] = {}

    def __del__(self) -> None:
        # What was expected and is not wanted any more (a pass that has failed) comes all the same.
        for tag, coming in self._coming.items():
            if isinstance(coming, Coming):
                self._crew.drop(coming)
            else:
                self._crew.keep(*coming, self._ways[tag].source, self._ways[tag].op)

    def expect(self, tag: int) -> None:
        """Let a parcel come in as soon as it is sent."""
        way = self._ways[tag]
        if not way.n_bytes or tag in self._coming:
            return
        if way.source in self._crew.near:
            self._coming[tag] = self._crew.expect(way.source, way.tag)
            return
        memory = way.carrier.empty()
        self._coming[tag] = self._crew.begin_receive(memory, way.source, way.tag, way.op), memory

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
        coming = self._coming[tag]
        if isinstance(coming, Coming):
            memory = self._crew.fetch(coming, way.n_bytes, way.op).view(way.carrier.layout.dtype)
        else:
            work, memory = coming
            self._crew.wait(work, way.source, way.op)
        del self._coming[tag]
        return way.carrier.unpacked(memory).to(self._place)

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a parcel, without waiting for it to arrive; the tensor must stay as it is until it has."""
        way = self._ways[tag]
        if not way.n_bytes:
            return
        if way.target in self._crew.near:
            block = self._crew.block(way.n_bytes)
            way.carrier.fill(block.memory, tensor)
            self._crew.post(block, way.n_bytes, way.target, way.tag, way.op)
        else:
            self._crew.send(way.carrier.packed(tensor), way.target, way.tag, way.op)
