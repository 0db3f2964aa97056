"""Portions of a batch, and who works on which."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count


class Portions:
    """Portions of one batch: each is handed out once; those still under way then go to whoever is free, too."""

    def __init__(self, number: int) -> None:
        self._open = deque(range(number))
        self._orders = count()
        self._last_order: dict[int, int] = {}  # of each portion that was handed out, when it was last
        self._given: dict[int, int] = {}  # the portion of each busy worker
        self._done_by: defaultdict[int, set[int]] = defaultdict(set)

    def next_for(self, worker: int) -> int | None:
        """A portion for a free worker: a new one, or the one that was handed out longest ago; None: all are done."""
        if self._open:
            portion = self._open.popleft()
        else:
            under_way = self._last_order.keys() - self._done()
            if not under_way:
                return None
            portion = min(under_way, key=self._last_order.__getitem__)
        self._last_order[portion] = next(self._orders)
        self._given[worker] = portion
        return portion

    def finish(self, worker: int) -> None:
        """A worker has sent its result."""
        self._done_by[worker].add(self._given.pop(worker))

    def lose(self, worker: int) -> None:
        """A worker died. Its portions are done again, since nobody knows which results it still sent."""
        theirs = self._done_by.pop(worker, set())
        if worker in self._given:
            theirs.add(self._given.pop(worker))
        self._open.extend(sorted(theirs - set(self._given.values()) - self._done()))

    def _done(self) -> set[int]:
        return set[int]().union(*self._done_by.values())
