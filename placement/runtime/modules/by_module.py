"""A model placed module by module, in one process: for models that cannot be traced.

Every module has a device. Its arguments are brought there before it runs, and what it returns is brought to the device
of the module whose code called it, so that the code between modules finds all its tensors in one place. One module
runs at a time, as with a device map; autograd does the backward pass.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.errors import MismatchError
from graphs.opgraph import OpGraph, Phase
from placement.inputs.call_arguments import check_states
from placement.results.result import Result
from placement.runtime.modules.wrapper import ModelWrapper


def place_modules(model: nn.Module, result: Result, places: Mapping[str, torch.device]) -> nn.Module:
    """The model with every module on the device that a placement at module granularity gives it.

    Args:
        model: the model that was captured; its parameters and buffers are moved, and stay the objects they are.
        result: a placement of its graph with ``granularity="module"``.
        places: torch device of each device that the placement uses, by name.

    Raises:
        MismatchError: the placement is infeasible or for another model, or the model has no data.
    """
    _check_modules(model, result.graph)
    check_states(model)
    return ModulePlaced(model, result, places)


def _check_modules(model: nn.Module, graph: OpGraph) -> None:
    """Refuse another model. The modules that run may depend on data, so it cannot be captured again and compared."""
    known = dict(model.named_modules())
    for i in _forward(graph):
        path, kind = graph.modules[i], graph.kinds[i]
        what = f"the placement is for graph {graph.name!r}, and this model has"
        if path not in known:
            raise MismatchError(f"{what} no module {path!r}; place this model first.")
        found = type(known[path]).__name__
        if "." not in kind and found != kind:  # operators between modules have a namespace
            raise MismatchError(f"{what} a {found} where that has a {kind}, module {path!r}; place this model first.")


class ModulePlaced(ModelWrapper):
    """A drop-in for the model: the same parameters, buffers, keys and outputs, each module on its device."""

    def __init__(self, model: nn.Module, result: Result, places: Mapping[str, torch.device]) -> None:
        super().__init__(model)
        self.places = module_places(model, result, places)
        self._callers: list[torch.device | None] = []
        self._move_states()
        handles, own = [], weakref.ref(self)
        for path, module in model.named_modules():
            # A chain has no code of its own: what its modules pass on goes straight from one to the next.
            place = None if type(module) is nn.Sequential else self.places[path]
            handles.append(module.register_forward_pre_hook(partial(_enter, own, place), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_leave, own)))
        self.__dict__["_handles"] = handles

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Callers that an earlier call left behind when it failed are gone.
        self._callers[:] = [given[0].device if given else None]
        return self._model(*args, **kwargs)

    def remove(self) -> None:
        """Give the model back as it was, its parameters where they are now."""
        for handle in self._handles:
            handle.remove()

    def _move_states(self) -> None:
        moved: set[int] = set()
        for path, module in self._model.named_modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in moved:
                    moved.add(id(tensor))
                    tensor.data = to_place(tensor.data, self.places[path])


def _enter(
    placed: weakref.ref[ModulePlaced], place: torch.device | None, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Before a module: its arguments are brought to its device."""
    if (owner := placed()) is None:
        return None
    owner._callers.append(place)
    return None if place is None else (to_place(args, place), to_place(kwargs, place))


def _leave(placed: weakref.ref[ModulePlaced], module: nn.Module, args: Any, output: Any) -> Any:
    """After a module: what it returns is brought to where its caller is."""
    if (owner := placed()) is None:
        return None
    owner._callers.pop()
    caller = owner._callers[-1] if owner._callers else None
    return None if caller is None else to_place(output, caller)


def module_places(model: nn.Module, result: Result, places: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """The device of every module by its path.

    A module that was an op, or whose own code has ops, is where the first of these is that keeps parameters, else the
    first; any other is where the first module inside it is, else where the one around it is.

    Raises:
        MismatchError: the result is infeasible.
    """
    graph, placement = result.graph, result.answered().placement
    own: dict[str, list[int]] = {}
    for i in _forward(graph):
        own.setdefault(graph.modules[i], []).append(i)
    found: dict[str, torch.device] = {}
    for path, ops in own.items():
        first = next((i for i in ops if graph.kept_bytes[i]), ops[0])
        found[path] = places[placement[graph.op_names[first]]]
    paths = [path for path, _ in model.named_modules()]
    for path in reversed(paths):
        inside = (other for other in paths if other in found and (not path or other.startswith(path + ".")))
        if path not in found and (first_inside := next(inside, None)) is not None:
            found[path] = found[first_inside]
    for path in paths:
        found.setdefault(path, found.get(path.rpartition(".")[0], torch.device("cpu")))
    return found


def to_place(value: Any, place: torch.device) -> Any:
    """A nested value with its tensors on a device; itself where they are there already."""
    leaves, spec = pytree.tree_flatten(value)
    moved = [_leaf_to(leaf, place) for leaf in leaves]
    if all(new is old for new, old in zip(moved, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(moved, spec)


def _leaf_to(leaf: Any, place: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device == place else leaf.to(place)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
        moved = {name: to_place(part, place) for name, part in parts.items()}
        if any(moved[name] is not part for name, part in parts.items()):
            return dataclasses.replace(leaf, **moved)
    return leaf


def _forward(graph: OpGraph) -> list[int]:
    """Ops of the forward pass that compute."""
    return [i for i in range(graph.n_ops) if graph.phase[i] == Phase.FORWARD and graph.kernels[i]]
