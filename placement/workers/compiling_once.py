"""Kernels of a host are compiled by the first of its workers; the others wait, and load them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.zoo.cache import cache_dir

if TYPE_CHECKING:
    from placement.workers.runner import Preparing


def compiled_once(shared: Preparing) -> None:
    """Have what tasks call compiled, or loaded, one process of a user and host after the other."""
    folder = cache_dir()  # which nobody else can write to
    folder.mkdir(parents=True, exist_ok=True)
    with _in_turn(folder / f"compiling-{socket.gethostname()}"):  # the folder may be that of several hosts
        shared.prepare()


@contextmanager
def _in_turn(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks here: compiled more than once
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
