"""`Variants`: the step that a placed model runs for what it is called with, the planned one or one derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from graphs.capture import capture_program
from graphs.capture.record import Loss
from graphs.capture.trace import value_of
from graphs.errors import CaptureError, MismatchError
from placement.inputs.call_arguments import check_batch, check_call, check_kinds, other_shape
from placement.runtime.program.derived_layout import nearest, same_ops
from placement.runtime.program.layout import DeviceLayout

_MODES = {True: "training", False: "evaluation"}


class Variants:
    """Layouts of a model by mode and shapes: other sizes have the ops of the planned step, evaluation has others.

    Args:
        model: what is captured.
        layout: the planned one.
        loss: it was captured with.
        lent: while the block runs, the model has all its parameters and buffers, on ``meta`` if need be.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: DeviceLayout,
        loss: Loss | None,
        lent: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model, self._layout, self._loss, self._lent = model, layout, loss, lent
        self._known: dict[Any, DeviceLayout] = {}
        used = set(layout.step.program.graph.modules)
        self._used = [(path, module) for path, module in model.named_modules() if path and path in used]

    def get(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any], is_training: bool
    ) -> DeviceLayout:
        """The layout for these arguments; ``leaves``: what is in them, by path.

        Raises:
            MismatchError: arguments that do not go with those captured, or modules in different modes.
        """
        for path, module in self._used:
            if module.training != is_training:
                raise MismatchError(
                    f"module {path!r} is in {_MODES[module.training]} mode while the model is in "
                    f"{_MODES[is_training]} mode; a placed model has one mode, set by its own train() or eval()."
                )
        is_other_mode = is_training != self._layout.step.program.train
        shapes = tuple((path, leaf.shape) for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor))
        settings = tuple((path, repr(leaf)) for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))
        key = (is_other_mode, shapes, settings if is_other_mode else ())
        if key not in self._known:
            self._known[key] = self._captured(args, kwargs, leaves, is_other_mode)
        check_kinds(self._known[key].step.program, leaves)
        return self._known[key]

    def _captured(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any], is_other_mode: bool
    ) -> DeviceLayout:
        check_call(self._model, args, kwargs)
        program = self._layout.step.program
        name = program.graph.name
        if is_other_mode:
            with self._lent():
                captured = capture_program(self._model, args, kwargs, train=False, name=name)
            return nearest(captured, self._layout)
        check_kinds(program, leaves)
        check_batch(program, leaves)
        if all(leaves[path].shape == value_of(node).layout.shape for path, node in program.trace.arguments.items()):
            return self._layout
        try:
            with self._lent():
                captured = capture_program(self._model, args, kwargs, train=program.train, loss=self._loss, name=name)
            return same_ops(captured, self._layout)
        except (CaptureError, MismatchError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise MismatchError(f"{other_shape(program, leaves)}, and for these shapes {reason}.") from error
