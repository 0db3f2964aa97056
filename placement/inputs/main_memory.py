"""Main memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Main memory that processes may still take, by the system's count and the limit of the control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path("/sys/fs/cgroup", f"memory.{key}").read_text().strip() for key in ("max", "current"))
        found += [int(limit) - int(used)] if limit != "max" else []
    except OSError:
        pass
    return max(1, min(found))
