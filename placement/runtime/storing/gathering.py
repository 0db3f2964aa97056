"""Whole tensors from the pieces that ranks store, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import MismatchError
from placement.runtime.parts.layouts import whole
from placement.runtime.states.state_parts import Piece, StatePart, StateTable, pieces_of, put_together
from placement.runtime.storing.tensor_files import DTYPE_OF, Outline, describe
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

_TAG = (1 << 30) + 2  # beyond those of transfers
_Index = list[dict[str, tuple[str, tuple[int, ...]]]]  # dtype and shape of what each rank has, by key


@dataclass(frozen=True)
class Spread:
    """A tensor whose pieces are on ranks.

    Attributes:
        keys: under which it is known; tied ones have several. The pieces are under the first.
        dtype: as safetensors writes it.
        pieces: by rank.
    """

    keys: tuple[str, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pieces[0].state.part.shape

    @property
    def outlines(self) -> tuple[Outline, ...]:
        """As they are in a file."""
        return tuple(Outline(key, self.dtype, self.shape) for key in self.keys)

    def channel(self, piece: Piece, target: int) -> Channel:
        """Channel of a piece to a rank."""
        packing = Packing.flat(piece.state.n_stored, DTYPE_OF[self.dtype])
        return Channel(packing, piece.rank, target, _TAG, f"tensor {self.keys[0]!r}")


def spread_states(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor]) -> list[Spread]:
    """The parameters and buffers that ranks have.

    Args:
        table: of `completed`.
        own: what this rank has, by dotted name. A tensor that no rank hands in is left out, and so are its keys.

    Raises:
        MismatchError: on every rank: a rank has something else than its table says.
    """
    index = _index(group, own)
    known = set().union(*index)
    found = []
    for pieces in pieces_of(table).values():
        keys = tuple(name for name in pieces[0].state.names if name in known)
        if keys:
            found.append(_spread(index, keys, pieces))
    return found


def spread_slots(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor]) -> list[Spread]:
    """The tensors that optimizers keep for each parameter, as ``name/slot``: whole where they are like the parameter.

    Raises:
        MismatchError: on every rank: what they keep for a part of a parameter is no part of anything.
    """
    index = _index(group, own)
    slots: dict[str, set[str]] = {}
    for key in sorted(set().union(*index)):
        name, _, slot = key.rpartition("/")
        slots.setdefault(name, set()).add(slot)
    found = []
    for name, pieces in pieces_of(table).items():
        for slot in sorted(slots.get(name, ())):
            key = f"{name}/{slot}"
            is_like = _is_like(index, key, pieces)
            found.append(_spread(index, (key,), pieces if is_like else _alone(index, key, pieces)))
    return found


def arriving(
    group: ProcessGroup, spread: Sequence[Spread], own: Mapping[str, torch.Tensor], target: int = 0
) -> Iterator[tuple[Spread, torch.Tensor]]:
    """Each tensor on one rank, on the CPU, one at a time; other ranks send their pieces and get nothing."""
    for tensor in spread:
        pieces = []
        for piece in tensor.pieces:
            if piece.rank == group.rank:
                here = own[tensor.keys[0]].detach().to("cpu")
                if group.rank == target:
                    pieces.append((piece.state, here))
                elif here.numel():
                    group.send(group.gloo, tensor.channel(piece, target), here.contiguous().reshape(-1))
                    group.drain()
            elif group.rank == target:
                channel = tensor.channel(piece, target)
                coming = channel.packing.empty()
                if piece.state.n_stored:
                    coming = group.receive(group.gloo, channel, group.expect(group.gloo, channel))
                pieces.append((piece.state, coming.view(piece.state.stored_shape)))
        if group.rank == target:
            yield tensor, put_together(pieces)


def gathered(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors of all ranks by key on rank 0, on the CPU; an empty dict elsewhere. All ranks call it."""
    spread = spread_states(group, table, own)
    return {key: made.clone() for tensor, made in arriving(group, spread, own) for key in tensor.keys}


def whole_tensor(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """One parameter or buffer, whole, on the CPU of every rank. All ranks call it.

    Raises:
        MismatchError: there is none of that name.
    """
    spread = [tensor for tensor in spread_states(group, table, own) if name in tensor.keys]
    if not spread:
        raise MismatchError(f"there is no parameter or buffer {name!r}; state_dict() of the model has the names.")
    found = [tensor for rank in range(group.size) for _, tensor in arriving(group, spread, own, rank)]
    return found[0].clone()


def _index(group: ProcessGroup, own: Mapping[str, torch.Tensor]) -> _Index:
    """Keys and pieces that each rank has."""
    text = json.dumps({key: describe(tensor, key)[1:] for key, tensor in own.items()})
    return [
        {key: (dtype, tuple(shape)) for key, (dtype, shape) in json.loads(each).items()}
        for each in group.all_gather(text, "what it has of a checkpoint")
    ]


def _spread(index: _Index, keys: tuple[str, ...], pieces: tuple[Piece, ...]) -> Spread:
    """Raises: MismatchError: the ranks of the pieces have something else."""
    dtypes = set()
    for rank, state in pieces:
        dtype, shape = index[rank].get(keys[0], ("", ()))
        if not dtype or shape != state.stored_shape:
            has = f"has {keys[0]!r} in shape {shape}" if dtype else f"has no {keys[0]!r}"
            raise MismatchError(
                f"rank {rank} {has}, of which it should store {state.stored_shape}; every rank has to train the "
                "parameters that it was given."
            )
        dtypes.add(dtype)
    if len(dtypes) > 1:
        raise MismatchError(f"{keys[0]!r} is {' and '.join(sorted(dtypes))} on different ranks; give it one dtype.")
    return Spread(keys, dtypes.pop(), pieces)


def _is_like(index: _Index, key: str, pieces: tuple[Piece, ...]) -> bool:
    """Whether a slot of an optimizer has an element for each element of its parameter."""
    return all(index[rank].get(key, ("", state.stored_shape))[1] == state.stored_shape for rank, state in pieces)


def _alone(index: _Index, key: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """A slot that is the same for all elements, as the first rank has it."""
    rank = next(piece.rank for piece in pieces if key in index[piece.rank])
    state, (dtype, shape) = pieces[0].state, index[rank][key]
    if math.prod(shape) > 1 and not state.is_whole:
        raise MismatchError(
            f"the optimizer keeps {key!r} in shape {shape} for a part of a parameter, which cannot be put together; "
            "save its state_dict() on each rank."
        )
    return (Piece(rank, StatePart((key,), whole(shape), None, DTYPE_OF[dtype], False)),)
