"""Memory that a process has freed: kept for the next step, or given back to the system and faulted in again."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
