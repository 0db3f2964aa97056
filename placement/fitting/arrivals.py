"""Workers that an update of a parameter server waits for: all, the first N, or none that is not too far behind."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from graphs.formatting import counted


class _Fresh:
    """An update takes so many gradients at the current weights; sub-classes say how many."""

    def share(self, workers: int) -> int:
        """Number of gradients of an update."""
        raise NotImplementedError

    def least(self, workers: int) -> int:
        """One worker for each gradient of an update."""
        return self.share(workers)

    def is_taken(self, read: int, now: int) -> bool:
        """Whether the gradient is of the current weights."""
        return read == now

    def released(self, waiting: Set[int], steps: Mapping[int, int], workers: int) -> Set[int]:
        """All waiting workers, once they are enough."""
        return waiting if len(waiting) >= self.share(workers) else set()


@dataclass(frozen=True)
class WaitForAll(_Fresh):
    """An update waits for every worker."""

    def refuse(self, workers: int) -> str | None:
        return None

    def share(self, workers: int) -> int:
        return workers


@dataclass(frozen=True)
class FirstOf(_Fresh):
    """An update takes the first N of N + b gradients; later ones are dropped.

    Backup workers: Chen et al. 2016, "Revisiting distributed synchronous SGD", algorithms 3 and 4. A worker that comes
    too late begins its next step with the current weights.

    Attributes:
        extra: b, how many of the workers are backups. 0 waits for all.
    """

    extra: int = 1

    def refuse(self, workers: int) -> str | None:
        """A number that leaves no worker."""
        if 0 <= self.extra < workers:
            return None
        return (
            f"first:extra={self.extra} is out of range: of {counted(workers, 'worker')}, at most {workers - 1} can be "
            "backups; choose fewer."
        )

    def share(self, workers: int) -> int:
        return workers - self.extra


@dataclass(frozen=True)
class BoundedStaleness:
    """A worker begins no step that is more than `bound` steps ahead of one that another has still to finish.

    Stale synchronous parallel: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
    parameter server". Each gradient counts as its share of a global batch, at once; with a bound of 0 all gradients of
    a step are one update, as with all-reduce.

    Attributes:
        bound: of the staleness, in steps.
    """

    bound: int = 4

    def refuse(self, workers: int) -> str | None:
        """A bound below 0."""
        return None if self.bound >= 0 else f"stale:bound={self.bound} is out of range; choose 0 or more."

    def share(self, workers: int) -> int:
        return workers

    def least(self, workers: int) -> int:
        """One: a lost worker is waited for no more."""
        return 1

    def is_taken(self, read: int, now: int) -> bool:
        return True

    def released(self, waiting: Set[int], steps: Mapping[int, int], workers: int) -> Set[int]:
        """Workers that are not too far ahead of the slowest."""
        slowest = min(steps.values())
        return {worker for worker in waiting if steps.get(worker, slowest) - slowest <= self.bound}
