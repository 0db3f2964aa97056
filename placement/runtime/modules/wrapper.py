"""`ModelWrapper` and `OpByOpWrapper`: what placed models have in common."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphs.errors import MismatchError
from placement.runtime.program.compiled_runs import Compile, compiler
from placement.runtime.program.variants import NamedTensors, is_number

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


# -- methods of the model's class --------------------------------------------------------------------------------------


class Methods:
    """Runs methods of a model while the model's own call is the placed one.

    In the thread that runs one, ``self(...)`` and ``self.forward(...)`` call the placed model, and a module inside that
    the method calls by itself, which would run past the placement, is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._running = 0  # methods, over all threads
        self._handles: list[RemovableHandle] = []
        self._saved: dict[str, Any] = {}
        self._here = threading.local()

    def bound(self, method: MethodType, placed: Callable[..., Any]) -> Callable[..., Any]:
        """The method for callers of the placed model."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._diverted(method.__name__, placed):
                found = method(*args, **kwargs)
            return self._steps(found, method.__name__, placed) if inspect.isgenerator(found) else found

        return run

    def _steps(self, generator: Iterator[Any], name: str, placed: Callable[..., Any]) -> Iterator[Any]:
        end = object()
        while True:
            with self._diverted(name, placed):
                item = next(generator, end)
            if item is end:
                return
            yield item

    @contextmanager
    def _diverted(self, name: str, placed: Callable[..., Any]) -> Iterator[None]:
        before = getattr(self._here, "method", None)
        self._here.method = (name, placed)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._here.method = before

    def _count(self, change: int) -> None:
        """Methods begin or end; the model is changed by the first and given back by the last."""
        with self._lock:
            before, self._running = self._running, self._running + change
            if not before:
                self._divert()
            elif not self._running:
                self._give_back()

    def _divert(self) -> None:
        own = self._model.__dict__
        self._saved = {name: own[name] for name in ("forward", "_compiled_call_impl") if name in own}
        own["forward"] = self._through(self._model.forward)
        own["_compiled_call_impl"] = self._through(own.get("_compiled_call_impl") or self._model._call_impl)
        for path, module in self._model.named_modules():
            if path:
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._refuse, path)))

    def _give_back(self) -> None:
        for name in ("forward", "_compiled_call_impl"):
            del self._model.__dict__[name]
        self._model.__dict__.update(self._saved)
        while self._handles:
            self._handles.pop().remove()

    def _through(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the placed model, the model given back meanwhile; the plain call where no method runs."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            method = getattr(self._here, "method", None)
            if method is None:
                return plain(*args, **kwargs)
            self._here.method = None
            self._count(-1)
            try:
                return method[1](*args, **kwargs)
            finally:
                self._count(1)
                self._here.method = method

        return call

    def _refuse(self, path: str, module: nn.Module, args: Any) -> None:
        method = getattr(self._here, "method", None)
        if method is not None:
            raise MismatchError(
                f"{type(self._model).__name__}.{method[0]}() calls module {path!r} by itself, which would run past the "
                "placement: only calls of the whole model are placed; place a module of your own whose forward calls "
                f"model.{method[0]}()."
            )
