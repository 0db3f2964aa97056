"""The parameters and buffers of a rank: which part of each it stores, and a model that has those parts alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from graphs.errors import StrategyError
from placement.runtime.parts.layouts import PartLayout, join, take, whole
from placement.runtime.states.local_tensors import Unfilled, entries, memory_of, slot_of

HOST = torch.device("cpu")


@dataclass(frozen=True)
class StatePart:
    """One rank's part of a parameter or buffer.

    Attributes:
        names: its dotted paths, those of tied ones together; the first is its name.
        part: what ops on this rank read of it: tensor parallelism cuts it.
        flat: ZeRO: this rank stores entries ``low <= i < high`` of the flattened part, as a vector; None: all of it.
        dtype: of its elements.
        trained: an optimizer changes it.
        has_room: ZeRO below level 3: the entries that are stored lie in memory for all of the part, where each step
            gathers the others around them.
        on_host: it lies in the memory of the host of its rank's device.
    """

    names: tuple[str, ...]
    part: PartLayout
    flat: tuple[int, int] | None
    dtype: torch.dtype
    trained: bool
    has_room: bool = False
    on_host: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what is stored."""
        return self.part.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def n_stored(self) -> int:
        """Elements that are stored."""
        return math.prod(self.stored_shape)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is stored as it is."""
        return self.flat is None and self.part.is_whole


StateTable = tuple[tuple[StatePart, ...], ...]
"""The tensors that each rank stores, by rank; every rank has the same table."""


class Piece(NamedTuple):
    """One rank's part of a tensor, as one of the pieces of which it is put together."""

    rank: int
    state: StatePart


def stored(tensor: torch.Tensor, state: StatePart) -> torch.Tensor:
    """A rank's part of a whole tensor, in memory of its own; the tensor itself where that is all of it."""
    if state.is_whole:
        return tensor
    found = take(tensor, state.part)
    if state.flat is not None:
        found = found.reshape(-1)[state.flat[0] : state.flat[1]]
    is_alone = memory_of(found) != memory_of(tensor) and found.untyped_storage().nbytes() == found.nbytes
    return found if is_alone else found.clone(memory_format=torch.contiguous_format)


def pieces_of(table: StateTable) -> dict[str, tuple[Piece, ...]]:
    """The pieces of which each parameter and buffer is put together, by name, in the order of their ranks.

    The first of ranks that store the same counts. A piece that is the whole tensor needs no others.

    Raises:
        StrategyError: no rank stores some of a tensor.
    """
    found: dict[str, dict[tuple[PartLayout, tuple[int, int] | None], Piece]] = {}
    for rank, row in enumerate(table):
        for state in row:
            found.setdefault(state.name, {}).setdefault((state.part, state.flat), Piece(rank, state))
    result = {}
    for name, each in found.items():
        pieces = list(each.values())
        alone = next((piece for piece in pieces if piece.state.is_whole), None)
        unbroken = {piece.state.part for piece in pieces if piece.state.flat is None}
        needed = [piece for piece in pieces if piece.state.flat is None or piece.state.part not in unbroken]
        needed = [piece for piece in needed if piece.state.n_stored] or needed[:1]
        result[name] = (alone,) if alone is not None else tuple(needed)
        if sum(piece.state.n_stored for piece in result[name]) < math.prod(pieces[0].state.part.shape):
            raise StrategyError(f"no rank stores some of {name!r}; every part of a parameter needs one.")
    return result


def put_together(pieces: Sequence[tuple[StatePart, torch.Tensor]]) -> torch.Tensor:
    """The whole tensor of pieces that cover it."""
    first, tensor = pieces[0]
    if first.is_whole:
        return tensor
    parts: dict[PartLayout, torch.Tensor] = {}
    for state, tensor in pieces:
        if state.flat is None:
            parts[state.part] = tensor
            continue
        vector = parts.setdefault(state.part, tensor.new_empty(state.part.n_elements))
        vector.reshape(-1)[state.flat[0] : state.flat[1]] = tensor
    local = [(part, tensor.reshape(part.local_shape)) for part, tensor in parts.items()]
    return local[0][1] if local[0][0].is_whole else join(whole(first.part.shape), local)


def completed(table: StateTable, model: nn.Module) -> StateTable:
    """A table with every parameter and buffer of a model, which is whole or on ``meta``.

    A tensor that shares the memory of one in the table is tied to it. One that no rank reads is on rank 0.
    """
    tensors = dict(entries(model))
    named = {name for row in table for state in row for name in state.names}
    home = {_view(tensors[name]): name for name in tensors if name in named}
    tied: dict[str, list[str]] = {}
    others: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if name in named:
            continue
        known = home.get(_view(tensor))
        if known is not None:
            tied.setdefault(known, []).append(name)
        else:
            others.setdefault(_view(tensor), []).append(name)
    rows = [[_with_names(state, tied) for state in row] for row in table]
    for names in others.values():
        tensor = tensors[names[0]]
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        rows[0].append(StatePart(tuple(names), whole(tensor.shape), None, tensor.dtype, is_trained))
    return tuple(tuple(row) for row in rows)


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """Key that tied tensors have in common."""
    return memory_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _with_names(state: StatePart, tied: dict[str, list[str]]) -> StatePart:
    more = [name for known in state.names for name in tied.get(known, ())]
    return replace(state, names=(*state.names, *more)) if more else state


def local_states(model: nn.Module, table: StateTable, rank: int, place: torch.device) -> list[Unfilled]:
    """Make a model that of rank: its parameters and buffers become what the rank stores, the rest is freed.

    Names, modules and `nn.Parameter` objects stay; what other ranks store is None. Tied ones stay tied. Tensors on
    ``meta`` get memory, floating-point ones filled with NaN.

    Args:
        model: whole, or on ``meta``.
        table: of `completed`.
        place: the device of the rank, in whose memory lies what is not on its host.

    Returns:
        Those that were on ``meta``, for `check_filled`.
    """
    own = {name: state for state in table[rank] for name in state.names}
    tensors = dict(entries(model))
    kept: dict[int, torch.Tensor] = {}
    new: list[Unfilled] = []
    for state in table[rank]:
        memory: torch.Tensor | None = None
        for name in state.names:
            tensor = tensors.get(name)
            if tensor is None:
                raise StrategyError(f"the model has no {name!r}; the strategy is for another model.")
            if id(tensor) not in kept:
                if memory is None:
                    memory = _memory(tensor, state, HOST if state.on_host else place)
                    if state.on_host and place.type == "cuda":
                        memory = memory.pin_memory()  # a GPU copies from and to no other memory at full speed
                kept[id(tensor)] = _holding(tensor, memory)
            owner, kind, last = slot_of(model, name)
            owner.__dict__[kind][last] = kept[id(tensor)]
            if tensor.is_meta:
                new.append(Unfilled(name, kept[id(tensor)], kept[id(tensor)]._version))
    _release(model, (name for name in tensors if name not in own), kept)
    return new


def _memory(tensor: torch.Tensor, state: StatePart, place: torch.device) -> torch.Tensor:
    """A rank's part at its place; the tensor's own memory where nothing is to be done."""
    if tuple(tensor.shape) != state.part.shape:
        raise StrategyError(
            f"{state.name!r} has shape {tuple(tensor.shape)}; expected {state.part.shape}, the strategy is for another "
            "model."
        )
    if not tensor.is_meta:
        own = stored(tensor.detach(), state)
        return _in_room(state, place).copy_(own) if state.has_room else own.to(place)
    if state.has_room:
        made = _in_room(state, place)
    elif state.is_whole:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    else:
        made = torch.empty(state.stored_shape, dtype=tensor.dtype, device=place)
    return made.fill_(math.nan if made.is_floating_point() else 0)


def fetched(tensor: torch.Tensor, state: StatePart, place: torch.device) -> torch.Tensor:
    """A copy at a place of what is stored on a host, for one step."""
    own = tensor.detach()
    made = _in_room(state, place) if state.has_room else torch.empty_like(own, device=place)
    return made.copy_(own, non_blocking=True)


def _in_room(state: StatePart, place: torch.device) -> torch.Tensor:
    """The entries of a flattened part that are stored, in memory for all of it."""
    assert state.flat is not None
    return torch.empty(state.part.n_elements, dtype=state.dtype, device=place)[state.flat[0] : state.flat[1]]


def _holding(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same object with other memory; another one for what is on ``meta``, which cannot have any."""
    if not tensor.is_meta:
        if memory.shape != tensor.shape:
            tensor.grad = None
        tensor.data = memory
        return tensor
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _release(model: nn.Module, names: Iterable[str], kept: dict[int, torch.Tensor]) -> None:
    """Take tensors out of a model, and their memory from whoever else holds them (nn.LSTM's list, say)."""
    for name in names:
        owner, kind, last = slot_of(model, name)
        tensor = owner.__dict__[kind][last]
        owner.__dict__[kind][last] = None
        if tensor is not None and id(tensor) not in kept and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
