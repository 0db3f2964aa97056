"""Methods of the user's own class on a placed model, such as ``generate``: what they run goes through the placement."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from graphs.errors import MismatchError


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
