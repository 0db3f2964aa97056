"""Portions of a batch, and who works on which."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count


class Portions:
    """Portions of one batch, each handed out once, and once more when it is slow.

    A portion is slow once another is done that was handed out later: whoever is free then does it, too.
    """

    def __init__(self, number: int) -> None:
        self._open = deque(range(number))
        self._orders = count()
        self._last_order: dict[int, int] = {}  # of each portion that was handed out, when it was last
        self._given: dict[int, int] = {}  # the portion of each busy worker
        self._done_by: defaultdict[int, set[int]] = defaultdict(set)
        self._newest_done = -1

    def next_for(self, worker: int) -> int | None:
        """A portion for a free worker; None: there is nothing to do for it now."""
        if self._open:
            portion = self._open.popleft()
        else:
            done = set[int]().union(*self._done_by.values())
            slow = [(at, each) for each, at in self._last_order.items() if each not in done and at < self._newest_done]
            if not slow:
                return None
            _, portion = min(slow)
        self._last_order[portion] = next(self._orders)
        self._given[worker] = portion
        return portion

    def finish(self, worker: int) -> None:
        """A worker has sent its result."""
        portion = self._given.pop(worker)
        self._done_by[worker].add(portion)
        self._newest_done = max(self._newest_done, self._last_order[portion])

    def lose(self, worker: int) -> None:
        """A worker died. Its portions are done again, since nobody knows which results it still sent."""
        theirs = self._done_by.pop(worker, set())
        if worker in self._given:
            theirs.add(self._given.pop(worker))
        others = set(self._given.values()).union(*self._done_by.values())
        self._open.extend(sorted(theirs - others))
