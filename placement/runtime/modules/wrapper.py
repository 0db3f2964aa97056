"""`ModelWrapper` and `OpByOpWrapper`: what placed models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.modules.methods import Methods
from placement.runtime.program.compiled_runs import Compile, compiler
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.program.variants import is_number

if TYPE_CHECKING:
    from graphs.capture import Program


class ModelWrapper(nn.Module):
    """A module that has the modules, parameters and buffers of a model under their own keys.

    Everything else is looked up in the model itself.
    """

    _model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = model.__dict__[kind]
        self.__dict__["_model"] = model  # not as a submodule: its keys are this module's own
        self.training = model.training

    def train(self, mode: bool = True) -> Self:
        self._model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.load_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_model")
        if model is not None and is_number(model, name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)


class OpByOpWrapper(ModelWrapper):
    """A model that runs op by op, as placed; so do methods of its class, where they call the whole model.

    Args:
        program: as the model was captured.

    Raises:
        MismatchError: two parameters share their memory, or the model's next step is another one than that captured.
    """

    _tensors: NamedTensors
    _compile_run: Compile | None = None

    def __init__(self, model: nn.Module, program: Program) -> None:
        super().__init__(model)
        self._methods = Methods(model)
        _check_parameters(model, program)
        # Those that were frozen when the model was placed.
        self._frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, MethodType) and found.__self__ is self.__dict__.get("_model"):
            return self._methods.bound(found, self)
        return found

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the ops of each device between two transfers under torch.compile, whose options it takes."""
        self._compile_run = compiler(**kwargs)

    def _check_gradients(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for path, tensor in inputs.items():
            if tensor.requires_grad:
                raise MismatchError(
                    f"argument {path!r} wants a gradient; a placed model computes those of its parameters alone, so "
                    "detach it, or place the whole of the model."
                )
        for name in self._frozen:
            parameter = self._tensors.get(name)  # None where another rank has it
            if parameter is not None and parameter.requires_grad:
                raise MismatchError(f"parameter {name!r} was frozen when the model was placed; place it again.")


def _check_parameters(model: nn.Module, program: Program) -> None:
    if program.trace.unlike:
        raise MismatchError(
            f"{program.trace.unlike}, and a placement of ops repeats one step; place it on one device or under a "
            "strategy, which run the model itself, or make that a buffer that is written in place, or a tensor among "
            "forward's arguments."
        )
    known = {state.name for state in program.trace.states.values()}
    for name, parameter in model.named_parameters():
        if program.trace.gradients and parameter.requires_grad and name not in known:
            raise MismatchError(
                f"parameter {name!r} shares its memory with another parameter; to tie them make them one "
                "nn.Parameter, then capture and place the model."
            )
