"""One safetensors file for a model that is spread over processes: rank 0 writes it, every rank reads its share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphs.disk import check_target
from graphs.errors import MismatchError
from placement.runtime.ranks.tensor_files import DTYPE_OF, Outline, Path, agree, describe, opened, write
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

_TAG = 1 << 30  # beyond those of transfers


@dataclass(frozen=True)
class Entry:
    """A tensor that some rank has.

    Attributes:
        name: its key.
        rank: the first rank that has it.
        dtype: as safetensors writes it.
        shape: its shape.
    """

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.outline.size_bytes

    @property
    def outline(self) -> Outline:
        """As it is in a file."""
        return Outline(self.name, self.dtype, self.shape)

    def channel(self) -> Channel:
        """To rank 0."""
        packing = Packing.flat(math.prod(self.shape), DTYPE_OF[self.dtype])
        return Channel(packing, self.rank, 0, _TAG, f"tensor {self.name!r}")


def gather(group: ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name on rank 0, on the CPU; an empty dict elsewhere. All ranks call it."""
    index = _index(group, tensors)
    return {entry.name: tensor.clone() for entry, tensor in _arriving(group, index, tensors)}


def save(group: ProcessGroup, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors of all ranks to one file in one step; what was there stays until then. All ranks call it.

    Raises:
        CheckpointError: on every rank: it cannot be written.
        MismatchError: safetensors has no such dtype.
    """
    index = _index(group, tensors)
    agree(group, lambda: check_target(path))
    if group.rank == 0:
        agree(group, lambda: _write(group, path, index, tensors))
    else:
        list(_arriving(group, index, tensors))
        agree(group, lambda: None)


def load(path: Path, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, tuple[str, ...]]) -> None:
    """Fill tensors from a file, of which nothing else is read.

    Args:
        path: a safetensors file.
        tensors: what to fill, by name.
        ties: the names that stand for the same tensor: one of them in the file is enough.

    Raises:
        MismatchError: a tensor is missing or of another shape, or the file is none.
    """
    with opened(path) as file:
        keys = set(file.keys())
        for name, tensor in tensors.items():
            found = next((key for key in (name, *ties.get(name, ())) if key in keys), None)
            if found is None:
                raise MismatchError(f"{os.fspath(path)} has no {name!r}; expected a checkpoint of this model.")
            shape = tuple(file.get_slice(found).get_shape())
            if shape != tuple(tensor.shape):
                raise MismatchError(
                    f"{name!r} has shape {shape} in {os.fspath(path)}; expected {tuple(tensor.shape)}, the model's."
                )
            with torch.no_grad():
                tensor.copy_(file.get_tensor(found))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer for each parameter of a model, as ``name/slot``.

    Raises:
        MismatchError: it keeps something else than tensors, or is of other parameters.
    """
    check_own(model, optimizer)
    found = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{slot}"] = value
            elif value is not None:
                raise MismatchError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of {name!r}; expected "
                    "tensors, save its state_dict() on each rank."
                )
    return found


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer of some of a model's parameters the state that `optimizer_state` named.

    Raises:
        MismatchError: the file is none, or the optimizer is of other parameters.
    """
    check_own(model, optimizer)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with opened(path) as file:
        slots: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - no dict
            slots.setdefault(key.rpartition("/")[0], []).append(key)
        for number, parameter in enumerate(parameters):
            for key in slots.get(name_of[id(parameter)], ()):
                state.setdefault(number, {})[key.rpartition("/")[2]] = file.get_tensor(key)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def check_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises: MismatchError: the optimizer has parameters that the model does not have."""
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise MismatchError(
            f"the {type(optimizer).__name__} has parameters that this process does not have; make it of "
            "placed.parameters()."
        )


def _index(group: ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The tensors of all ranks, each name once, in the order that all ranks send and rank 0 writes."""
    own = {name: describe(tensor, name)[1:] for name, tensor in tensors.items()}
    found: dict[str, Entry] = {}
    for rank, text in enumerate(group.all_gather(json.dumps(own), "what it has of a checkpoint")):
        for name, (dtype, shape) in json.loads(text).items():
            found.setdefault(name, Entry(name, rank, dtype, tuple(shape)))
    return [found[name] for name in sorted(found)]


def _arriving(
    group: ProcessGroup, index: list[Entry], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Each tensor on rank 0, one at a time; other ranks send theirs and get nothing."""
    for entry in index:
        if entry.rank == group.rank:
            tensor = tensors[entry.name].detach().to("cpu").contiguous()
            if group.rank == 0:
                yield entry, tensor
            elif tensor.numel():
                group.send(group.gloo, entry.channel(), tensor.reshape(-1))
                group.drain()
        elif group.rank == 0:
            channel = entry.channel()
            if entry.size_bytes:
                memory = group.receive(group.gloo, channel, group.expect(group.gloo, channel))
            else:
                memory = channel.packing.empty()
            yield entry, memory.view(entry.shape)


def _write(group: ProcessGroup, path: Path, index: list[Entry], tensors: Mapping[str, torch.Tensor]) -> None:
    arriving = _arriving(group, index, tensors)
    try:
        write(path, [entry.outline for entry in index], (tensor for _, tensor in arriving))
    finally:
        list(arriving)  # where the disk is full, the others still send
