"""One safetensors file for a model that is spread over processes: rank 0 writes it, every rank reads its share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
_KIND, _WITHOUT = "optimizer", "without"  # what a file says: whose state it is, and parameters that have none
# What torch's optimizers keep for each entry of a parameter, and once for each parameter.
_ENTRYWISE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta", "prev")
)
SCALARS = ("step", "mu_product", "eta", "mu")


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


def save(
    group: ProcessGroup, path: Path, tensors: Mapping[str, torch.Tensor], said: Mapping[str, str] | None = None
) -> None:
    """Write the tensors of all ranks to one file in one step; what was there stays until then. All ranks call it.

    Args:
        said: what else the file says, as of `kept_by`.

    Raises:
        CheckpointError: on every rank: it cannot be written.
        MismatchError: safetensors has no such dtype.
    """
    index = _index(group, tensors)
    agree(group, lambda: check_target(path))
    if group.rank == 0:
        agree(group, lambda: _write(group, path, index, tensors, said))
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
        MismatchError: the file is none, or the optimizer is of other parameters, or as of `check_slots`.
    """
    check_own(model, optimizer)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with opened(path) as file:
        slots: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - no dict
            slots.setdefault(key.rpartition("/")[0], []).append(key)
        names = ([name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        groups = [[(name, shapes[name], slots.get(name, [])) for name in own] for own in names]
        check_slots(file, path, optimizer, groups)
        for number, parameter in enumerate(parameters):
            for key in slots.get(name_of[id(parameter)], ()):
                state.setdefault(number, {})[key.rpartition("/")[2]] = file.get_tensor(key)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def kept_by(group: ProcessGroup, optimizer: torch.optim.Optimizer | None, without: Sequence[str]) -> dict[str, str]:
    """What the file of an optimizer's state says of itself: its kind, and parameters for which it keeps nothing.

    All ranks call it.

    Args:
        without: of these the parameters of this rank.
    """
    kind = "" if optimizer is None else type(optimizer).__name__
    told = [json.loads(text) for text in group.all_gather(json.dumps([kind, list(without)]), "what an optimizer keeps")]
    names = sorted({name for _, listed in told for name in listed})
    return {_KIND: next((each for each, _ in told if each), ""), _WITHOUT: json.dumps(names)}


def check_slots(
    file: Any,
    path: Path,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[tuple[str, tuple[int, ...], Sequence[str]]]],
) -> None:
    """Refuse a file that has only some of an optimizer's state, or that of another one.

    Args:
        groups: of each group of the optimizer the parameters: name in the file, whole shape, and keys of slots.

    Raises:
        MismatchError: a parameter has other slots than the others of its group, or one of another shape.
    """
    where, said = os.fspath(path), file.metadata() or {}
    kinds = {each.__name__ for each in type(optimizer).__mro__}
    if said.get(_KIND) and said[_KIND] not in kinds:
        raise MismatchError(f"{where} is the state of {said[_KIND]}; the optimizer is {type(optimizer).__name__}.")
    without = set()
    with suppress(ValueError, TypeError, RecursionError):  # somebody else's
        without = set(json.loads(said.get(_WITHOUT, "[]")))
    for parameters in groups:
        wanted = sorted({key.rpartition("/")[2] for _, _, keys in parameters for key in keys})
        for name, shape, keys in parameters:
            slots = {key.rpartition("/")[2]: key for key in keys}
            if not slots and name in without:
                continue
            missing = next((slot for slot in wanted or ["..."] if slot not in slots), None)
            if missing is not None:
                raise MismatchError(
                    f"{where} has no {f'{name}/{missing}'!r}; expected all that {type(optimizer).__name__} keeps for "
                    "each parameter of a group, as save_optimizer() writes it."
                )
            for slot, key in slots.items():
                found = tuple(file.get_slice(key).get_shape())
                if (slot in _ENTRYWISE and found != shape) or (slot in SCALARS and math.prod(found) != 1):
                    expected = f"{shape}, the parameter's" if slot in _ENTRYWISE else "one number"
                    raise MismatchError(f"{key!r} has shape {found} in {where}; expected {expected}.")


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


def _write(
    group: ProcessGroup,
    path: Path,
    index: list[Entry],
    tensors: Mapping[str, torch.Tensor],
    said: Mapping[str, str] | None,
) -> None:
    arriving = _arriving(group, index, tensors)
    try:
        write(path, [entry.outline for entry in index], (tensor for _, tensor in arriving), said)
    finally:
        list(arriving)  # where the disk is full, the others still send
