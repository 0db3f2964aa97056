"""One safetensors file, with whole tensors and a model's own keys, for a model of which ranks store parts.

Plain PyTorch reads it, and so do ranks under another strategy: each reads its parts of the file and nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from graphs.disk import check_target
from graphs.errors import MismatchError
from placement.runtime.states.state_parts import StatePart, StateTable
from placement.runtime.storing.gathering import Spread, arriving, spread_slots, spread_states
from placement.runtime.storing.optimizer_slots import SCALARS, check_own, check_slots, kept_by, optimizer_state
from placement.runtime.storing.tensor_files import DTYPE_OF, Path, agree, opened, write

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

T = TypeVar("T")


def save(group: ProcessGroup, path: Path, table: StateTable, model: nn.Module) -> None:
    """Write the whole model in one step. All ranks call it; rank 0 writes, tensor by tensor.

    Raises:
        CheckpointError: on every rank: the file cannot be written.
        MismatchError: on every rank: a parameter is not what the table says.
    """
    own = own_tensors(table[group.rank], model)
    _save(group, path, spread_states(group, table, own), own)


def save_optimizer(
    group: ProcessGroup, path: Path, table: StateTable, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """As `save`, the state of an optimizer of each rank's parameters: ``name/slot``, whole tensors where they are like
    the parameter, others (Adam's ``step``) as they are.

    Args:
        optimizer: None on a rank that has no parameters.
    """
    own = {} if optimizer is None else optimizer_state(model, optimizer)
    own = {_first_name(table[group.rank], key): tensor for key, tensor in own.items()}
    known = {key.rpartition("/")[0] for key in own}
    without = [state.name for state in table[group.rank] if state.name not in known]
    _save(group, path, spread_slots(group, table, own), own, kept_by(group, optimizer, without))


def loading(group: ProcessGroup, path: Path, table: StateTable, model: nn.Module) -> Callable[[], None]:
    """Find in a file what this rank stores. All ranks call it.

    Returns:
        Reads that, and nothing else of the file.

    Raises:
        MismatchError: on every rank: a tensor is missing, of another shape or none of the model's, or the file is none.
    """
    own = own_tensors(table[group.rank], model)

    def read() -> list[tuple[StatePart, torch.Tensor, str]]:
        with opened(path) as file:
            keys = set(file.keys())
            _check_known(keys, table, path)
            each = [(state, next((n for n in state.names if n in own), "")) for state in table[group.rank]]
            return [(state, own[name], _key(file, keys, state, path)) for state, name in each if name]

    wanted = together(group, read)

    def fill() -> None:
        with opened(path) as file, torch.no_grad():
            for state, tensor, key in wanted:
                tensor.copy_(_read(file, key, state))

    return fill


def loading_optimizer(
    group: ProcessGroup, path: Path, table: StateTable, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[], None]:
    """Read back what `save_optimizer` wrote, under this strategy or another. All ranks call it.

    Returns:
        Gives it to the optimizer.

    Raises:
        MismatchError: on every rank: the file is none, or the state of another model's optimizer.
    """

    def read() -> dict[int, dict[str, torch.Tensor]]:
        if optimizer is None:
            return {}
        check_own(model, optimizer)
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        state_of = {name: state for state in table[group.rank] for name in state.names}
        parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        with opened(path) as file:
            slots = _slots(file, table, path)
            state_by = {}
            keys_of = {
                name: next((slots[each] for each in state.names if each in slots), [])
                for name, state in state_of.items()
            }
            groups = [
                [
                    (state_of[name].name, state_of[name].part.shape, keys_of[name])
                    for name in (name_of[id(parameter)] for parameter in each["params"])
                ]
                for each in optimizer.param_groups
            ]
            check_slots(file, path, optimizer, groups)
            for number, parameter in enumerate(parameters):
                state = state_of[name_of[id(parameter)]]
                keys = keys_of[name_of[id(parameter)]]
                if keys:
                    state_by[number] = {key.rpartition("/")[2]: _slot(file, key, state, path) for key in keys}
        return state_by

    state = together(group, read)

    def give() -> None:
        if optimizer is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    return give


def own_tensors(row: Sequence[StatePart], model: nn.Module) -> dict[str, torch.Tensor]:
    """A rank's part of the state dict of a model, by dotted name."""
    names = {name for state in row for name in state.names}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in names}


def _slots(file: Any, table: StateTable, path: Path) -> dict[str, list[str]]:
    """The keys of an optimizer's state by the parameter that they are for.

    Raises:
        MismatchError: the model has no such parameter.
    """
    slots: dict[str, list[str]] = {}
    for key in file.keys():  # noqa: SIM118 - no dict
        slots.setdefault(key.rpartition("/")[0], []).append(key)
    known = _names(table)
    for name in slots:
        if not name:
            raise MismatchError(
                f"{os.fspath(path)} is no optimizer's state; expected what save_optimizer() wrote for this model."
            )
        if name not in known:
            raise MismatchError(
                f"{os.fspath(path)} has an optimizer's state for {name!r}, which this model does not have; expected "
                "what save_optimizer() wrote for this model."
            )
    return slots


def _check_known(keys: set[str], table: StateTable, path: Path) -> None:
    """Raises: MismatchError: a model's file has what this model has not, as that of a deeper one."""
    unknown = sorted(keys - _names(table))
    if unknown:
        raise MismatchError(
            f"{os.fspath(path)} has {unknown[0]!r}, which this model does not have; expected a checkpoint of this "
            "model."
        )


def _names(table: StateTable) -> set[str]:
    return {name for row in table for state in row for name in state.names}


def _first_name(row: Sequence[StatePart], key: str) -> str:
    """The key of a slot under the name of its parameter in the table."""
    name, _, slot = key.rpartition("/")
    state = next((state for state in row if name in state.names), None)
    return key if state is None else f"{state.name}/{slot}"


def _save(
    group: ProcessGroup,
    path: Path,
    spread: Sequence[Spread],
    own: Mapping[str, torch.Tensor],
    said: Mapping[str, str] | None = None,
) -> None:
    agree(group, lambda: check_target(path))
    tensors = arriving(group, spread, own)

    def act() -> None:
        outlines = [outline for tensor in spread for outline in tensor.outlines]
        try:
            write(path, outlines, _repeated(tensors), said)
        finally:
            list(tensors)  # where the disk is full, the others still send

    if group.rank != 0:
        list(tensors)
    agree(group, act)


def _repeated(tensors: Iterator[tuple[Spread, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Each tensor once for each of its keys."""
    for tensor, made in tensors:
        for _ in tensor.keys:
            yield made


def together(group: ProcessGroup, act: Callable[[], T]) -> T:
    """Let every rank act, and all raise the first `MismatchError` that one met."""
    problem, result = "", None
    try:
        result = act()
    except MismatchError as error:
        problem = str(error)
    first = next(
        (text for text in group.all_gather(json.dumps(problem), "whether a checkpoint will do") if text != '""'), None
    )
    if first is not None:
        raise MismatchError(json.loads(first))
    return result  # type: ignore[return-value]


def _key(file: Any, keys: set[str], state: StatePart, path: Path) -> str:
    """The key of a parameter or buffer in a file.

    Raises:
        MismatchError: it is missing or of another shape.
    """
    key = next((name for name in state.names if name in keys), None)
    if key is None:
        raise MismatchError(f"{os.fspath(path)} has no {state.name!r}; expected a checkpoint of this model.")
    shape = tuple(file.get_slice(key).get_shape())
    if shape != state.part.shape:
        raise MismatchError(
            f"{state.name!r} has shape {shape} in {os.fspath(path)}; expected {state.part.shape}, the model's."
        )
    return key


def _slot(file: Any, key: str, state: StatePart, path: Path) -> torch.Tensor:
    """State that an optimizer keeps for a rank's part of a parameter."""
    shape = tuple(file.get_slice(key).get_shape())
    # Beside a parameter that is one number they look like what is kept for each element.
    if shape == state.part.shape and (shape or key.rpartition("/")[2] not in SCALARS):
        return _read(file, key, state).clone()
    if math.prod(shape) > 1 and not state.is_whole:
        raise MismatchError(
            f"{key!r} has shape {shape} in {os.fspath(path)}; expected {state.part.shape}, the parameter's, of which "
            "this rank stores a part."
        )
    return torch.as_tensor(file.get_tensor(key))


def _read(file: Any, key: str, state: StatePart) -> torch.Tensor:
    """A rank's part of a tensor of a file; only the rows that it needs are read."""
    part = state.part
    if state.is_whole:
        return torch.as_tensor(file.get_tensor(key))
    view, sizes = file.get_slice(key), list(part.local_shape)
    low, high = state.flat or (0, part.n_elements)
    row = math.prod(sizes[1:])
    if high == low:
        return torch.empty(state.stored_shape, dtype=DTYPE_OF[view.get_dtype()], device="cpu")
    if not sizes:
        return torch.as_tensor(file.get_tensor(key)).reshape(1)
    first, last = low // row, -(-high // row)
    sizes[0] = last - first
    runs = [_runs(part.runs(dim), 0, sizes[dim]) for dim in range(len(sizes))]
    runs[0] = _runs(part.runs(0), first, last)
    found = torch.empty(sizes, dtype=DTYPE_OF[view.get_dtype()], device="cpu")
    for box in itertools.product(*runs):
        here = tuple(slice(at, at + stop - start) for start, stop, at in box)
        found[here] = view[tuple(slice(start, stop) for start, stop, _ in box)]
    return found.reshape(-1)[low - first * row : high - first * row].view(state.stored_shape)


def _runs(runs: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int, int]]:
    """Entries ``first <= i < last`` of stretches of a dimension that are put one after the other.

    Returns:
        Start and stop in the whole tensor, and where that is in the result.
    """
    found, at = [], 0
    for start, stop in runs:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at, low - first))
        at += stop - start
    return found
