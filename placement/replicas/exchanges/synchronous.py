"""Synchronous data-parallel SGD: each update waits for the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.replicas.requests import Compute, Participant, Updated

if TYPE_CHECKING:
    from placement.replicas.role import MethodParts, Role


@dataclass(frozen=True)
class Synchronous:
    """All-reduce of gradients, then the same update in every worker."""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """None."""
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Never."""
        return None

    def participant(self, role: Role) -> Participant:
        """A worker."""
        weights, updater, compressor = role.start.clone(), role.updater(), role.compressor()
        version = 0
        while True:
            computed = yield Compute(weights, version)
            mean = yield from compressor.mean(computed.gradient, role.everybody)
            updater.update(weights, mean)
            version += 1
            yield Updated(version, weights=weights if role.number == 0 else None)
