"""Listeners to numba's compiling, which takes seconds, once; loads no compiler itself.

`env.jit` reports here. A command that shows progress listens, and says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]  # called with what is being compiled, and with "" when that is done

_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have the listener called while the block runs; what is loaded from the cache is not reported."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(what: str) -> None:
    """Tell every listener."""
    for listener in tuple(_listeners):
        listener(what)
