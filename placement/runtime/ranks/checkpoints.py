"""One safetensors file for a model that is spread over processes: rank 0 writes it, every rank reads its share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import nn

from graphs.disk import atomic_file, check_target
from graphs.errors import MismatchError
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

Path = str | os.PathLike[str]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
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
        return math.prod(self.shape) * _DTYPE_OF[self.dtype].itemsize

    def channel(self) -> Channel:
        """To rank 0."""
        packing = Packing.flat(math.prod(self.shape), _DTYPE_OF[self.dtype])
        return Channel(packing, self.rank, 0, _TAG, f"tensor {self.name!r}")


def gather(group: ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name on rank 0, on the CPU; an empty dict elsewhere. All ranks call it."""
    index = _index(group, tensors)
    return {entry.name: tensor.clone() for entry, tensor in _arriving(group, index, tensors)}


def save(group: ProcessGroup, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors of all ranks to one file in one step; what was there stays until then. All ranks call it.

    Raises:
        OSError: on every rank: it cannot be written.
        MismatchError: safetensors has no such dtype.
    """
    index = _index(group, tensors)
    _agree(group, lambda: check_target(path))
    if group.rank == 0:
        _agree(group, lambda: _write(group, path, index, tensors))
    else:
        list(_arriving(group, index, tensors))
        _agree(group, lambda: None)


def load(path: Path, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, tuple[str, ...]]) -> None:
    """Fill tensors from a file, of which nothing else is read.

    Args:
        path: a safetensors file.
        tensors: what to fill, by name.
        ties: the names that stand for the same tensor: one of them in the file is enough.

    Raises:
        MismatchError: a tensor is missing or of another shape, or the file is none.
    """
    with _opened(path) as file:
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
    _check_own(model, optimizer)
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
    _check_own(model, optimizer)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with _opened(path) as file:
        slots: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - no dict
            slots.setdefault(key.rpartition("/")[0], []).append(key)
        for number, parameter in enumerate(parameters):
            for key in slots.get(name_of[id(parameter)], ()):
                state.setdefault(number, {})[key.rpartition("/")[2]] = file.get_tensor(key)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _check_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise MismatchError(
            f"the {type(optimizer).__name__} has parameters that this process does not have; make it of "
            "placed.parameters()."
        )


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(os.fspath(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise MismatchError(f"there is no checkpoint {os.fspath(path)}; check the path on every host.") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise MismatchError(f"cannot read {os.fspath(path)} as a safetensors file: {error}.") from None


def _index(group: ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The tensors of all ranks, each name once, in the order that all ranks send and rank 0 writes."""
    unknown = next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES), None)
    if unknown is not None:
        raise MismatchError(f"{unknown!r} is {tensors[unknown].dtype}, which no safetensors file can hold.")
    own = {name: (_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    found: dict[str, Entry] = {}
    for rank, text in enumerate(group.all_gather(json.dumps(own))):
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in index:
        start, end = end, end + entry.size_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    arriving = _arriving(group, index, tensors)
    try:
        with atomic_file(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in arriving:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    finally:
        list(arriving)  # where the disk is full, the others still send


def _agree(group: ProcessGroup, act: Any) -> None:
    """Let rank 0 act, and every rank raise the `OSError` that it met."""
    failure: OSError | None = None
    if group.rank == 0:
        try:
            act()
        except OSError as error:
            failure = error
    told = None if failure is None else [failure.errno, failure.strerror, failure.filename and str(failure.filename)]
    met = json.loads(group.all_gather(json.dumps(told))[0])
    if failure is not None:
        raise failure
    if met is not None:
        raise OSError(*met)
