"""Processes of this host: the cores they may use, how they end, and being one of several."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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


_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def keep_to_loopback() -> None:
    """Let groups of gloo and NCCL that this process makes listen on the loopback interface: they ask nobody who he is.

    ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` name another one.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _INTERFACE)


LOOKS = 16  # in a row, after which a process counts as stopped


class StoppedProcesses:
    """Children of this process, by rank; what is no child of it (0) is not looked at.

    Args:
        pids: process ids by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._looks = [0] * len(pids)
        self._pids = pids

    def look(self) -> int | None:
        """Look once: the first rank that has been stopped for so many looks in a row, None for nobody."""
        for rank, pid in enumerate(self._pids):
            self._looks[rank] = self._looks[rank] + 1 if pid and _is_stopped(pid) else 0
        return next((rank for rank, looks in enumerate(self._looks) if looks >= LOOKS), None)


def _is_stopped(pid: int) -> bool:
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except (AttributeError, ChildProcessError):  # a system without it; or it has ended meanwhile
        return False
    return found is not None


def own_version() -> str:
    """The installed version; "uninstalled" where the packages run from a clone, by ``PYTHONPATH``."""
    try:
        return version("placement")
    except PackageNotFoundError:
        return "uninstalled"


# -- memory that is kept -----------------------------------------------------------------------------------------------


# Numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Usage:
    """Work of the system for this process.

    Attributes:
        faults: page faults that needed no disk; about one for each page that is touched for the first time.
        system_s: processor time inside the system.
    """

    faults: float
    system_s: float

    @classmethod
    def now(cls) -> Usage:
        """Since the process began."""
        import resource  # Windows has none

        found = resource.getrusage(resource.RUSAGE_SELF)
        return cls(found.ru_minflt, found.ru_stime)

    def since(self, before: Usage, steps: int = 1) -> Usage:
        """In each of some steps."""
        return Usage((self.faults - before.faults) / steps, (self.system_s - before.system_s) / steps)


def peak_bytes() -> int:
    """The most memory that this process ever had, Python and libraries with it, or since `forget_peak`."""
    with suppress(OSError):  # what getrusage says begins with the peak of the process that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Give the system what is free now, and let `peak_bytes` begin anew, where the system has a way (Linux).

    Memory that is kept from then on is kept as before.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def keep_freed_memory() -> bool:
    """Have this process keep freed memory for its next allocations; returns whether it will.

    glibc maps large tensors one by one and unmaps them when they are freed, so that every step faults all of its pages
    in again, which can take as long as the step itself. From now on memory comes from the heap, which never shrinks.
    Other systems' allocators are left as they are.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
