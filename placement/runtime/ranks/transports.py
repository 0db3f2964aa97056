"""How a parcel goes to another process: in memory that both have, by gloo, or straight from GPU to GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from placement.runtime.ranks.process_group import Crew
from placement.runtime.transport.mailbox import Coming
from placement.runtime.transport.nccl import Pair
from placement.runtime.transport.packing import Way


class Transport(Protocol):
    """Carries parcels of some bytes; `expect` comes before `receive` or `drop`, which take what it returns."""

    def send(self, way: Way, tensor: torch.Tensor) -> None:
        """Send a parcel, without waiting for it to arrive; the tensor must stay as it is until it has."""

    def expect(self, way: Way) -> Any:
        """Let a parcel come in as soon as it is sent."""

    def receive(self, way: Way, coming: Any) -> torch.Tensor:
        """Wait for a parcel; the memory it is in.

        Raises:
            RankError: it will never come.
        """

    def drop(self, way: Way, coming: Any) -> None:
        """Do without a parcel, which comes all the same; by any thread in the middle of anything."""


class ByMail:
    """Between processes of one host (`placement.runtime.transport.mailbox`)."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def send(self, way: Way, tensor: torch.Tensor) -> None:
        block = self._crew.block(way.n_bytes)
        way.carrier.fill(block.memory, tensor)
        self._crew.post(block, way.n_bytes, way.target, way.tag, way.op)

    def expect(self, way: Way) -> Coming:
        return self._crew.expect(way.source, way.tag)

    def receive(self, way: Way, coming: Coming) -> torch.Tensor:
        return self._crew.fetch(coming, way.n_bytes, way.op).view(way.carrier.layout.dtype)

    def drop(self, way: Way, coming: Coming) -> None:
        self._crew.drop(coming)


class ByGloo:
    """Between any two processes, through the memory of their hosts."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def send(self, way: Way, tensor: torch.Tensor) -> None:
        self._crew.send(way.carrier.packed(tensor), way.target, way.tag, way.op)

    def expect(self, way: Way) -> tuple[Any, torch.Tensor]:
        memory = way.carrier.empty()
        return self._crew.begin_receive(memory, way.source, way.tag, way.op), memory

    def receive(self, way: Way, coming: tuple[Any, torch.Tensor]) -> torch.Tensor:
        work, memory = coming
        self._crew.wait(work, way.source, way.op)
        return memory

    def drop(self, way: Way, coming: tuple[Any, torch.Tensor]) -> None:
        self._crew.keep(*coming, way.source, way.op)


class Direct:
    """Between processes that have a GPU each (`placement.runtime.transport.nccl`).

    What a rank sends first must be asked for first, as nothing says which parcel it is that comes.

    Args:
        place: where parcels are sent from and received to.
    """

    def __init__(self, crew: Crew, pairs: Mapping[int, Pair], place: torch.device) -> None:
        self._crew, self._pairs, self._place = crew, pairs, place
        self._queues: dict[int, deque[Way]] = {}
        self._wanted: set[int] = set()
        self._begun: dict[int, tuple[Any, torch.Tensor]] = {}

    def begin(self, ways: Iterable[Way]) -> None:
        """Parcels that come from now on, those of each rank in the order in which it sends them."""
        self._queues = {rank: deque() for rank in self._pairs}
        for way in ways:
            self._queues[way.source].append(way)

    def send(self, way: Way, tensor: torch.Tensor) -> None:
        memory = way.carrier.packed(tensor, self._place)
        self._crew.keep(self._pairs[way.target].send(memory), memory, way.target, way.op)

    def expect(self, way: Way) -> None:
        self._wanted.add(way.tag)
        queue = self._queues[way.source]
        while queue and queue[0].tag in self._wanted:
            self._ask(queue.popleft())

    def receive(self, way: Way, coming: None) -> torch.Tensor:
        while way.tag not in self._begun:
            self._ask(self._queues[way.source].popleft())
        work, memory = self._begun.pop(way.tag)
        self._wanted.discard(way.tag)
        self._crew.wait(work, way.source, way.op)
        return memory

    def drop(self, way: Way, coming: None) -> None:
        if way.tag in self._begun:
            self._crew.keep(*self._begun.pop(way.tag), way.source, way.op)

    def _ask(self, way: Way) -> None:
        memory = way.carrier.empty(self._place)
        self._begun[way.tag] = self._pairs[way.source].receive(memory), memory
