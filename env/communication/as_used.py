"""`AsUsed`: what a cluster's figures say of collectives, measured ones or those of its fabric, and of no algorithm.

Three numbers count for groups of ranks that communicate side by side: how many ranks each has, on how many hosts, and
what the ports between hosts leave to the ranks of one host. A port is the slowest link of a route from one host to
another; where ranks of several groups go through the same one they share it, as strided groups do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from env.fabric import Fabric
from graphs.transforms.axes import GROUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from env.cluster import Cluster
    from env.device import MeasuredCollective
    from graphs.arrays import FloatArray, IntArray

# Along the axes of the batch gradients are reduced and weights gathered, while devices compute.
OVERLAPPED_AXES = (GROUPS, "dp")
AS_USED = "as used"  # in the place of an algorithm


@dataclass(frozen=True)
class AsUsed:
    """Equal groups of ranks side by side, and what is known of their collectives.

    Attributes:
        ranks: of each group.
        hosts: on which the ranks of a group lie; of groups that differ, the most.
        across_bytes_per_s: that the ports of one host carry for a group's ranks there; infinite within one host.
        sharing: how many groups go through one port, at most.
        measured: what was measured among so many ranks on so many hosts, by kind.
        fabric: for what was not measured; None: there are no figures.
        copies: of what an all-to-all exchanges, as `graphs.transforms.derived.Collective.copies`.
    """

    ranks: int
    hosts: int
    across_bytes_per_s: float
    sharing: int
    measured: tuple[tuple[str, MeasuredCollective], ...]
    fabric: Fabric | None
    copies: float = 1.0

    @staticmethod
    def of(cluster: Cluster, groups: IntArray) -> AsUsed | None:
        """Figures of groups of devices, int64 [groups, ranks], by number; None where the cluster has none."""
        if groups.shape[1] < 2 or not has_figures(cluster):
            return None
        key = np.ascontiguousarray(groups, dtype=np.int64)
        return _of(cluster, key.tobytes(), key.shape[1])

    def knows(self, kind: str) -> bool:
        """Whether there are figures for a kind of collective."""
        known = self.fabric is not None and self.fabric.knows(kind, max(self.ranks // self.hosts, 1))
        return known or any(name == kind for name, _ in self.measured)

    def seconds(self, kind: str, size_bytes: FloatArray | IntArray | float, overlapped: bool = False) -> FloatArray:
        """float64, in the shape of the sizes: of one collective of each group, all at a time.

        Args:
            kind: one that it `knows`.
            size_bytes: of each group's whole tensor.
            overlapped: devices compute meanwhile.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        slower = self.fabric.overlap if self.fabric is not None and overlapped else 1.0
        for name, found in self.measured:
            if name == kind:
                # The others' bytes go through the same ports, as if they were its own.
                return slower * found.at_sizes(size * (self.sharing if found.hosts > 1 else 1))
        assert self.fabric is not None
        return slower * self.fabric.seconds(kind, size, self.ranks, self.hosts, self.across_bytes_per_s, self.copies)


def has_figures(cluster: Cluster) -> bool:
    """Whether a cluster says what collectives take, at least some."""
    return cluster.fabric is not None or bool(cluster.collectives)


def as_used_of(cluster: Cluster, axes: Sequence[object], devices: Sequence[Sequence[int]]) -> list[AsUsed | None]:
    """Figures of each of some collectives; those of the same axis that have as many ranks are side by side.

    Args:
        axes: of each collective, whatever tells apart which of them go side by side.
        devices: of each collective, by number those of its ranks.
    """
    if not has_figures(cluster):
        return [None] * len(devices)
    keys = [(axis, len(ranks)) for axis, ranks in zip(axes, devices, strict=True)]
    together: dict[tuple[object, int], dict[tuple[int, ...], None]] = {}
    for key, ranks in zip(keys, devices, strict=True):
        together.setdefault(key, {})[tuple(ranks)] = None
    found = {key: AsUsed.of(cluster, np.array(list(groups))) for key, groups in together.items()}
    return [found[key] for key in keys]


@lru_cache(maxsize=4096)
def _of(cluster: Cluster, content: bytes, ranks: int) -> AsUsed:
    groups = np.frombuffer(content, dtype=np.int64).reshape(-1, ranks)
    host = cluster.host_number[groups]
    ordered = np.sort(host, axis=1)
    hosts = int(1 + (np.diff(ordered, axis=1) != 0).sum(axis=1).max(initial=0))
    across, sharing = _ports(cluster, groups, host) if hosts > 1 else (np.inf, 1)
    kinds = dict.fromkeys(each.kind for each in cluster.collectives)
    found = ((kind, cluster.measured(kind, ranks, hosts)) for kind in kinds)
    measured = tuple((kind, each) for kind, each in found if each is not None)
    return AsUsed(ranks, hosts, across, sharing, measured, cluster.fabric)


def _ports(cluster: Cluster, groups: IntArray, host: IntArray) -> tuple[float, int]:
    """``(bytes per second, groups)``: what a group's ranks on a host have between hosts, and how many share a port."""
    group, source, target = _to_next_host(groups, host)
    transfer, link = cluster.routes.links_of(source, target)
    rate = np.array([each.bandwidth_bytes_per_s for each in cluster.links], dtype=np.float64)
    # The slowest link of each route, of equal ones the first: a port that sends.
    order = np.lexsort((np.arange(len(link)), rate[link], transfer))
    _, first = np.unique(transfer[order], return_index=True)
    port, of = link[order][first], transfer[order][first]
    uses = np.unique(np.stack([group[of], cluster.host_number[source[of]], port]), axis=1)
    users = np.bincount(uses[2], minlength=len(rate))
    exclusive = np.array([each.exclusive for each in cluster.links], dtype=np.bool_)
    users = np.where(exclusive, users, np.minimum(users, 1))
    place, which = np.unique(uses[:2], axis=1, return_inverse=True)
    total = np.bincount(which.reshape(-1), rate[uses[2]] / users[uses[2]], minlength=place.shape[1])
    return float(total.min()), int(users.max())


def _to_next_host(groups: IntArray, host: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """``(group, source, target)``: for each rank one on the next host of its group, where it has several."""
    rows = []
    for number, (members, places) in enumerate(zip(groups, host, strict=True)):
        names = np.unique(places)
        on = [members[places == name] for name in names]
        for here, there in zip(on, [*on[1:], on[0]], strict=True):
            if len(names) > 1:
                pairs = here, there[np.arange(len(here)) % len(there)]
                rows.append(np.stack([np.full(len(here), number), *pairs]))
    joined = np.concatenate(rows, axis=1)
    return joined[0], joined[1], joined[2]
