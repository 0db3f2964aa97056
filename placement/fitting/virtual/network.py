"""A cluster's links in virtual time: a transfer holds its whole route, first come, first served (docs/score.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from env.cluster import Cluster


@dataclass(eq=False)
class VirtualNetwork:
    """Times at which the links of a cluster are free again. Transfers are asked for in order of time.

    Attributes:
        cluster: whose routes are taken.
        free_s: of each link that has carried a transfer, when the last one ends.
    """

    cluster: Cluster
    free_s: dict[int, float] = field(default_factory=dict)

    def arrival_s(self, source: int, target: int, size: int, now_s: float) -> float:
        """Arrival of `size` bytes that are sent now, between two devices by number."""
        if source == target:
            return now_s
        route = self.cluster.routes[source, target]
        exclusive = [link for link in route.links if self.cluster.links[link].exclusive]
        begin_s = max([now_s, *(self.free_s.get(link, 0.0) for link in exclusive)])
        end_s = begin_s + route.latency_s + size / route.bandwidth_bytes_per_s
        self.free_s.update(dict.fromkeys(exclusive, end_s))
        return end_s
