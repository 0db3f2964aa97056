"""`OwnStates`: the parameters and buffers of one rank of a placement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.modules.alike import check_values, values_of
from placement.runtime.modules.local_tensors import Unfilled, check_filled, entries, outlines_of, slot_of
from placement.runtime.modules.shared_states import SharedStates
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.ranks.group import RankGroup


class OwnStates(SharedStates):
    """What a rank has of a model: every tensor whole, each that is trained on one rank alone.

    Args:
        model: whole, or on ``meta``; what other ranks have is taken out of it and freed.
        layout: says which devices have each state; those that no op uses go to the first.
    """

    def __init__(self, model: nn.Module, layout: DeviceLayout, ranks: RankGroup, place: torch.device) -> None:
        self._model = model
        outlines, keys = outlines_of(model), list(model.state_dict())
        self._start = values_of(model)
        mine = {name for name, devices in _keepers(model, layout).items() if ranks.rank in devices}
        self._new = _kept(model, mine, place)
        self._is_checked = False
        super().__init__(ranks, outlines, [key for key in keys if key in outlines])

    def entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any."""
        yield from entries(self._model)

    def check_filled(self) -> None:
        """Refuse what was on ``meta`` and got no values since, and models that ranks have made with other values.

        All ranks call it; only the first call looks.

        Raises:
            MismatchError: names one of them.
        """
        if self._is_checked:
            return
        check_filled(self._model, self._new)
        check_values(self._ranks, self._start, "the first step")
        self._new, self._start, self._is_checked = [], {}, True

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on the whole model; the norm before clipping, on every rank.

        Raises:
            MismatchError: the norm is none of a positive number, or not finite.
        """
        if not norm_type > 0:
            raise MismatchError(f"norm_type is {norm_type}; expected a positive number, or inf.")
        self._ranks.meet("clip_grad_norm_()")
        graded = {n: each for n, each in self.entries() if isinstance(each, nn.Parameter) and each.grad is not None}
        # Tied parameters have one gradient.
        first = {id(each): name for name, each in reversed(graded.items())}
        norms = {name: float(_norm(graded[name].grad, norm_type)) for name in first.values()}
        told = {name: norm for each in self._ranks.told(norms) for name, norm in each.items()}
        ordered = torch.tensor([told[name] for name in self.outlines if name in told], device="cpu")
        total = _norm(ordered, norm_type) if len(ordered) else torch.zeros((), device="cpu")
        if error_if_nonfinite and not total.isfinite():
            raise MismatchError(f"the norm of the gradients is {total.item()}; expected a finite one, skip the step.")
        if graded:
            parameters = [graded[name] for name in first.values()]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.to(parameters[0].device))
        return total

    def load(self, path: Any) -> None:
        """As of any; the values that the model was made with count no more."""
        super().load(path)
        self.forget_start()

    def forget_start(self) -> None:
        """The values that the model was made with count no more: it has others."""
        self._start = {}


def _keepers(model: nn.Module, layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The devices that have each parameter and buffer of a model, by each of its names."""
    found: dict[str, tuple[int, ...]] = {}
    for index, state in enumerate(layout.step.program.states):
        found.update(dict.fromkeys(state.names, layout.keepers(index)))
    by_object: dict[int, tuple[int, ...]] = {}
    for name, tensor in entries(model):
        if name in found:
            by_object[id(tensor)] = found[name]
    return {name: by_object.get(id(tensor), (0,)) for name, tensor in entries(model)}


def _kept(model: nn.Module, names: set[str], place: torch.device) -> list[Unfilled]:
    """Leave a model those tensors, on a device; the others become None, and their memory is freed.

    Modules and `nn.Parameter` objects stay what they are. Tensors on ``meta`` get memory, floating-point ones filled
    with NaN.

    Returns:
        Those that were on ``meta``.
    """
    made: dict[int, torch.Tensor] = {}
    new: list[Unfilled] = []
    released: list[torch.Tensor] = []
    for name, tensor in list(entries(model)):
        owner, kind, last = slot_of(model, name)
        if name not in names:
            owner.__dict__[kind][last] = None
            released.append(tensor)
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _filled(tensor, place) if tensor.is_meta else tensor
            tensor.data = tensor.data if tensor.is_meta else tensor.data.to(place)
        owner.__dict__[kind][last] = made[id(tensor)]
        if tensor.is_meta:
            new.append(Unfilled(name, made[id(tensor)], made[id(tensor)]._version))
    for tensor in released:  # whoever else holds it (nn.LSTM's list, say)
        if id(tensor) not in made and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
            tensor.grad = None
    return new


def _filled(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    memory.fill_(math.nan if memory.is_floating_point() else 0)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _norm(vector: Any, norm_type: float) -> torch.Tensor:
    dtype = torch.promote_types(vector.dtype, torch.float32)
    return torch.as_tensor(torch.linalg.vector_norm(vector, norm_type, dtype=dtype))
