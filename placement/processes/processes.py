"""Other processes of this host: looking at them, where the system shows them (Linux), and being one of several."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_STOPPED, _ENDED = "Tt", "ZX"


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be taken for another one.

    Attributes:
        system: which system's process numbers these are; empty where that cannot be told.
        number: its number there.
        started: clock tick at which it started.
    """

    system: str
    number: int
    started: int


def usable_cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def this_process() -> ProcessId:
    """The process that asks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        system = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ProcessId("", os.getpid(), 0)
    return ProcessId(system, os.getpid(), int(_fields(os.getpid())[19]))


def own_network() -> str:
    """A text that processes have in common which reach each other by the loopback interface."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(found)


def condition(process: ProcessId) -> str | None:
    """``"ended"``, ``"stopped"`` or ``"running"``; None for a process of another host."""
    if not process.system or process.system != this_process().system:
        return None
    try:
        fields = _fields(process.number)
    except OSError:
        return "ended"
    if int(fields[19]) != process.started or fields[0] in _ENDED:
        return "ended"
    return "stopped" if fields[0] in _STOPPED else "running"


def busy_s(process: ProcessId) -> float:
    """Seconds for which a process of this host has computed, or waited for a processor; 0 for one that has ended."""
    try:
        fields = _fields(process.number)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + queued_s(process.number)


def queued_s(number: int) -> float:
    """Seconds for which a process's first thread has waited for a processor; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{number}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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


def _fields(number: int) -> list[str]:
    """The fields of proc(5) for a process, from its state on: the name before it may hold spaces and brackets."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
