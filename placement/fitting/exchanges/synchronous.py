"""Synchronous data-parallel SGD: each update waits for the mean gradient of all workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from placement.fitting.exchanges.refusals import with_arrival_rule
from placement.fitting.requests import Compute, Participant, Updated
from placement.fitting.role import MethodParts, Role, Updater


@dataclass(frozen=True)
class Synchronous:
    """All-reduce of gradients, then the same update in every worker."""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """None."""
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """An arrival rule: an all-reduce waits for all."""
        return with_arrival_rule("sync", method)

    def participant(self, role: Role) -> Participant:
        """A worker."""
        return synchronous_steps(role, role.start.clone(), role.updater(), count())


def synchronous_steps(role: Role, weights: Tensor, updater: Updater, versions: Iterable[int]) -> Participant:
    """Steps from weights of each of these versions to the next, in place, by the mean gradient of all workers."""
    compressor = role.compressor()
    for version in versions:
        computed = yield Compute(weights, version)
        mean = yield from compressor.mean(computed.gradient, role.everybody)
        updater.update(weights, mean)
        yield Updated(version + 1, weights=weights if role.number == 0 else None)
