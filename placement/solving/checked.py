"""`Checked`: what is known of a strategy before it is advised: can it be carried out, and are its numbers right?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from env.cluster import Cluster
from graphs.opgraph import OpGraph
from placement.results.result import Result


@dataclass(frozen=True)
class Checked:
    """The outcome of a check.

    Attributes:
        uses: how many kinds of calls on parts were computed, whole and in parts, and were equal.
        not_computed: how many could not be.
        problem: why the strategy is not to be advised; "" where nothing was found.
        reason: why nothing could be checked; "" where it was.
    """

    uses: int = 0
    not_computed: int = 0
    problem: str = ""
    reason: str = ""

    @property
    def words(self) -> str:
        """Words for people."""
        if self.reason:
            return f"not checked by computing: {self.reason}"
        more = f", {self.not_computed} more could not be computed" if self.not_computed else ""
        return f"checked by computing: {self.uses} uses{more}"


Check = Callable[[OpGraph, Cluster, Result], Checked]  # of a result with a strategy, for a graph before it


def unchecked(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
    """No check."""
    return Checked(reason="nobody asked for it")
