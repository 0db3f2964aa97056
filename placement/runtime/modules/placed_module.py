"""`PlacedModule`: the user's model with its ops on their devices, in one process."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from graphs.capture.record import Loss, argument_leaves
from graphs.errors import MismatchError
from placement.inputs.call_arguments import as_captured, check_data, check_tangents, tangent, tensors_of
from placement.runtime.modules.wrapper import OpByOpWrapper
from placement.runtime.program.compiled_runs import Compile, compiled_routines
from placement.runtime.program.device_layout import DeviceLayout, Key, nearest, same_ops
from placement.runtime.program.functional import draw
from placement.runtime.program.routines import Routine, Routines, Transfer, compile_routines
from placement.runtime.program.variants import NamedTensors, Variants, move_tensors


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


# -- threads -----------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Another device has failed, so a transfer will never come."""


_STOP = object()


class StepTransfers:
    """The transfers of one step, on their way from thread to thread."""

    def __init__(self, transfers: Mapping[int, Transfer], places: Sequence[torch.device]) -> None:
        self._boxes: dict[int, queue.SimpleQueue[Any]] = {tag: queue.SimpleQueue() for tag in transfers}
        self._target = {tag: places[transfer.target] for tag, transfer in transfers.items()}

    def expect(self, tag: int) -> None:
        """Nothing to prepare: the sender brings it."""

    def receive(self, tag: int) -> torch.Tensor:
        found = self._boxes[tag].get()
        if found is _STOP:
            raise _Stopped
        tensor: torch.Tensor
        tensor, copied = found
        if copied is not None and tensor.is_cuda:
            # The next computation on the device waits, not the thread that feeds it.
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(copied)
            tensor.record_stream(stream)
        elif copied is not None:
            copied.synchronize()
        return tensor

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        self._boxes[tag].put(moved(tensor, self._target[tag]))

    def stop(self) -> None:
        """Wake up whoever waits."""
        for box in self._boxes.values():
            box.put(_STOP)


def moved(tensor: torch.Tensor, place: torch.device) -> tuple[torch.Tensor, Any]:
    """The tensor on its way to another place, and an event that says when it is there (None: at once)."""
    if tensor.device == place:
        return tensor, None
    if tensor.device.type != "cuda" and place.type != "cuda":
        return tensor.to(place), None
    # On a stream of its own, after what has been computed so far, while the device goes on computing.
    with torch.cuda.device(place if place.type == "cuda" else tensor.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if tensor.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            moved = tensor.to(place, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    return moved, event


class Team:
    """One thread for each device but the first, whose routine runs in the caller's own."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        self.places = tuple(places)
        n_cpus = sum(place.type == "cpu" for place in places)
        self._threads = max(1, torch.get_num_threads() // max(1, n_cpus))
        self._starting = threading.Lock()
        self._pool = ThreadPoolExecutor(
            max(1, len(places) - 1), "device", initializer=torch.set_num_threads, initargs=(self._threads,)
        )

    def run(
        self, routines: Routines, section: int, exchange: StepTransfers, lookup: Callable[[int, Key], Any]
    ) -> list[dict[Key, Any]]:
        """Run a section on all devices; the results of each device, by key.

        Args:
            lookup: the value of each key that a device takes.

        Raises:
            Exception: what the first device that failed raised.
        """
        work = list(enumerate(routines.sections[section]))
        # All before anything runs: one device may write what it shares with another.
        taken = [[lookup(device, key) for key in routine.takes] for device, routine in work]
        is_inference = torch.is_inference_mode_enabled()
        with self._starting:  # of two calls at once one gets its threads first, or each waits for the other's
            waiting = [self._pool.submit(self._one, *item, exchange, taken, is_inference) for item in work[1:]]
        first: Future[dict[Key, Any]] = Future()
        n_threads = torch.get_num_threads()
        try:
            if n_threads != self._threads:
                torch.set_num_threads(self._threads)
            first.set_result(self._one(*work[0], exchange, taken, is_inference))
        except Exception as error:
            first.set_exception(error)
        except BaseException:
            exchange.stop()
            wait(waiting)
            raise
        finally:
            if n_threads != self._threads:
                torch.set_num_threads(n_threads)
        done = [first, *waiting]
        wait(done)
        failures = [failure for future in done if (failure := future.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
            raise failure
        return [future.result() for future in done]

    def _one(
        self, device: int, routine: Routine, exchange: StepTransfers, taken: list[list[Any]], is_inference: bool
    ) -> dict[Key, Any]:
        place = self.places[device]
        values, taken[device] = taken[device], []
        try:
            with _current(place), torch.inference_mode() if is_inference else torch.no_grad(), _no_autocast(place):
                given = routine.run(exchange, *values)
        except BaseException:
            exchange.stop()
            raise
        return dict(zip(routine.gives, given, strict=True))


def _current(place: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def _no_autocast(place: torch.device) -> AbstractContextManager[Any]:
    """The casts of a captured program are in it."""
    if torch.is_autocast_enabled(place.type):
        return torch.autocast(place.type, enabled=False)
    return nullcontext()
