"""`Collectives`: one rank's part in the exchanges of a step, begun early and finished where their results are needed.

Between the processes of one host pieces go in shared memory: a rank copies what it gives, and the others add it up
where it lies. Otherwise, and between GPUs, torch.distributed's backends carry them, in groups that are ours alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from placement.runtime.exchanging.exchanges import Exchange, Packet
from placement.runtime.transport import nccl
from placement.runtime.transport.channels import Channel, PeerEndedError
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

_FIRST_TAG = 1 << 29  # beyond those of the transfers of a step
# Above that each rank of several would add up more than gloo's ring takes to send.
_MOST_SHARED_BYTES = 256 << 10
_LARGE_BYTES = 1 << 20  # of what arrives in an exchange: its memory goes back at once
_CPU = torch.device("cpu")
# The dtypes that every backend adds up.
_SUMMED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}


@dataclass(frozen=True, eq=False)
class Handle:
    """An exchange that has begun. The tensors that it has kept must stay as they are until it is finished.

    Attributes:
        number: of the exchange.
        tensors: `Exchange.kept` of what was given.
        coming: what is waited for.
    """

    number: int
    tensors: tuple[torch.Tensor, ...]
    coming: Any = None


class Carrier(Protocol):
    """How one exchange is carried out."""

    def start(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Begin; what `finish` needs besides the tensors."""

    def finish(self, tensors: tuple[torch.Tensor, ...], coming: Any) -> tuple[torch.Tensor, ...]:
        """Wait for the results; ``tensors`` are those that the exchange has kept."""


class Collectives:
    """One rank's part in the exchanges of a step.

    All ranks make this object at the same time. Exchanges of equal groups of ranks are started in the same order on all
    of them; they may be finished in any order.

    Args:
        exchanges: of all ranks, or of this one alone.
        place: where this rank's tensors are.
    """

    def __init__(self, group: ProcessGroup, exchanges: Sequence[Exchange], place: torch.device) -> None:
        identities = group.all_gather(nccl.identity(place))
        mine = [exchange for exchange in exchanges if group.rank in exchange.ranks]
        self._exchanges = {exchange.number: exchange for exchange in mine}
        self._rank = group.rank
        self._carriers: dict[int, Carrier] = {}
        # One order for all ranks, since a group is made by all its members at once.
        for exchange in sorted(mine, key=lambda exchange: (exchange.ranks, exchange.number)):
            self._carriers[exchange.number] = _carrier(group, exchange, place, identities)

    def start(self, number: int, tensors: tuple[torch.Tensor, ...]) -> Handle:
        """Begin an exchange without waiting for the others.

        Args:
            tensors: one for each of its members, which must stay as they are until it is finished.

        Raises:
            ValueError: they are not of the shapes or dtypes of its members.
            RankError: the run has failed.
        """
        exchange = self._exchanges[number]
        place = exchange.ranks.index(self._rank)
        exchange.check(place, tensors)
        coming = self._carriers[number].start(tensors)
        return Handle(number, exchange.kept(place, tensors), coming)

    def finish(self, handle: Handle) -> tuple[torch.Tensor, ...]:
        """Wait for the results, a tensor for each member; those in place may be in the memory of what was given.

        Raises:
            RankError: another rank has ended, or the run has failed.
        """
        return self._carriers[handle.number].finish(handle.tensors, handle.coming)


def _carrier(group: ProcessGroup, exchange: Exchange, place: torch.device, identities: Sequence[str]) -> Carrier:
    gpus = [identities[rank] for rank in exchange.ranks]
    if len(exchange.ranks) == 1:
        return _Alone(exchange)
    if all(gpus) and len(set(gpus)) == len(gpus):
        return _ByBackend(group, exchange, place, place)
    n_bytes = sum(member.whole.n_elements * member.dtype.itemsize for member in exchange.members)
    is_small = exchange.kind != "all_reduce" or len(exchange.ranks) == 2 or n_bytes <= _MOST_SHARED_BYTES
    if is_small and group.share_memory(exchange.ranks):
        return _InSharedMemory(group, exchange)
    return _ByBackend(group, exchange, place, _CPU)


class _Alone:
    """An exchange of one rank with itself."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def start(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """As of any carrier."""

    def finish(self, tensors: tuple[torch.Tensor, ...], coming: None) -> tuple[torch.Tensor, ...]:
        """As of any carrier."""
        return self._exchange.combined(0, tensors, {})


class _InSharedMemory:
    """An exchange between the processes of one host: one round, in which each sends its piece to each other one."""

    def __init__(self, group: ProcessGroup, exchange: Exchange) -> None:
        self._group, self._exchange = group, exchange
        ranks = exchange.ranks
        self._place = ranks.index(group.rank)
        self._outgoing: list[tuple[Packet, Channel]] = []
        self._incoming: list[tuple[int, Packet, Channel]] = []
        for place, rank in enumerate(ranks):
            if place != self._place:
                packet = Packet.of(exchange.members, self._place, place)
                self._outgoing.append((packet, self._channel(packet, group.rank, rank)))
                packet = Packet.of(exchange.members, place, self._place)
                self._incoming.append((place, packet, self._channel(packet, rank, group.rank)))
        self._is_large = sum(packet.n_bytes for _, packet, _ in self._incoming) >= _LARGE_BYTES

    def _channel(self, packet: Packet, source: int, target: int) -> Channel:
        exchange = self._exchange
        packing = Packing.flat(packet.n_bytes, torch.uint8)
        return Channel(packing, source, target, _FIRST_TAG + exchange.number, exchange.what)

    def start(self, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        """As of any carrier."""
        group = self._group
        for packet, channel in self._outgoing:
            if packet.n_bytes:
                group.send_filled(channel, _filling(packet, tensors))
        transports = [group.transport_to(channel.source) for _, _, channel in self._incoming]
        return [
            group.expect(transport, channel) if packet.n_bytes else None
            for transport, (_, packet, channel) in zip(transports, self._incoming, strict=True)
        ]

    def finish(self, tensors: tuple[torch.Tensor, ...], coming: list[Any]) -> tuple[torch.Tensor, ...]:
        """As of any carrier."""
        arrived = {}
        for each, (place, packet, channel) in zip(coming, self._incoming, strict=True):
            memory = torch.empty(0, dtype=torch.uint8)
            if packet.n_bytes:
                memory = self._group.receive(self._group.transport_to(channel.source), channel, each)
            arrived[place] = packet.pieces(memory)
            del memory
        found = self._exchange.combined(self._place, tensors, arrived)
        arrived.clear()
        if self._is_large:
            self._group.settle()  # so that the others send their next bucket in the same memory
        return found


def _filling(packet: Packet, tensors: tuple[torch.Tensor, ...]) -> Callable[[torch.Tensor], None]:
    return lambda memory: packet.fill(memory, tensors)


class _ByBackend:
    """An exchange in a process group of torch.distributed.

    Args:
        place: where tensors are.
        staging: where they are sent from and received to: the GPU for NCCL, the CPU for gloo.
    """

    def __init__(self, group: ProcessGroup, exchange: Exchange, place: torch.device, staging: torch.device) -> None:
        self._group, self._exchange, self._at, self._staging = group, exchange, place, staging
        self._backend = group.backend_among(exchange.ranks, staging)
        self._place = exchange.ranks.index(group.rank)
        self._others = tuple(rank for rank in exchange.ranks if rank != group.rank)
        places = range(len(exchange.ranks))
        # None for what a rank would send itself.
        self._outgoing = [Packet.of(exchange.members, self._place, t) if t != self._place else None for t in places]
        self._incoming = [Packet.of(exchange.members, s, self._place) if s != self._place else None for s in places]

        self._is_summed = exchange.kind == "all_reduce" and {m.dtype for m in exchange.members} <= _SUMMED
        self._begin = self._all_reduce if self._is_summed else self._pieces
        if exchange.kind == "all_gather":
            self._begin = self._all_gather

    def start(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[torch.Tensor]]:
        """As of any carrier: the work in flight, and the memory that it fills."""
        self._group.activity.progress += 1
        begin = self._begin
        with self._group.waiting(self._others, self._exchange.what):
            try:
                return begin(tensors)
            except RuntimeError as error:
                raise PeerEndedError(str(error)) from None

    def _all_reduce(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[torch.Tensor]]:
        """One flat tensor for each dtype."""
        works, results = [], list(tensors)
        members = self._exchange.members
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
            only = tensors[numbers[0]]
            if len(numbers) == 1 and members[numbers[0]].in_place and only.is_contiguous():
                results[numbers[0]] = only.to(self._staging).view(members[numbers[0]].whole.local_shape)
                works += self._summing(results[numbers[0]].view(-1))
                continue
            flat = torch.empty(sum(tensors[k].numel() for k in numbers), dtype=dtype, device=self._staging)
            for k, part in zip(numbers, _parts(flat, [tensors[k].numel() for k in numbers]), strict=True):
                results[k] = part.view(members[k].whole.local_shape)
                results[k].copy_(tensors[k].reshape(results[k].shape))
            works += self._summing(flat)
        return works, results

    def _summing(self, flat: torch.Tensor) -> list[Any]:
        options = dist.AllreduceOptions()
        if flat.dtype == torch.bool:
            flat, options.reduceOp = flat.view(torch.uint8), dist.ReduceOp(dist.ReduceOp.MAX)
        return [self._backend.allreduce([flat], options)] if flat.numel() else []

    def _all_gather(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[torch.Tensor]]:
        """All ranks send equally much: shorter parts are padded."""
        sent = next(packet for packet in self._outgoing if packet is not None)
        n_bytes = max(sent.n_bytes, *(packet.n_bytes for packet in self._incoming if packet is not None))
        own = torch.empty(n_bytes, dtype=torch.uint8, device=self._staging)
        sent.fill(own, tensors)
        everything = torch.empty(n_bytes * len(self._incoming), dtype=torch.uint8, device=self._staging)
        works = [self._backend._allgather_base(everything, own)] if n_bytes else []
        return works, _parts(everything, [n_bytes] * len(self._incoming))

    def _pieces(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[torch.Tensor]]:
        """A piece from each rank to each other one; sums are made here, as gloo has no reduce-scatter of its own."""
        away, back = ([0 if p is None else p.n_bytes for p in side] for side in (self._outgoing, self._incoming))
        sent, received = (torch.empty(sum(n), dtype=torch.uint8, device=self._staging) for n in (away, back))
        for packet, memory in zip(self._outgoing, _parts(sent, away), strict=True):
            if packet is not None:
                packet.fill(memory, tensors)
        return [self._backend.alltoall_base(received, sent, back, away)], _parts(received, back)

    def finish(
        self, tensors: tuple[torch.Tensor, ...], coming: tuple[list[Any], list[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """As of any carrier."""
        works, memory = coming
        with self._group.waiting(self._others, self._exchange.what):
            for work in works:
                self._await(work)
        if self._is_summed:
            return tuple(tensor.to(self._at) for tensor in memory)
        arrived = {
            place: packet.pieces(memory[place]) for place, packet in enumerate(self._incoming) if packet is not None
        }
        return self._exchange.combined(self._place, tensors, arrived)

    def _await(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerEndedError(str(error)) from None


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(tensor, list(sizes)))
