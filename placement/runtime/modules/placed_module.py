"""`PlacedModule`: the user's model with its ops on their devices, in one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from graphs.capture.record import Loss, argument_leaves
from graphs.errors import MismatchError
from placement.inputs.call_arguments import as_captured, check_data, check_tangents, tangent, tensors_of
from placement.runtime.modules.threads import StepTransfers, Team
from placement.runtime.modules.wrapper import OpByOpWrapper
from placement.runtime.program.compiled_runs import Compile, compiled_routines
from placement.runtime.program.derived_layout import nearest, same_ops
from placement.runtime.program.device_layout import DeviceLayout, Key
from placement.runtime.program.drawing import draw
from placement.runtime.program.named_tensors import NamedTensors, move_tensors
from placement.runtime.program.routines import Routines, compile_routines
from placement.runtime.program.variants import Variants


class PlacedModule(OpByOpWrapper):
    """A drop-in for the model: the same parameters, buffers, keys and outputs, each op on its device.

    Inputs of another batch size are captured when they first come, and so is evaluation of a model placed for training;
    its ops go where their parameters are. Outputs come back to the device of the first tensor among the arguments.
    """

    def __init__(self, model: nn.Module, layout: DeviceLayout, loss: Loss | None = None) -> None:
        super().__init__(model, layout.step.program)
        self._layout, self._loss = layout, loss
        self._team = Team(layout.places)
        self._tensors = NamedTensors(model)
        self._steps: dict[tuple[DeviceLayout, Compile | None], _Step] = {}
        self._variants = Variants(model, layout.step.program, layout, same_ops, nearest, loss)
        self._capturing = threading.RLock()  # while the model is captured, others must not read its parameters
        if not layout.step.program.train:  # the only mode that was placed
            self.eval()
        move_tensors(layout, self._tensors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = argument_leaves(self._model, args, kwargs)
        inputs = tensors_of(leaves)
        check_data(inputs)
        with self._capturing:
            step = self._step_for(args, kwargs, leaves)
            trace = step.layout.step.program.trace
            parameters = [self._tensors[trace.states[p].name] for p, _ in trace.gradients]
            if is_differentiated := step.layout.step.program.train and torch.is_grad_enabled():
                self._check_gradients(inputs)
        run = _Run(self, step, inputs)
        differentiable: Any = _Differentiable.apply
        tensors = differentiable(run, *parameters) if is_differentiated else run.forward(with_backward=False)
        assert trace.outputs is not None
        return trace.outputs.filled(tensors)

    def train(self, mode: bool = True) -> PlacedModule:
        """As of any module; evaluation captures inference when it first runs.

        Raises:
            MismatchError: training of a model that was placed for inference.
        """
        if mode and not self._layout.step.program.train:
            raise MismatchError("the model was placed for inference; capture it with train=True to train it.")
        super().train(mode)
        return self

    # -- as the model itself ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        copied = PlacedModule(copy.deepcopy(self._model, memo), self._layout, self._loss)
        copied._compile_run = self._compile_run
        copied.train(self.training)
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PlacedModule:
        """Leave the model where it was placed, whatever would move it to one device (``to``, ``cuda``).

        Raises:
            MismatchError: another dtype than captured.
        """
        for dtype in {state.dtype for state in self._tensors.all()}:
            made = fn(torch.empty(0, dtype=dtype))
            if made.dtype != dtype:
                raise MismatchError(
                    f"the model was captured with {dtype}, so it cannot become {made.dtype} once it is placed; convert "
                    "the model first, then capture and place it."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        move_tensors(self._layout, self._tensors)
        return self

    # -- what runs --------------------------------------------------------------------------------------------

    def _step_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any]) -> _Step:
        """The step for these arguments in the mode that the model is in."""
        layout = self._variants.get(args, kwargs, leaves, self.training)
        key = layout, self._compile_run
        if key not in self._steps:
            self._steps[key] = _Step(*key)
        return self._steps[key]


class _Step:
    """A layout and its code, without and with a backward pass."""

    def __init__(self, layout: DeviceLayout, compile_run: Compile | None) -> None:
        self.layout, self._compile_run = layout, compile_run
        self._compiled: dict[bool, Routines] = {}
        self.counters = {layout.step.state_of[node] for node in layout.step.counters}

    def routines(self, with_backward: bool) -> Routines:
        if with_backward not in self._compiled:
            layout = self.layout
            sections = [layout.forward(), layout.backward()] if with_backward else [layout.forward()]
            self._compiled[with_backward] = compiled_routines(compile_routines(layout, sections), self._compile_run)
        return self._compiled[with_backward]


class _Run:
    """One forward pass; `kept` names what its backward pass needs."""

    def __init__(self, placed: PlacedModule, step: _Step, inputs: Mapping[str, torch.Tensor]) -> None:
        self._placed, self._step, self._inputs = placed, step, inputs
        self._home = next((tensor.device for tensor in inputs.values()), None)
        self._drawn: dict[int, torch.Tensor] = {}
        self._given: list[dict[Key, Any]] = []
        self._kept: list[tuple[int, Key]] = []

    @property
    def layout(self) -> DeviceLayout:
        return self._step.layout

    def forward(self, with_backward: bool) -> list[torch.Tensor]:
        routines = self._step.routines(with_backward)
        self._exchange = StepTransfers(routines.transfers, self.layout.places)
        self._drawn = draw(self.layout.step, self._home or self.layout.places[0])
        self._given = self._placed._team.run(routines, 0, self._exchange, self._lookup)
        outputs = {key[1]: value for device in self._given for key, value in device.items() if key[0] == "output"}
        return [outputs[i] if self._home is None else outputs[i].to(self._home) for i in range(len(outputs))]

    def keep(self) -> list[torch.Tensor]:
        """Values that the backward pass needs, handed over to be saved."""
        kept = {
            (device, key): self._lookup(device, key)
            for device, routine in enumerate(self._step.routines(True).sections[1])
            for key in routine.takes
            if key[0] != "tangent"
        }
        self._kept = list(kept)
        self._given, self._drawn, self._inputs = [], {}, {}
        return list(kept.values())

    def backward(
        self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        found = dict(zip(self._kept, kept, strict=True))
        outputs = self.layout.step.program.trace.outputs
        assert outputs is not None
        check_tangents(outputs, tangents)

        def lookup(device: int, key: Key) -> Any:
            if key[0] == "tangent":
                return tangent(outputs, key[1], tangents[key[1]], self.layout.places[device])
            return found[device, key]

        given = self._placed._team.run(self._step.routines(True), 1, self._exchange, lookup)
        return {key[1]: value for device in given for key, value in device.items() if key[0] == "gradient"}

    def _lookup(self, device: int, key: Key) -> Any:
        kind, name = key
        place = self.layout.places[device]
        if kind == "state":
            return self._state(device, name)
        if kind == "input":
            return as_captured(self._inputs[name], self.layout.step.program.trace.arguments[name], place)
        if kind == "drawn":
            return self._drawn[name].to(place)
        return self._given[device][key]

    def _state(self, device: int, name: str) -> torch.Tensor:
        program = self.layout.step.program
        with self._placed._capturing:
            found = self._placed._tensors.get(name)
        if found is None:
            found = program.constants[name]
        place = self.layout.places[device]
        if self._step.counters and any(
            name in program.states[i].names and device != self.layout.home(i) for i in self._step.counters
        ):
            return found.to(place, copy=True)
        return found if found.device == place else found.to(place)


class _Differentiable(torch.autograd.Function):
    """The forward routines as one function of the parameters, the backward routines as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *parameters: torch.Tensor) -> Any:
        trace = run.layout.step.program.trace
        assert trace.outputs is not None
        tensors = run.forward(with_backward=True)
        kept = run.keep()
        ctx.run = run
        # So that autograd frees them, and notices when they have been changed in place.
        ctx.save_for_backward(*kept)
        tensors = _own_objects(tensors, (*parameters, *kept))
        ctx.mark_non_differentiable(*(t for i, t in enumerate(tensors) if not trace.outputs.is_differentiable(i)))
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        trace = ctx.run.layout.step.program.trace
        found = ctx.run.backward(ctx.saved_tensors, tangents)
        return (None, *(found[trace.states[p].name] for p, _ in trace.gradients))


def _own_objects(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as objects of their own, in which autograd may write down where they come from."""
    taken = {id(tensor) for tensor in others}
    found = []
    for tensor in tensors:
        own = tensor.detach() if id(tensor) in taken or isinstance(tensor, nn.Parameter) else tensor
        taken.add(id(own))
        found.append(own)
    return found
