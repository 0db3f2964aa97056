"""`RankTransfers`: one rank's end of the transfers of a step, by torch.distributed, while both ends compute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from graphs.capture.trace import Layout, TensorInfo
from placement.runtime.program.routines import Transfer, as_captured
from placement.runtime.ranks.group import RankGroup

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packing:
    """How a tensor of a layout travels: as one dense piece of memory.

    Attributes:
        shape: that is sent; a dimension made by ``expand`` is sent once.
        order: of its dimensions in that memory, the outermost first.
        layout: of the tensor.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    layout: Layout

    @classmethod
    def of(cls, info: TensorInfo) -> Packing:
        layout = info.layout
        shape = tuple(1 if step == 0 else extent for extent, step in zip(layout.shape, layout.stride, strict=True))
        return cls(shape, tuple(sorted(range(len(shape)), key=lambda dim: -layout.stride[dim])), layout)

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    def packed(self, tensor: torch.Tensor, place: torch.device = _CPU) -> torch.Tensor:
        """The memory to send, one-dimensional, on that device: the tensor's own where it lies there as it travels."""
        for dim, extent in enumerate(self.shape):
            tensor = tensor if tensor.shape[dim] == extent else tensor.narrow(dim, 0, 1)
        return tensor.resolve_conj().resolve_neg().to(place).permute(self.order).contiguous().view(-1)

    def empty(self, place: torch.device = _CPU) -> torch.Tensor:
        """Memory to receive into, one-dimensional."""
        return torch.empty(self.n_elements, dtype=self.layout.dtype, device=place)

    def unpacked(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that was sent, strides and all, where the memory is."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        made = memory.view([self.shape[dim] for dim in self.order]).permute(back).expand(self.layout.shape)
        return made if 0 in self.layout.stride else as_captured(made, self.layout.stride)


Ways = Mapping[tuple[int, int], Any]
"""The NCCL group that carries tensors from one rank to another, by both; those without go through the host, by gloo."""


def direct_ways(ranks: RankGroup, place: torch.device) -> Ways:
    """A group for each direction between two ranks that have a GPU each. All ranks call it.

    In one group for both directions, what one rank sends would wait for what the other one sends.
    """
    identities = ranks.told(identity(place), "which GPU it has")
    found = {}
    # One sequence for all, so that no two wait for each other.
    for source, target in permutations(range(ranks.size), 2):
        ends = {identities[source], identities[target]}
        if ranks.rank in (source, target) and len(ends) == 2 and "" not in ends:
            found[source, target] = one_way([dist.get_global_rank(ranks.group, rank) for rank in (source, target)])
    return found


def identity(place: torch.device) -> str:
    """A text that tells a GPU from all others; empty where tensors cannot go by NCCL."""
    if place.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(place).uuid)


def one_way(members: list[int]) -> Any:
    """A new group of two, by their ranks in the default one."""
    return dist.new_group(members, backend="nccl", use_local_synchronization=True)


class RankTransfers:
    """`placement.runtime.program.routines.Endpoint` of one rank for one step.

    Args:
        transfers: those of this rank, by tag.
        order: tags of what comes from each rank, as that sends them: NCCL tells one from the other by nothing else.
        names: of the ops.
        place: the device of this rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        transfers: Mapping[int, Transfer],
        order: Mapping[int, Sequence[int]],
        names: Sequence[str],
        place: torch.device,
        ways: Ways,
    ) -> None:
        self._ranks, self._transfers, self._names, self._place, self._ways = ranks, transfers, names, place, ways
        self._packings = {tag: Packing.of(transfer.info) for tag, transfer in transfers.items()}
        self._order = order
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing has been sent yet, nothing has come."""
        self._queues = {
            rank: deque(tags) for rank, tags in self._order.items() if (rank, self._ranks.rank) in self._ways
        }
        self._wanted: set[int] = set()
        self._coming: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sent: list[tuple[int, Any, torch.Tensor]] = []

    def expect(self, tag: int) -> None:
        """Let a tensor come in as soon as it is sent: by NCCL, once all that come before it are expected."""
        source = self._transfers[tag].source
        if source not in self._queues:
            self._ask(tag)
            return
        queue = self._queues[source]
        self._wanted.add(tag)
        while queue and queue[0] in self._wanted:
            self._ask(queue.popleft())

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a tensor.

        Raises:
            RankError: it will never come.
        """
        transfer, packing = self._transfers[tag], self._packings[tag]
        if not packing.n_elements:
            layout = packing.layout
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._place)
        queue = self._queues.get(transfer.source, ())
        while queue and tag not in self._coming:
            self._ask(queue.popleft())
        self._ask(tag)
        work, memory = self._coming.pop(tag)
        with self._ranks.waiting(transfer.source, self._what(tag)):
            work.wait()
        return packing.unpacked(memory).to(self._place)

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a tensor, without waiting for it to arrive; it must stay as it is until `finish`."""
        transfer, packing = self._transfers[tag], self._packings[tag]
        if not packing.n_elements:
            return
        way = self._ways.get((transfer.source, transfer.target))
        memory = packing.packed(tensor, _CPU if way is None else self._place)
        with self._ranks.waiting(transfer.target, self._what(tag)):
            if way is None:
                work = dist.isend(memory, group_dst=transfer.target, group=self._ranks.group, tag=tag)
            else:
                work = dist.isend(memory, group_dst=int(transfer.target > transfer.source), group=way)
        self._sent.append((tag, work, memory))

    def finish(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            RankError: it never will.
        """
        for tag, work, _ in self._sent:
            with self._ranks.waiting(self._transfers[tag].target, f"it to take {self._what(tag)}"):
                work.wait()
        self._sent.clear()

    def _ask(self, tag: int) -> None:
        packing, source = self._packings[tag], self._transfers[tag].source
        if tag in self._coming or not packing.n_elements:
            return
        way = self._ways.get((source, self._ranks.rank))
        memory = packing.empty(_CPU if way is None else self._place)
        with self._ranks.waiting(source, self._what(tag)):
            if way is None:
                work = dist.irecv(memory, group_src=source, group=self._ranks.group, tag=tag)
            else:
                work = dist.irecv(memory, group_src=int(source > self._ranks.rank), group=way)
        self._coming[tag] = work, memory

    def _what(self, tag: int) -> str:
        op = self._transfers[tag].op
        return f"op {self._names[op]!r}" if op >= 0 else "a parameter or an argument"
