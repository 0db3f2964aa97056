"""`PlacedModule`: the user's model with its ops on their devices, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphs.capture import Program
from graphs.capture.record import argument_leaves
from graphs.errors import MismatchError
from placement.runtime.functional import uninitialised
from placement.runtime.layout import Key, Layout
from placement.runtime.routines import Routines, compile_routines
from placement.runtime.threads import Exchange, Team


class PlacedModule(nn.Module):
    """A drop-in for the model: the same parameters, buffers, keys and outputs, each op on its device."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = model.__dict__[kind]
        self.training = model.training
        self._model: nn.Module
        self.__dict__["_model"] = model  # not as a submodule: its keys are this module's own
        self._layout = layout
        self._team = Team(layout.places)
        self._compiled: dict[bool, Routines] = {}
        self._move_states()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program = self._layout.step.program
        inputs = bound(self._model, program, args, kwargs)
        run = _Run(self, inputs)
        if not (program.train and torch.is_grad_enabled()):
            tensors = run.forward(with_backward=False)
        else:
            parameters = [self.get_parameter(program.trace.states[p].name) for p, _ in program.trace.gradients]
            tensors = _Differentiable.apply(run, *parameters)  # type: ignore[no-untyped-call]
        assert program.trace.outputs is not None
        return program.trace.outputs.filled(tensors)

    def routines(self, with_backward: bool) -> Routines:
        """The code of the forward pass, and of the backward pass with it."""
        if with_backward not in self._compiled:
            layout = self._layout
            sections = [layout.forward(), layout.backward()] if with_backward else [layout.forward()]
            self._compiled[with_backward] = compile_routines(layout, sections)
        return self._compiled[with_backward]

    def _move_states(self) -> None:
        """Every parameter and buffer to its device, staying the object it is."""
        layout = self._layout
        for index, state in enumerate(layout.step.program.states):
            place = layout.places[layout.home(index)]
            for name in state.names:
                tensor = tensor_named(self, name)
                if tensor is not None and tensor.device != place:
                    tensor.data = tensor.data.to(place)


class _Run:
    """One forward pass and what its backward pass needs of it."""

    def __init__(self, placed: PlacedModule, inputs: Mapping[str, torch.Tensor]) -> None:
        self.placed, self.inputs = placed, inputs
        self._saved: list[dict[Key, Any]] = []

    def forward(self, with_backward: bool) -> list[torch.Tensor]:
        routines = self.placed.routines(with_backward)
        places = routines.layout.places
        self._exchange = Exchange(routines.parcels, places)
        self._drawn = draw(routines.layout)
        given = self.placed._team.run(routines, 0, self._exchange, self._lookup)
        self._saved = given
        outputs = {key[1]: value for device in given for key, value in device.items() if key[0] == "output"}
        del self._drawn
        return [outputs[i] for i in range(len(outputs))]

    def backward(self, tangents: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        self._tangents = tangents
        routines = self.placed.routines(True)
        given = self.placed._team.run(routines, 1, self._exchange, self._lookup)
        return {key[1]: value for device in given for key, value in device.items() if key[0] == "gradient"}

    def _lookup(self, device: int, key: Key) -> Any:
        kind, name = key
        place = self.placed._layout.places[device]
        if kind == "state":
            found = tensor_named(self.placed, name)
            if found is None:
                found = self.placed._layout.step.program.constants[name]
            return found.to(place)
        if kind == "input":
            return self.inputs[name].to(place)
        if kind == "drawn":
            return self._drawn[name].to(place)
        if kind == "tangent":
            return self._tangents[name]
        return self._saved[device][key]


class _Differentiable(torch.autograd.Function):
    """The forward routines as one function of the parameters, the backward routines as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *parameters: torch.Tensor) -> Any:
        program = run.placed._layout.step.program
        tensors = run.forward(with_backward=True)
        ctx.run = run
        assert program.trace.outputs is not None
        fixed = [t for i, t in enumerate(tensors) if i not in program.trace.outputs.tangents]
        ctx.mark_non_differentiable(*fixed)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        program = ctx.run.placed._layout.step.program
        found = ctx.run.backward(tangents)
        return (None, *(found[program.trace.states[p].name] for p, _ in program.trace.gradients))


def tensor_named(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer of that dotted name, if there is one."""
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    found = owner._parameters.get(last)
    return owner._buffers.get(last) if found is None else found


def bound(
    model: nn.Module, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors among the arguments by their path, checked against those captured.

    Raises:
        MismatchError: another argument, shape or dtype than captured.
    """
    from graphs.capture.trace import value_of

    leaves = argument_leaves(model, args, kwargs)
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    expected = program.trace.arguments
    for path in expected:
        if path not in tensors:
            raise MismatchError(f"argument {path!r} is missing; expected the arguments that were captured.")
    for path, tensor in tensors.items():
        if path not in expected:
            raise MismatchError(f"argument {path!r} was not there when the model was captured; capture it with it.")
        layout = value_of(expected[path]).layout
        if tensor.dtype != layout.dtype:
            raise MismatchError(f"argument {path!r} is {tensor.dtype}; expected {layout.dtype}, as captured.")
        if tuple(tensor.shape) != layout.shape:
            raise MismatchError(
                f"argument {path!r} has shape {tuple(tensor.shape)}; expected {layout.shape}, as captured."
            )
    for path, value in program.settings.items():
        if leaves.get(path) != value:
            raise MismatchError(
                f"argument {path!r} is {leaves.get(path)!r}; it was {value!r} when the model was captured."
            )
    return tensors


def draw(layout: Layout) -> dict[int, torch.Tensor]:
    """The random numbers of a step in program order, so that a seed gives what it gives without a placement."""
    step = layout.step
    found = {}
    for number, node in enumerate(step.graph.nodes):
        if node in step.random:
            found[number] = _drawn(node)
    return found


def _drawn(node: Any) -> torch.Tensor:
    arguments = [uninitialised(*a.args) if isinstance(a, torch.fx.Node) else a for a in node.args]
    result: torch.Tensor = node.target(*arguments, **node.kwargs)
    return result
