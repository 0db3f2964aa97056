"""`Exchange`: what a group of ranks exchanges in one collective, as pieces that each rank sends to each other one.

Every kind is a round of pieces, packed into one memory for each pair of ranks, and what is made of those that arrive: a
sum in the order of the ranks, the same on all of them, or a tensor put together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from placement.runtime.parts.layouts import PartCut, PartLayout, join_in, overlapping, take_from

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_ALIGNMENT = 16  # of tensors in packed memory, for any dtype


@dataclass(frozen=True)
class Member:
    """One tensor of an exchange, as a group of ranks sees it.

    Attributes:
        kind: one of `KINDS`.
        whole: what all ranks of the group have or get together; its ``local_shape`` is that tensor's.
        before: the part that each rank has, by its place in the group: of an all-gather or an all-to-all.
        after: the part that each rank gets: of a reduce-scatter or an all-to-all.
        dtype: of the tensor; sums of ``bool`` are "or".
        is_flat: tensors are given and returned as vectors, and layouts are of shape ``(n,)``.
        in_place: nobody else needs the memory of what is given: the sum of an all-reduce may take its place, a sum
            of parts of a vector the place of its part, and a vector that an all-gather puts together may lie around
            its part, where there is room.
    """

    kind: str
    whole: PartLayout
    before: tuple[PartLayout, ...] = ()
    after: tuple[PartLayout, ...] = ()
    dtype: torch.dtype = torch.float32
    is_flat: bool = False
    in_place: bool = False

    @property
    def is_sum(self) -> bool:
        return self.kind in ("all_reduce", "reduce_scatter")

    def given(self, place: int) -> PartLayout:
        """The part that a rank, by its place in the group, gives."""
        return self.whole if self.is_sum else self.before[place]

    def result(self, place: int) -> PartLayout:
        """The part that a rank has afterwards."""
        return self.after[place] if self.kind in ("reduce_scatter", "all_to_all") else self.whole

    def piece(self, source: int, target: int) -> PartLayout | None:
        """The part that goes from one rank of the group to another one; None for nothing."""
        found = self.given(source) if self.kind != "all_to_all" else self.before[source]
        if self.kind == "reduce_scatter":
            found = self.after[target]
        elif self.kind == "all_to_all":
            return common(found, self.after[target])
        return found if found.n_elements else None


@dataclass(frozen=True)
class Exchange:
    """A collective of one group of ranks.

    Attributes:
        number: unique in the step, and the same on all ranks.
        ranks: of the group, increasing.
        members: tensors that travel together: one bucket. They are of one kind; their dtypes may differ.
        what: it is, for messages: ``"all_reduce of fc.weight's gradient"``.

    Raises:
        ValueError: no members, several kinds, an unknown one, not one part for each rank, or what cannot be in place.
    """

    number: int
    ranks: tuple[int, ...]
    members: tuple[Member, ...]
    what: str = "a collective"

    def __post_init__(self) -> None:
        kinds = sorted({member.kind for member in self.members})
        if len(kinds) != 1 or kinds[0] not in KINDS:
            raise ValueError(
                f"{self.what} has members of kinds {', '.join(kinds) or 'none'}; expected one of {', '.join(KINDS)}."
            )
        if list(self.ranks) != sorted(set(self.ranks)) or not self.ranks:
            raise ValueError(f"{self.what} is of ranks {self.ranks}; expected different ones in increasing order.")
        needs = {"all_gather": ("before",), "reduce_scatter": ("after",), "all_to_all": ("before", "after")}
        for member in self.members:
            of_vector = member.is_flat and member.kind in ("all_gather", "reduce_scatter")
            if member.in_place and not (member.kind == "all_reduce" or of_vector):
                raise ValueError(
                    f"{self.what} is in place; expected an all_reduce, or an all_gather or reduce_scatter of a vector."
                )
            for name in needs.get(member.kind, ()):
                if len(getattr(member, name)) != len(self.ranks):
                    raise ValueError(
                        f"{self.what} has {len(getattr(member, name))} parts {name} it; expected one for each of "
                        f"{len(self.ranks)} ranks."
                    )

    @property
    def kind(self) -> str:
        return self.members[0].kind

    def check(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Raises: ValueError: tensors are not those that a rank of the group gives."""
        if len(tensors) != len(self.members):
            raise ValueError(f"{self.what} got {len(tensors)} tensors; expected {len(self.members)}.")
        for member, tensor in zip(self.members, tensors, strict=True):
            shape = member.given(place).local_shape
            is_right = tensor.numel() == shape[0] if member.is_flat else tuple(tensor.shape) == shape
            if not is_right or tensor.dtype != member.dtype:
                raise ValueError(
                    f"{self.what} got a tensor of {tuple(tensor.shape)} and {tensor.dtype}; expected "
                    f"{shape} and {member.dtype}."
                )

    def kept(self, place: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The part of its given tensors that a rank needs until it has its results. For a reduce-scatter that is its
        own piece alone; where it is not in place, in memory of its own, so that the rest can be freed.
        """
        if self.kind != "reduce_scatter":
            return tuple(tensors)
        found = []
        for member, tensor in zip(self.members, tensors, strict=True):
            piece = take_from(tensor.reshape(member.whole.local_shape), member.whole, member.after[place])
            found.append(piece if member.in_place else piece.clone())
        return tuple(found)

    def combined(
        self, place: int, tensors: Sequence[torch.Tensor], arrived: Mapping[int, Sequence[torch.Tensor | None]]
    ) -> tuple[torch.Tensor, ...]:
        """The results of one rank.

        Args:
            place: of the rank in the group.
            tensors: that it has `kept`.
            arrived: for each other place, the pieces of the members that came from it.
        """
        found = []
        for number, (member, tensor) in enumerate(zip(self.members, tensors, strict=True)):
            pieces: dict[int, torch.Tensor] = {}
            kept = member.piece(place, place)
            have = kept if member.kind == "reduce_scatter" else member.given(place)
            if kept is not None and have is not None:
                shaped = tensor.reshape(have.local_shape)
                pieces[place] = shaped if kept is have else take_from(shaped, have, kept)
            for source, theirs in arrived.items():
                if (came := theirs[number]) is not None:
                    pieces[source] = came.to(tensor.device, non_blocking=True)
            found.append(_combined(member, place, pieces, tensor))
        return tuple(found)


@dataclass(frozen=True)
class _Slot:
    """Where a piece of a member lies in packed memory.

    Attributes:
        member: its number.
        have, piece: the part that the sender has, and the part of it that travels.
        dtype: of the tensor.
        start, stop: bytes.
    """

    member: int
    have: PartLayout
    piece: PartLayout
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Packet:
    """The pieces that one rank sends to another one, in one memory.

    Attributes:
        slots: of the members that have a piece.
        n_bytes: of the memory, a multiple of 16.
        n_members: of the exchange.
    """

    slots: tuple[_Slot, ...]
    n_bytes: int
    n_members: int

    @staticmethod
    def of(members: Sequence[Member], source: int, target: int) -> Packet:
        slots, end = [], 0
        for number, member in enumerate(members):
            piece = member.piece(source, target)
            if piece is not None:
                stop = end + piece.n_elements * member.dtype.itemsize
                slots.append(_Slot(number, member.given(source), piece, member.dtype, end, stop))
                end = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return Packet(tuple(slots), end, len(members))

    def fill(self, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what a rank gives into memory, uint8 [n_bytes]."""
        for slot in self.slots:
            tensor = tensors[slot.member]
            if slot.piece == slot.have:
                piece = tensor
            else:
                piece = take_from(tensor.reshape(slot.have.local_shape), slot.have, slot.piece)
            memory[slot.start : slot.stop].view(slot.dtype).view(piece.shape).copy_(piece)

    def pieces(self, memory: torch.Tensor) -> list[torch.Tensor | None]:
        """The piece of each member in memory that has arrived; None for nothing."""
        found: list[torch.Tensor | None] = [None] * self.n_members
        for slot in self.slots:
            found[slot.member] = memory[slot.start : slot.stop].view(slot.dtype).view(slot.piece.local_shape)
        return found


def _combined(member: Member, place: int, pieces: Mapping[int, torch.Tensor], kept: torch.Tensor) -> torch.Tensor:
    want = member.result(place)
    if member.is_sum:
        may_take = member.kind == "reduce_scatter" or (member.in_place and kept.is_contiguous())
        return _total(pieces, place, kept.view(want.local_shape) if may_take else kept.new_empty(want.local_shape))
    room = _room_around(kept, member.before[place], want) if member.in_place else None
    parts = [
        (part, piece)
        for source, piece in pieces.items()
        if (part := member.piece(source, place)) is not None and (source != place or room is None)
    ]
    return join_in(kept.new_empty(want.local_shape) if room is None else room, want, parts)


def _room_around(tensor: torch.Tensor, part: PartLayout, want: PartLayout) -> torch.Tensor | None:
    """The stretch of a vector that a tensor lies in as a part, where the memory of the tensor is that of the vector."""
    runs, around = part.runs(0) or [(0, 0)], want.runs(0) or [(0, 0)]
    n_bytes = part.shape[0] * tensor.element_size()
    is_right = tensor.untyped_storage().nbytes() == n_bytes and tensor.storage_offset() == runs[0][0]
    is_right &= len(runs) == 1 and tensor.is_contiguous()
    return tensor.as_strided(want.local_shape, (1,), around[0][0]) if is_right else None


def _total(pieces: Mapping[int, torch.Tensor], own: int, result: torch.Tensor) -> torch.Tensor:
    """The sum in the order of the ranks, which is the same on all of them; all but the own piece may be overwritten."""
    if len(pieces) < 2:
        return result.copy_(pieces[own]) if pieces else result
    (first, total), *others = sorted(pieces.items())
    for source, piece in others[:-1]:
        total = torch.add(total, piece, out=piece if first == own else total)
        first = source if first == own else first
    return torch.add(total, others[-1][1], out=result)


def _units_in_both(layout: PartLayout, one: PartCut, other: PartCut) -> PartCut:
    """The units that two cuts of a stretch have, as one cut; ``low >= high`` for none.

    Raises:
        StrategyError: no one cut has them.
    """
    if one.is_mirrored != other.is_mirrored:
        mirrored, plain = (one, other) if one.is_mirrored else (other, one)
        found = [(max(low, plain.low), min(high, plain.high)) for low, high in mirrored.stretches]
        if found == list(mirrored.stretches):
            return mirrored
        found = [(low, high) for low, high in found if low < high] or found[:1]
        if len(found) > 1:
            raise overlapping(layout.shape, one.dim)
        return plain._replace(low=found[0][0], high=found[0][1])
    return one._replace(low=max(one.low, other.low), high=min(one.high, other.high))


@lru_cache(maxsize=4096)
def common(a: PartLayout, b: PartLayout) -> PartLayout | None:
    """The part of a tensor that is in both parts; None for nothing.

    Raises:
        StrategyError: a dimension is cut along two stretches that overlap.
    """
    cuts = [cut.coarse for cut in a.cuts]  # in units as large as can be, in which other stretches lie
    for cut in (cut.coarse for cut in b.cuts):
        rest = []
        for known in cuts:
            apart = known.dim != cut.dim or known.period <= cut.unit or cut.period <= known.unit
            if apart:
                rest.append(known)
                continue
            if known.period != cut.period:
                raise overlapping(a.shape, cut.dim)
            unit = math.gcd(known.unit, cut.unit)
            known, cut = known.finer(unit), cut.finer(unit)
            cut = _units_in_both(a, known, cut)
        if cut.low >= cut.high:
            return None
        cuts = [*rest, cut]
    found = PartLayout(a.shape, tuple(cuts))
    return found if found.n_elements else None
