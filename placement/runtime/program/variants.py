"""`Variants`: the step that a placed model runs for what it is called with, the planned one or one derived from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from graphs.capture import Program, capture_program
from graphs.capture.record import Loss
from graphs.capture.trace import value_of
from graphs.errors import CaptureError, MismatchError
from placement.inputs.call_arguments import check_batch, check_call, check_kinds, other_shape

if TYPE_CHECKING:
    from placement.runtime.program.device_layout import DeviceLayout


Planned = TypeVar("Planned")
_MODES = {True: "training", False: "evaluation"}


def is_number(module: nn.Module, name: str) -> bool:
    """True if a module has a number of that name that its code reads, such as the share that a dropout drops."""
    return type(vars(module).get(name)) in (bool, int, float) and name != "training"


class Variants(Generic[Planned]):
    """The plans of a model by mode and shapes: other sizes have the ops of the planned step, evaluation has others.

    Args:
        model: what is captured.
        program: the step that was planned.
        planned: its plan.
        same_ops, nearest: the plan of a program of the same ops, and of one of other ops.
        loss: the model was captured with.
        lent: while the block runs, the model has all its parameters and buffers, on ``meta`` if need be.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        planned: Planned,
        same_ops: Callable[[Program, Planned], Planned],
        nearest: Callable[[Program, Planned], Planned],
        loss: Loss | None = None,
        lent: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model, self._program, self._planned = model, program, planned
        self._same_ops, self._nearest = same_ops, nearest
        self._loss, self._lent = loss, lent
        self._known: dict[Any, tuple[Program, Planned]] = {}
        # What a trainer may set between steps, such as the share that a dropout drops, as it was captured.
        self._numbers = [
            (vars(module), f"{path}.{name}" if path else name, name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if is_number(module, name)
        ]
        used = set(program.graph.modules)
        self._used = [(path, module) for path, module in model.named_modules() if path and path in used]

    def get(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any], is_training: bool
    ) -> Planned:
        """The plan for these arguments; ``leaves``: what is in them, by path.

        Raises:
            MismatchError: arguments that do not go with those captured, or modules in different modes.
        """
        is_other_mode = is_training != self._program.train
        others = frozenset(path for path, module in self._used if module.training != is_training)
        if others and not is_training:
            raise MismatchError(
                f"module {min(others)!r} is in training mode while the model is in evaluation mode; a placed model is "
                "evaluated as a whole, set its mode by its own train() or eval()."
            )
        modes = others if is_training and others != self._program.trace.evaluated & {p for p, _ in self._used} else None
        changed = tuple(
            (path, own[name]) for own, path, name, value in self._numbers if name in own and own[name] != value
        )
        shapes = tuple((path, leaf.shape) for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor))
        settings = tuple((path, repr(leaf)) for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))
        key = (is_other_mode, shapes, settings if is_other_mode else (), modes, changed)
        if key not in self._known:
            what = [f"{path} is {now}" for path, now in changed]
            what += [] if modes is None else ["other modules than then are in evaluation mode"]
            self._known[key] = self._captured(args, kwargs, leaves, is_other_mode, " and ".join(what))
        program, found = self._known[key]
        check_kinds(program, leaves)
        return found

    def _captured(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Mapping[str, Any],
        is_other_mode: bool,
        what: str,
    ) -> tuple[Program, Planned]:
        """A step for these arguments; ``what``: the model has of Python's numbers that it had not when captured."""
        check_call(self._model, args, kwargs)
        program = self._program
        name, precision = program.graph.name, program.graph.origin.precision
        if is_other_mode:
            with self._lent():
                captured = capture_program(self._model, args, kwargs, train=False, precision=precision, name=name)
            return captured, self._nearest(captured, self._planned)
        check_kinds(program, leaves)
        check_batch(program, leaves)
        if not what and all(
            leaves[path].shape == value_of(node).layout.shape for path, node in program.trace.arguments.items()
        ):
            return program, self._planned
        try:
            with self._lent():
                captured = capture_program(
                    *(self._model, args, kwargs, program.train), loss=self._loss, precision=precision, name=name
                )
            return captured, self._same_ops(captured, self._planned)
        except (CaptureError, MismatchError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            if what:
                raise MismatchError(f"{what}, unlike when the model was placed, and with that {reason}.") from error
            raise MismatchError(f"{other_shape(program, leaves)}, and for these shapes {reason}.") from error


class NamedTensors:
    """The parameters and buffers of a model by name, each path walked once; always the tensor that is there now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners: dict[str, tuple[Mapping[str, torch.Tensor | None], str]] = {}

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, None if there is none."""
        if name not in self._owners:
            path, _, last = name.rpartition(".")
            try:
                module = self._model.get_submodule(path)
            except AttributeError:
                return None
            owners: list[Mapping[str, torch.Tensor | None]] = [module._parameters, module._buffers]
            owner = next((tensors for tensors in owners if last in tensors), None)
            if owner is None:
                return None
            self._owners[name] = owner, last
        tensors, last = self._owners[name]
        return tensors.get(last)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def all(self) -> Iterator[torch.Tensor]:
        """Every parameter and buffer."""
        yield from self._model.parameters()
        yield from self._model.buffers()


def move_tensors(layout: DeviceLayout, tensors: NamedTensors) -> None:
    """Every parameter and buffer to its device, staying the object it is; what shares memory goes on sharing it.

    Raises:
        MismatchError: one of them has no data.
    """
    moved: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
    for index, state in enumerate(layout.step.program.states):
        place = layout.places[layout.home(index)]
        for name in state.names:
            tensor = tensors.get(name)
            if tensor is None or tensor.device == place:
                continue
            if tensor.is_meta:
                raise MismatchError(f"{name!r} is on meta, without data; load the weights before placing the model.")
            storage = tensor.untyped_storage()
            key = storage._cdata, place
            if key not in moved:
                raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                moved[key] = raw.to(place).untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device=place)
            tensor.data = empty.set_(moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())
