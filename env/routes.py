"""Which path a transfer takes between two devices: docs/score.md, "Route"."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphs.errors import ClusterError

if TYPE_CHECKING:
    from env.cluster import Cluster, Link

ROUTE_BYTES = 2**20  # a route is the fastest path for a transfer of this size
# Paths are compared in whole nanoseconds, exactly, so that equal times are equal however they add up. What takes longer
# than these counts as them: a million links still add up within 64 bits.
_LONGEST_LATENCY_NS, _LONGEST_SENDING_NS = 2**40, 2**60

Found = tuple[int, int, tuple[int, ...]]  # nanoseconds for ROUTE_BYTES, number of links, the links: least first


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


@dataclass(frozen=True, eq=False)
class Routes(Mapping[tuple[int, int], Route]):
    """The route of every ordered pair of different devices (D devices).

    Attributes:
        ptr: int64 [D * D + 1], links: int64: the route from a to b is ``links[ptr[a * D + b]:ptr[a * D + b + 1]]``.
        latency_s, bandwidth_bytes_per_s: float64 [D, D]; 0 and infinite on the diagonal.
    """

    ptr: NDArray[np.int64]
    links: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    bandwidth_bytes_per_s: NDArray[np.float64]

    def __getitem__(self, pair: tuple[int, int]) -> Route:
        a, b = pair
        n = len(self.latency_s)
        if not (0 <= a < n and 0 <= b < n and a != b):
            raise KeyError(pair)
        links = self.links[self.ptr[a * n + b] : self.ptr[a * n + b + 1]]
        return Route(tuple(links.tolist()), float(self.latency_s[a, b]), float(self.bandwidth_bytes_per_s[a, b]))

    def links_of(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """``(pair, link)``, int64 each: the links of the route of each pair of devices, pair after pair."""
        pair = source * len(self.latency_s) + target
        length = np.diff(self.ptr)[pair]
        of = np.repeat(np.arange(len(pair)), length)
        within = np.arange(len(of)) - np.repeat(np.cumsum(length) - length, length)
        return of, self.links[self.ptr[pair][of] + within]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        n = len(self.latency_s)
        return ((a, b) for a in range(n) for b in range(n) if a != b)

    def __len__(self) -> int:
        return len(self.latency_s) * (len(self.latency_s) - 1)


def find_routes(cluster: Cluster) -> Routes:
    """All routes of a cluster; O(D (e + labels)), where a switch has as many labels as bandwidths worth a longer way.

    Raises:
        ClusterError: two devices without a route.
    """
    # Devices on one memory have the routes of its owner: the search does not see the others, nor their links.
    owners = [device for device in cluster.devices if not device.memory_of]
    number = {device.name: k for k, device in enumerate(owners)}
    others = {device.name for device in cluster.devices if device.memory_of}
    outgoing = _outgoing(cluster.links, others)
    paths: dict[tuple[str, str], tuple[int, ...]] = {}
    for device in owners:
        found = _fastest_from(device.name, outgoing, number, forwarding=False)
        if len(found) < len(owners) - 1:
            found = {**_fastest_from(device.name, outgoing, number, forwarding=True), **found}
        for other in owners:
            if other is not device and other.name not in found:
                raise ClusterError(
                    f"cluster {cluster.name!r} has no route from {device.name!r} to {other.name!r}; "
                    "add the missing links."
                )
            paths[device.name, other.name] = found[other.name][2] if other is not device else ()
    memories = [device.memory_of or device.name for device in cluster.devices]
    return _routes(cluster, [paths[a, b] for a in memories for b in memories])


@dataclass(frozen=True)
class _Hop:
    """A link as the search sees it; ``link`` is empty for one that is no part of a route."""

    to: str
    latency_ns: int
    sending_ns: int
    link: tuple[int, ...]


def _outgoing(links: Sequence[Link], without: Set[str]) -> dict[str, list[_Hop]]:
    """The links that leave each place, but for those at the devices ``without``."""
    result: dict[str, list[_Hop]] = {}
    for index, link in enumerate(links):
        if link.src in without or link.dst in without:
            continue
        latency_ns = round(min(link.latency_s * 1e9, _LONGEST_LATENCY_NS))
        sending_ns = round(min(ROUTE_BYTES / link.bandwidth_bytes_per_s * 1e9, _LONGEST_SENDING_NS))
        number = () if link.is_free else (index,)
        result.setdefault(link.src, []).append(_Hop(link.dst, latency_ns, sending_ns, number))
    return result


def _fastest_from(
    source: str, outgoing: Mapping[str, Sequence[_Hop]], devices: Mapping[str, int], forwarding: bool
) -> dict[str, Found]:
    """The best path to each device that can be reached; ``forwarding``: devices may pass a tensor on, as switches do.

    A path's time is a sum of latencies plus the time of its slowest link, so the best path to a place need not begin
    with the best path to a place before it. Dijkstra's algorithm by latency, number of links and links; a second path
    to a place is worth going on from only if its slowest link is faster than that of all paths found before it.
    """
    best: dict[str, Found] = {}
    slowest_ns: dict[str, int] = {}  # by place: the least time of the slowest link, of the paths gone on from
    heap: list[tuple[int, int, tuple[int, ...], int, str]] = [(0, 0, (), 0, source)]
    while heap:
        latency_ns, count, links, sending_ns, place = heapq.heappop(heap)
        if sending_ns >= slowest_ns.get(place, math.inf):
            continue
        slowest_ns[place] = sending_ns
        for hop in outgoing.get(place, ()):
            to, further_ns, slower_ns = hop.to, latency_ns + hop.latency_ns, max(sending_ns, hop.sending_ns)
            further, longer = links + hop.link, count + len(hop.link)
            if to in devices and to != source:
                found = further_ns + slower_ns, longer, further
                if to not in best or found < best[to]:
                    best[to] = found
            if (forwarding or to not in devices) and slower_ns < slowest_ns.get(to, math.inf):
                heapq.heappush(heap, (further_ns, longer, further, slower_ns, to))
    return best


def _routes(cluster: Cluster, paths: Sequence[tuple[int, ...]]) -> Routes:
    n = cluster.n_devices
    length = np.fromiter(map(len, paths), np.int64, len(paths))
    ptr = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    links = np.fromiter((link for path in paths for link in path), np.int64, int(ptr[-1]))
    link_latency_s = np.array([link.latency_s for link in cluster.links], dtype=np.float64)
    link_bandwidth = np.array([link.bandwidth_bytes_per_s for link in cluster.links], dtype=np.float64)
    latency_s, bandwidth = np.zeros(n * n), np.full(n * n, np.inf)
    for hop in range(int(length.max(initial=0))):  # in travelling order, as docs/score.md adds them up
        long = np.flatnonzero(length > hop)
        at = links[ptr[long] + hop]
        latency_s[long] += link_latency_s[at]
        bandwidth[long] = np.minimum(bandwidth[long], link_bandwidth[at])
    arrays = ptr, links, latency_s.reshape(n, n), bandwidth.reshape(n, n)
    for array in arrays:
        array.setflags(write=False)
    return Routes(*arrays)
