"""The state of an optimizer as named tensors, and whether a file has all of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.states.masters import MASTER
from placement.runtime.storing.tensor_files import Path

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

_KIND, _WITHOUT = "optimizer", "without"  # what a file says: whose state it is, and parameters that have none
# State of torch's optimizers for each entry of a parameter, and once for each parameter.
_ENTRYWISE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta"),
        *("prev", MASTER),
    )
)
SCALARS = ("step", "mu_product", "eta", "mu")


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


def kept_by(group: ProcessGroup, optimizer: torch.optim.Optimizer | None, without: Sequence[str]) -> dict[str, str]:
    """Metadata in the file of an optimizer's state: its kind, and the parameters for which it keeps nothing.

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
