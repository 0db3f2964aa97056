"""numba's `njit` and `prange`, with a cache that always has a place.

Compiled functions are kept beside the source, or in the user's cache folder. Where neither can be written (a read-only
install in a container, say) numba refuses to compile at all; then they live in a folder of this process.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from numba import njit, prange
from numba.core import config

from graphs.disk import temporary_folder

__all__ = ["njit", "prange"]


def _probe() -> int:
    return 0


try:
    njit(cache=True)(_probe)
except RuntimeError:
    # Not a shared folder under a known name: numba unpickles what it finds in its cache.
    _stack = ExitStack()
    config.CACHE_DIR = str(_stack.enter_context(temporary_folder()))  # type: ignore[attr-defined]
    atexit.register(_stack.close)
