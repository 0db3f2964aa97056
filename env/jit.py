"""numba's `njit` and `prange`, with a cache that always has a place.

Compiled functions are kept beside the source, or in the user's cache folder. Where neither can be written (a read-only
install in a container, say) numba refuses to compile at all; then they live in a folder of this process.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile

from numba import njit, prange
from numba.core import config

__all__ = ["njit", "prange"]


def _probe() -> int:
    return 0


try:
    njit(cache=True)(_probe)
except RuntimeError:
    # Not a shared folder under a known name: numba unpickles what it finds in its cache.
    _folder = tempfile.mkdtemp(prefix="placement-")
    config.CACHE_DIR = _folder  # type: ignore[attr-defined]
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
