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
        ranks: processes that ran the strategy on a smaller model, whose numbers were equal; 0: none.
        smaller: what was smaller, in words.
        compared: which numbers, in words.
        ops: where none ran, how many kinds of ops were computed in parts and as a whole, and were equal.
        not_computed: how many could not be.
        problem: why the strategy is not to be advised; "" where nothing was found.
        reason: why nothing could be checked; "" where it was.
    """

    ranks: int = 0
    smaller: str = ""
    compared: str = ""
    ops: int = 0
    not_computed: int = 0
    problem: str = ""
    reason: str = ""

    @property
    def words(self) -> str:
        """Words for people."""
        if self.reason:
            return f"not checked: {self.reason}"
        if self.ranks:
            model = f"a smaller model ({self.smaller})" if self.smaller else "the model"
            ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
            return f"checked by running {ranks} on {model}: {self.compared} equal"
        more = f", {self.not_computed} more could not be computed" if self.not_computed else ""
        return f"checked by computing: {self.ops} ops in parts{more}"


Check = Callable[[OpGraph, Cluster, Result], Checked]  # of a result with a strategy, for a graph before it


def unchecked(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
    """No check."""
    return Checked(reason="nobody asked for it")
