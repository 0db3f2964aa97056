"""Processes of this host: the cores they may use, how they end, and being one of several."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn


def usable_cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def own_network() -> str:
    """A text that processes have in common which reach each other by the loopback interface."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(found)


def how_ended(code: int) -> str:
    """An exit code as Python has it in words: negative where a signal has ended the process."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextmanager
def orderly_end() -> Iterator[None]:
    """While the block runs, SIGTERM unwinds the stack, so that the processes and files it has made go with it.

    The process says so, and ends as the shell reports a signal: with 128 and its number.
    """
    is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    # The descriptor itself: what the signal has interrupted may be a write to sys.stderr.
    with suppress(OSError):
        os.write(2, b"placement: ended by SIGTERM, and with it all processes it has started.\n")
    sys.exit(128 + number)


@contextmanager
def forking() -> Iterator[None]:
    """Forks made meanwhile take nothing of this process for garbage.

    To take down a process group or a store means to wait for threads that only this process has.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def begin_worker(parent: int) -> None:
    """Live and die with the process that started this one: it answers Ctrl-C, and its end is the end of this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)
