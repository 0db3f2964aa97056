"""numba's `njit` and `prange`, with a cache that always has a place, and word of what is compiled.

Compiled functions are kept beside the source, or in the user's cache folder. Where neither can be written (a read-only
install in a container, say) numba refuses to compile at all; then they live in a folder of this process.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Any

from numba import njit, prange
from numba.core import config, event

from env import compiling
from graphs.disk import temporary_folder

__all__ = ["SHARED_CACHE", "njit", "prange"]

SHARED_CACHE = True  # whether another process would find what this one compiles


def _probe() -> int:
    return 0


try:
    njit(cache=True)(_probe)
except RuntimeError:
    # Not a shared folder under a known name: numba unpickles what it finds in its cache.
    _stack = ExitStack()
    config.CACHE_DIR = str(_stack.enter_context(temporary_folder()))  # type: ignore[attr-defined]
    atexit.register(_stack.close)
    SHARED_CACHE = False


class _Reporter(event.Listener):
    """Reports the functions that are called from Python, not those that they call in turn."""

    def __init__(self) -> None:
        self._depth = 0

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            function = event.data["dispatcher"].py_func
            compiling.report(f"{function.__module__}.{function.__name__}")

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            compiling.report("")


event.register("numba:compile", _Reporter())  # type: ignore[no-untyped-call]
