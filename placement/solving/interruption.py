"""Ctrl-C: between two updates of a policy, never inside one; and under its own name where compiled code met it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C instead of raising; the second raises KeyboardInterrupt as ever.

    Does nothing outside the main thread, where signals never arrive, or where the program has a handler of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def is_interruption(error: BaseException) -> bool:
    """Whether an error comes of Ctrl-C.

    In a compiled function that gives arrays back, Python code runs on its way out, and what interrupts that becomes the
    cause of a `SystemError`.
    """
    found: BaseException | None = error
    while isinstance(found, SystemError):
        found = found.__cause__
    return isinstance(found, KeyboardInterrupt)


@contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """Raise a Ctrl-C that compiled code made a `SystemError` of as `KeyboardInterrupt`; a decorator, too."""
    try:
        yield
    except SystemError as error:
        if is_interruption(error):
            raise KeyboardInterrupt from error
        raise
