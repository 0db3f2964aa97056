"""The fastest paths between the devices of a cluster, over its switches: docs/score.md, "Route"."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
