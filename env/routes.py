"""`Routes`: which path a transfer takes between two devices (docs/score.md, "Route"), found where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from env.paths import ROUTE_BYTES, Found, LinkPaths
from graphs.arrays import FloatArray, IntArray, frozen
from graphs.errors import ClusterError

if TYPE_CHECKING:
    from env.cluster import Cluster

__all__ = ["ROUTE_BYTES", "TABLE_DEVICES", "Route", "Routes", "find_routes", "pairs_among"]

TABLE_DEVICES = 512  # of more of them, the routes that are asked for are found one by one
PAIRED_DEVICES = 64  # of a group of more of them, some pairs stand for all


@dataclass(frozen=True)
class Route:
    """The fastest path from one device to another, around other devices where there is a way around.

    Attributes:
        links: indices into `Cluster.links`, in travelling order; free links left out.
        latency_s: sum over the links.
        bandwidth_bytes_per_s: of the slowest link; infinite without links.
    """

    links: tuple[int, ...]
    latency_s: float
    bandwidth_bytes_per_s: float


class Routes(Mapping[tuple[int, int], Route]):
    """The route of every ordered pair of different devices (D devices), by `find_routes`.

    Tables of all pairs are made when one of them is asked for first. With up to `TABLE_DEVICES` devices everything is
    looked up in them; with more, `links_of`, `figures_of` and ``routes[a, b]`` find single routes, and remember them.
    """

    def __init__(self, cluster: Cluster) -> None:
        # Devices on one memory have the routes of its owner: the search does not see the others, nor their links.
        self._cluster_name = cluster.name
        self._owners = [device.name for device in cluster.devices if not device.memory_of]
        self._memories = [device.memory_of or device.name for device in cluster.devices]
        others = {device.name for device in cluster.devices if device.memory_of}
        self._paths = LinkPaths.of(cluster.links, set(self._owners), others)
        self._latency_s = np.array([link.latency_s for link in cluster.links], dtype=np.float64)
        self._bandwidth = np.array([link.bandwidth_bytes_per_s for link in cluster.links], dtype=np.float64)
        self._from: dict[str, dict[str, Found]] = {}
        self._known: dict[tuple[str, str], Route] = {}

    def check(self) -> None:
        """Refuse a cluster with two devices that no path joins.

        Raises:
            ClusterError: names the first two.
        """
        if self._paths.reaches_all(self._owners):
            return
        for source in self._owners:
            reached = self._paths.reached(source)
            for target in self._owners:
                if target not in reached:
                    raise ClusterError(
                        f"cluster {self._cluster_name!r} has no route from {source!r} to {target!r}; "
                        "add the missing links."
                    )

    @property
    def ptr(self) -> IntArray:
        """int64 [D * D + 1]: the route from a to b is ``links[ptr[a * D + b]:ptr[a * D + b + 1]]``."""
        return self._tables[0]

    @property
    def links(self) -> IntArray:
        """int64: links of all routes, as `ptr` says."""
        return self._tables[1]

    @property
    def latency_s(self) -> FloatArray:
        """float64 [D, D]; 0 on the diagonal."""
        return self._tables[2]

    @property
    def bandwidth_bytes_per_s(self) -> FloatArray:
        """float64 [D, D]; infinite on the diagonal."""
        return self._tables[3]

    def __getitem__(self, pair: tuple[int, int]) -> Route:
        a, b = pair
        n = len(self._memories)
        if not (0 <= a < n and 0 <= b < n and a != b):
            raise KeyError(pair)
        return self._route(a, b)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        n = len(self._memories)
        return ((a, b) for a in range(n) for b in range(n) if a != b)

    def __len__(self) -> int:
        return len(self._memories) * (len(self._memories) - 1)

    def figures_of(self, source: IntArray, target: IntArray) -> tuple[FloatArray, FloatArray]:
        """``(latency_s, bandwidth_bytes_per_s)``, float64 each: of the routes of pairs of devices, in their shape."""
        if self._has_tables:
            return self.latency_s[source, target], self.bandwidth_bytes_per_s[source, target]
        pairs = np.broadcast_arrays(source, target)
        found = [self._route(a, b) for a, b in zip(*(each.reshape(-1).tolist() for each in pairs), strict=True)]
        latency = np.array([route.latency_s for route in found], dtype=np.float64)
        bandwidth = np.array([route.bandwidth_bytes_per_s for route in found], dtype=np.float64)
        return latency.reshape(pairs[0].shape), bandwidth.reshape(pairs[0].shape)

    def links_of(self, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
        """``(pair, link)``, int64 each: the links of the route of each pair of devices, pair after pair."""
        if not self._has_tables:
            routes = [self._route(a, b).links for a, b in zip(source.tolist(), target.tolist(), strict=True)]
            count = np.fromiter(map(len, routes), np.int64, len(routes))
            links = np.fromiter((link for route in routes for link in route), np.int64, int(count.sum()))
            return np.repeat(np.arange(len(routes)), count), links
        pair = source * len(self._memories) + target
        length = self.ptr[pair + 1] - self.ptr[pair]
        of = np.repeat(np.arange(len(pair)), length)
        within = np.arange(len(of)) - np.repeat(np.cumsum(length) - length, length)
        return of, self.links[self.ptr[pair][of] + within]

    @property
    def _has_tables(self) -> bool:
        return len(self._memories) <= TABLE_DEVICES or "_tables" in self.__dict__

    def _route(self, a: int, b: int) -> Route:
        """The route between two devices, which may be the same one."""
        key = self._memories[a], self._memories[b]
        if key not in self._known:
            links = self._path(*key)
            bandwidth = min((self._bandwidth[link] for link in links), default=np.inf)
            self._known[key] = Route(links, float(sum(self._latency_s[link] for link in links)), float(bandwidth))
        return self._known[key]

    def _path(self, source: str, target: str) -> tuple[int, ...]:
        if source == target:
            return ()
        found = self._paths.fastest(source, target)
        return (found or self._forwarded(source)[target])[2]

    def _forwarded(self, source: str) -> dict[str, Found]:
        """LinkPaths from a device that others pass on."""
        if source not in self._from:
            self._from[source] = self._paths.fastest_from(source, forwarding=True)
        return self._from[source]

    @cached_property
    def _tables(self) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        paths: dict[tuple[str, str], tuple[int, ...]] = {}
        for source in self._owners:
            found = self._paths.fastest_from(source, forwarding=False)
            if len(found) < len(self._owners) - 1:
                found = {**self._forwarded(source), **found}
            for target in self._owners:
                paths[source, target] = found[target][2] if target != source else ()
        return self._tabled([paths[a, b] for a in self._memories for b in self._memories])

    def _tabled(self, paths: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        n = len(self._memories)
        length = np.fromiter(map(len, paths), np.int64, len(paths))
        ptr = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
        links = np.fromiter((link for path in paths for link in path), np.int64, int(ptr[-1]))
        latency_s, bandwidth = np.zeros(n * n), np.full(n * n, np.inf)
        for hop in range(int(length.max(initial=0))):  # in travelling order, as docs/score.md adds them up
            long = np.flatnonzero(length > hop)
            at = links[ptr[long] + hop]
            latency_s[long] += self._latency_s[at]
            bandwidth[long] = np.minimum(bandwidth[long], self._bandwidth[at])
        return frozen(ptr), frozen(links), frozen(latency_s.reshape(n, n)), frozen(bandwidth.reshape(n, n))


def pairs_among(devices: IntArray) -> tuple[IntArray, IntArray]:
    """``(source, target)``, int64 each: pairs of different ones of some devices, all of them in both directions.

    More than `PAIRED_DEVICES` are paired each with the next, around a ring, and with the first.
    """
    if len(devices) <= PAIRED_DEVICES:
        at = np.nonzero(~np.eye(len(devices), dtype=np.bool_))
    else:
        here, following = np.arange(len(devices)), np.roll(np.arange(len(devices)), -1)
        first = np.zeros(len(devices) - 1, dtype=np.int64)
        at = tuple(np.concatenate(each) for each in ((here, first, here[1:]), (following, here[1:], first)))
    return devices[at[0]], devices[at[1]]


def find_routes(cluster: Cluster) -> Routes:
    """All routes of a cluster; a table of them takes O(D (e + labels)), where a switch has as many labels as
    bandwidths worth a longer way.

    Raises:
        ClusterError: two devices without a route.
    """
    result = Routes(cluster)
    result.check()
    return result
