"""`Meter`: the work that a method which takes no budget may do.

Most heuristics take milliseconds. Those that may take seconds count their work between two steps (`charge`), by the
prices of `baselines.prices`, or have a compiled loop stopped from outside (`stopped_in_time`). Without a meter, as
where such a method is asked for by its name, all of these do nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from baselines.budget import WallLimit

_POLL_S = 0.02  # between two requests to a compiled loop to stop: it may overwrite the first


class OutOfTimeError(Exception):
    """A method has done all the work that it may do, and has not finished."""


@dataclass
class Meter:
    """Work of one method.

    Attributes:
        allowed_s: seconds of work, infinite for no end.
        used_s: of these.
        limit: of the clock, on top.
    """

    allowed_s: float = math.inf
    used_s: float = 0.0
    limit: WallLimit = field(default_factory=WallLimit)
    _is_stopped: bool = False

    def left_s(self) -> float:
        """Seconds of work left, 0 or more."""
        return 0.0 if self.is_stopped() else max(0.0, self.allowed_s - self.used_s)

    def stop(self) -> None:
        """Let nothing be left."""
        self._is_stopped = True

    def is_stopped(self) -> bool:
        """True if a loop has to end, however much work is left."""
        return self._is_stopped or self.limit.is_over()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block whose work this meter counts, in this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Meter] = ContextVar("meter")


def work_left_s() -> float:
    """Seconds of work left, infinite without a meter."""
    meter = _current.get(None)
    return math.inf if meter is None else meter.left_s()


def charge(seconds: float) -> None:
    """Count work that was done, or is to be done now.

    Raises:
        OutOfTimeError: nothing is left.
    """
    meter = _current.get(None)
    if meter is None:
        return
    meter.used_s += seconds
    if meter.left_s() <= 0:
        raise OutOfTimeError


@contextmanager
def stopped_in_time(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` when the meter is stopped, again and again until what runs inside has ended.

    For compiled loops that hold no Python lock.
    """
    meter = _current.get(None)
    if meter is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if meter.is_stopped():
                stop()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
