"""`StoppedProcesses`: looks for processes that a signal has stopped, which would be waited for for ever."""

from __future__ import annotations

import os
from collections.abc import Sequence

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
