"""`ModelWrapper` and `OpByOpWrapper`: what placed models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.in_process.methods import Methods
from placement.runtime.program.compiled_runs import Compile, compiler
from placement.runtime.program.layout import DeviceLayout
from placement.runtime.program.named_tensors import NamedTensors


class ModelWrapper(nn.Module):
    """A module that has the modules, parameters and buffers of a model under their own keys.

    What is none of these is looked up in the model itself.
    """

    _model: nn.Module
    _tensors: NamedTensors
    _frozen: list[str]  # parameters that were frozen when the model was placed

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)

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


class OpByOpWrapper(ModelWrapper):
    """A model that runs op by op, as placed; so do methods of its class, where they call the whole model."""

    _compile_run: Compile | None = None

    def __init__(self, model: nn.Module, layout: DeviceLayout) -> None:
        super().__init__(model)
        self._layout = layout
        self._methods = Methods(model)
        self._check_parameters()
        self._frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]

    def train(self, mode: bool = True) -> Self:
        """As of any module; evaluation captures inference when it first runs.

        Raises:
            MismatchError: training of a model that was placed for inference.
        """
        if mode and not self._layout.step.program.train:
            raise MismatchError("the model was placed for inference; capture it with train=True to train it.")
        return super().train(mode)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the ops of each device between two transfers under torch.compile, whose options it takes."""
        self._compile_run = compiler(**kwargs)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, MethodType) and found.__self__ is self.__dict__.get("_model"):
            return self._methods.bound(found, self)
        return found

    def _take_mode(self) -> None:
        """Be in the mode that the model is in, or in the only one that was placed."""
        if not self._layout.step.program.train:
            self.eval()

    def _check_parameters(self) -> None:
        trace = self._layout.step.program.trace
        known = {state.name for state in trace.states.values()}
        for name, parameter in self._model.named_parameters():
            if trace.gradients and parameter.requires_grad and name not in known:
                raise MismatchError(
                    f"parameter {name!r} shares its memory with another parameter; to tie them make them one "
                    "nn.Parameter, then capture and place the model."
                )
