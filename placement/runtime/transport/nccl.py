"""Tensors from GPU to GPU by NCCL, between processes that have one each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from placement.runtime.transport.channels import ALWAYS, Channel, Pending


@dataclass(frozen=True, eq=False)
class Pair:
    """This process and another one.

    Attributes:
        outgoing, incoming: process groups of these two, a direction each: in one for both, what one sends would wait
            for what the other one sends.
    """

    outgoing: Any
    incoming: Any

    def send(self, memory: torch.Tensor) -> OnStream:
        """Begin to send."""
        return OnStream(self.outgoing.send([memory], 1, 0))

    def receive(self, memory: torch.Tensor) -> OnStream:
        """Let memory be filled by what the other one sends next."""
        return OnStream(self.incoming.recv([memory], 0, 0))


@dataclass(frozen=True, eq=False)
class OnStream:
    """A transfer; the stream waits for it, not the host, which goes on to launch what comes after."""

    work: Any

    def wait(self, timeout: timedelta | None = None) -> None:
        """Kernels launched from here on find it done. A time limit would make the host wait, so none is given."""
        self.work.wait()


def identity(place: torch.device) -> str:
    """A text that tells a GPU from all others; empty where tensors cannot go by NCCL."""
    if place.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(place).uuid)


def connect(store: Any, rank: int, identities: Sequence[str], place: torch.device) -> dict[int, Pair]:
    """The ways between this process and all others that have another GPU; all ranks call this.

    Args:
        store: through which they meet, for this call only.
        identities: of the GPU of each rank, empty for none.
    """
    groups = {}
    # One sequence for all, and one transfer at once, since the first one of a group waits for the other process.
    for source, target in permutations(range(len(identities)), 2):
        ends = {identities[source], identities[target]}
        if rank in (source, target) and len(ends) == 2 and "" not in ends:
            group = new_group(PrefixStore(f"{source}-{target}", store), int(rank == target), place)
            first = torch.zeros(1, device=place)
            (group.recv([first], 0, 0) if rank == target else group.send([first], 1, 0)).wait()
            groups[source, target] = group
    return {
        other: Pair(groups[rank, other], groups[other, rank])
        for other in range(len(identities))
        if (rank, other) in groups
    }


def settle(work: Any, place: torch.device) -> None:
    """Let the host wait for a collective."""
    with torch.cuda.device(place):
        work.wait()
        torch.cuda.current_stream().synchronize()


def close(pairs: Mapping[int, Pair]) -> None:
    """End the groups, once what was sent has arrived."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    for pair in pairs.values():
        for group in (pair.outgoing, pair.incoming):
            group.shutdown()


def new_group(store: Any, number: int, place: torch.device, size: int = 2) -> Any:
    """A process group; of two, of which number 0 sends and number 1 receives, unless more are asked for."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = ALWAYS
    with torch.cuda.device(place):
        return nccl(store, number, size, options)


class NcclTransport:
    """`placement.runtime.transport.channels.Transport` between processes that have a GPU each.

    Tensors must be asked for in the order in which a rank sends them, as none says which one it is.

    Args:
        pairs: this process and each of the others, by their rank.
        place: where tensors are sent from and received to.
    """

    is_near = False

    def __init__(self, pairs: Mapping[int, Pair], place: torch.device) -> None:
        self._pairs, self._place = pairs, place
        self._queues: dict[int, deque[Channel]] = {}
        self._wanted: set[int] = set()
        self._begun: dict[int, Pending] = {}

    def begin(self, channels: Iterable[Channel]) -> None:
        """Tensors that come from now on, those of each rank in the order in which it sends them."""
        self._queues = {rank: deque() for rank in self._pairs}
        for channel in channels:
            self._queues[channel.source].append(channel)

    def send(self, channel: Channel, tensor: torch.Tensor) -> Pending:
        """As of any transport."""
        memory = channel.packing.packed(tensor, self._place)
        return Pending(self._pairs[channel.target].send(memory), memory)

    def expect(self, channel: Channel) -> None:
        """As of any transport, once all that the same rank sends before is expected too."""
        self._wanted.add(channel.tag)
        queue = self._queues[channel.source]
        while queue and queue[0].tag in self._wanted:
            self._ask(queue.popleft())

    def receive(self, channel: Channel, coming: None) -> torch.Tensor:
        """As of any transport."""
        while channel.tag not in self._begun:
            self._ask(self._queues[channel.source].popleft())
        pending = self._begun.pop(channel.tag)
        self._wanted.discard(channel.tag)
        pending.wait()
        return pending.memory

    def drop(self, channel: Channel, coming: None) -> Pending | None:
        """The transfer, if it has begun, to be waited for later: its memory is still being filled."""
        return self._begun.pop(channel.tag, None)

    def _ask(self, channel: Channel) -> None:
        memory = channel.packing.empty(self._place)
        self._begun[channel.tag] = Pending(self._pairs[channel.source].receive(memory), memory)
