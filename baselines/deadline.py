"""`Deadline`: when a method that takes no budget must end.

Most heuristics take milliseconds. Those that may take seconds look at the clock between two steps (`check_time`), or
have a compiled loop stopped from outside (`stopped_in_time`). Without a deadline, as where such a method is asked for
by its name, both do nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_POLL_S = 0.02  # between two requests to a compiled loop to stop: it may overwrite the first


class OutOfTimeError(Exception):
    """A method has not finished before its deadline."""


@dataclass
class Deadline:
    """An instant by `time.monotonic`, infinite for none; it may be brought forward while a method runs."""

    at_s: float = math.inf

    @staticmethod
    def after(seconds: float) -> Deadline:
        """So long from now."""
        return Deadline(time.monotonic() + seconds)

    def left_s(self) -> float:
        """Seconds left, 0 or more."""
        return max(0.0, self.at_s - time.monotonic())

    def bring_forward(self) -> None:
        """Let it be now."""
        self.at_s = -math.inf

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block that keeps to this deadline, in this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Deadline] = ContextVar("deadline")


def time_left_s() -> float:
    """Seconds until the deadline, infinite where there is none."""
    deadline = _current.get(None)
    return math.inf if deadline is None else deadline.left_s()


def check_time() -> None:
    """Go on only before the deadline.

    Raises:
        OutOfTimeError: it is over.
    """
    if time_left_s() <= 0:
        raise OutOfTimeError


@contextmanager
def stopped_in_time(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` when the deadline is over, again and again until what runs inside has ended.

    For compiled loops that hold no Python lock.
    """
    deadline = _current.get(None)
    if deadline is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if deadline.left_s() <= 0:
                stop()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
