"""`Routes`: the fastest paths between the devices of a cluster, over its switches (docs/score.md, "Route")."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import FloatArray, IntArray, frozen
from graphs.errors import ClusterError

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.device import Link

ROUTE_BYTES = 2**20  # a route is the fastest path for a transfer of this size
# Paths are compared in whole nanoseconds, exactly, so that equal times are equal however they add up. Longer times than
# these count as these: a million links still add up within 64 bits.
_LONGEST_LATENCY_NS, _LONGEST_SENDING_NS = 2**40, 2**60

Found = tuple[int, int, tuple[int, ...]]  # nanoseconds for ROUTE_BYTES, number of links, the links: least first


@dataclass(frozen=True)
class _Hop:
    """A link as the search sees it; ``link`` is empty for one that is no part of a route."""

    to: str
    latency_ns: int
    sending_ns: int
    link: tuple[int, ...]


@dataclass(frozen=True)
class LinkPaths:
    """The paths through a cluster: its links by the place that they leave, a device or a switch.

    Attributes:
        onward: those that end at a switch.
        ends: those that end at a device, by device.
    """

    onward: Mapping[str, Sequence[_Hop]]
    ends: Mapping[str, Mapping[str, Sequence[_Hop]]]

    @staticmethod
    def of(links: Sequence[Link], devices: Set[str], without: Set[str]) -> LinkPaths:
        """Paths over all links but those at the devices ``without``."""
        onward: dict[str, list[_Hop]] = {}
        ends: dict[str, dict[str, list[_Hop]]] = {}
        for index, link in enumerate(links):
            if link.src in without or link.dst in without:
                continue
            latency_ns = round(min(link.latency_s * 1e9, _LONGEST_LATENCY_NS))
            sending_ns = round(min(ROUTE_BYTES / link.bandwidth_bytes_per_s * 1e9, _LONGEST_SENDING_NS))
            hop = _Hop(link.dst, latency_ns, sending_ns, () if link.is_free else (index,))
            if link.dst in devices:
                ends.setdefault(link.src, {}).setdefault(link.dst, []).append(hop)
            else:
                onward.setdefault(link.src, []).append(hop)
        return LinkPaths(onward, ends)

    def fastest_from(self, source: str, forwarding: bool) -> dict[str, Found]:
        """The best path to each device that can be reached; ``forwarding``: devices may pass a tensor on, too."""
        return self._fastest(source, None, forwarding)

    def fastest(self, source: str, target: str) -> Found | None:
        """The best path from one device to another that no device passes on; None without one."""
        return self._fastest(source, target, False).get(target)

    def reaches_all(self, devices: Sequence[str]) -> bool:
        """True if there is a path from each device to each other one, over whatever lies between."""
        return all(set(devices) <= _reached(devices[0], onward) for onward in (self._next_places(), self._backwards()))

    def reached(self, source: str) -> set[str]:
        """The places to which there is a path, the first one included."""
        return _reached(source, self._next_places())

    def _fastest(self, source: str, target: str | None, forwarding: bool) -> dict[str, Found]:
        """The best path to each device, or to one.

        A path's time is a sum of latencies plus the time of its slowest link, so the best path to a place need not
        begin with the best path to a place before it. Dijkstra's algorithm by latency, number of links and links; a
        second path to a place is worth going on from only if its slowest link is faster than that of all paths found
        before it.
        """
        best: dict[str, Found] = {}
        slowest_ns: dict[str, int] = {}  # by place: the least time of the slowest link, of the paths gone on from
        heap: list[tuple[int, int, tuple[int, ...], int, str]] = [(0, 0, (), 0, source)]
        while heap:
            latency_ns, count, links, sending_ns, place = heapq.heappop(heap)
            if sending_ns >= slowest_ns.get(place, math.inf):
                continue
            slowest_ns[place] = sending_ns
            ends = self.ends.get(place, {})
            if target is None:
                hops: Iterable[_Hop] = (hop for found in ends.values() for hop in found)
            else:
                hops = ends.get(target, ())
            for hop in hops:
                further_ns, slower_ns = latency_ns + hop.latency_ns, max(sending_ns, hop.sending_ns)
                further, longer = links + hop.link, count + len(hop.link)
                if hop.to != source:
                    found = further_ns + slower_ns, longer, further
                    if hop.to not in best or found < best[hop.to]:
                        best[hop.to] = found
                if forwarding and slower_ns < slowest_ns.get(hop.to, math.inf):
                    heapq.heappush(heap, (further_ns, longer, further, slower_ns, hop.to))
            for hop in self.onward.get(place, ()):
                slower_ns = max(sending_ns, hop.sending_ns)
                if slower_ns < slowest_ns.get(hop.to, math.inf):
                    further, longer = links + hop.link, count + len(hop.link)
                    heapq.heappush(heap, (latency_ns + hop.latency_ns, longer, further, slower_ns, hop.to))
        return best

    def _next_places(self) -> dict[str, list[str]]:
        result = {place: [hop.to for hop in hops] for place, hops in self.onward.items()}
        for place, ends in self.ends.items():
            result.setdefault(place, []).extend(ends)
        return result

    def _backwards(self) -> dict[str, list[str]]:
        result: dict[str, list[str]] = {}
        for place, others in self._next_places().items():
            for other in others:
                result.setdefault(other, []).append(place)
        return result


def _reached(source: str, onward: Mapping[str, Sequence[str]]) -> set[str]:
    seen, left = {source}, [source]
    while left:
        for place in onward.get(left.pop(), ()):
            if place not in seen:
                seen.add(place)
                left.append(place)
    return seen


__all__ = ["ROUTE_BYTES", "TABLE_DEVICES", "Route", "Routes", "pairs_among"]

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
    """The route of every ordered pair of different devices (D devices), found where it is asked for.

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
