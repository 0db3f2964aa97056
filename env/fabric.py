"""`Fabric`: what collectives of a library reach on a network, in few constants; a cluster's ``[fabric]``.

A library such as NCCL carries a collective out by one of several protocols, whichever it takes to be the quickest for
the size: one that answers soon and carries little, and one that takes longer to begin and fills the ports. Each of them
is a straight line in the bytes, so a collective takes the least of a few lines:

    base + per rank + per host + bytes through a port / bandwidth + bytes of a rank's own part / bandwidth of copies

as in the library's own model of costs (NCCL 2.27, src/graph/tuning.cc). Between hosts the ports of the network may
carry less than a protocol does inside one (`env.communication.as_used` finds out how much), and the lesser counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from env.device import check_amount, check_rate, check_string, refusal
from graphs.arrays import FloatArray, IntArray
from graphs.codec import LATER
from graphs.errors import ClusterError

FABRIC_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SHIFT = "shift"  # a round of the ring of an all-gather, whose figures serve it


@dataclass(frozen=True)
class Protocol:
    """One way in which a library carries out one kind of collective.

    Attributes:
        kind: one of `FABRIC_KINDS`; figures of an all-gather serve a reduce-scatter that has none of its own.
        base_s: before anything else.
        rank_s: for each rank after the first, of a host where sums go up a tree of hosts, of all where a ring goes
            through them; a step to another host counts as `host_s` instead.
        host_s: for each step from host to host.
        bus_bytes_per_s: what goes through the port of each rank inside a host; NCCL calls it the bus bandwidth.
        copy_bytes_per_s: at which a rank copies its own part of the tensor.
        least_ranks: in one host; below, the protocol is not used.
    """

    kind: str
    base_s: float
    rank_s: float
    host_s: float
    bus_bytes_per_s: float
    copy_bytes_per_s: float = field(default=math.inf, metadata=LATER)
    least_ranks: int = field(default=2, metadata=LATER)

    def __post_init__(self) -> None:
        what = f"a protocol of {self.kind!r}"
        if self.kind not in FABRIC_KINDS:
            raise refusal("a protocol", "kind", self.kind, f"one of {', '.join(FABRIC_KINDS)}")
        for key in ("base_s", "rank_s", "host_s"):
            check_amount(what, key, getattr(self, key))
        for key in ("bus_bytes_per_s", "copy_bytes_per_s"):
            check_rate(what, key, getattr(self, key))
        if self.bus_bytes_per_s == math.inf:
            raise refusal(what, "bus_bytes_per_s", self.bus_bytes_per_s, "a finite number")
        if not isinstance(self.least_ranks, int) or isinstance(self.least_ranks, bool) or self.least_ranks < 1:
            raise refusal(what, "least_ranks", self.least_ranks, "a whole number of ranks, 1 or more")

    def shift_seconds(self, size_bytes: FloatArray, ranks: int, hosts: int, across_bytes_per_s: float) -> FloatArray:
        """float64: as `seconds`, of one round of the ring, in which a rank sends its part to the next one.

        One rank of a host sends to the next host, through its own share of the ports.
        """
        port = min(self.bus_bytes_per_s, across_bytes_per_s / (ranks // hosts))
        begun_s = self.base_s + (self.host_s if hosts > 1 else self.rank_s)
        return np.asarray(begun_s + size_bytes / ranks / port, dtype=np.float64)

    def seconds(
        self, size_bytes: FloatArray, ranks: int, hosts: int, across_bytes_per_s: float, copies: float = 1.0
    ) -> FloatArray:
        """float64, in the shape of the sizes: arguments as of `Fabric.seconds`."""
        p, h, n = ranks, hosts, size_bytes
        if self.kind == "all_to_all":
            n = n / p  # that a rank gives
            inside, beyond = (p // h - 1) / p, (p - p // h) / p
            # Bytes that leave a host go through the ports that its ranks share there.
            ports_s = n * _sent(copies, h) * beyond * (p // h) / across_bytes_per_s
            moved_s = np.maximum(n * _sent(copies, p) * (inside + beyond) / self.bus_bytes_per_s, ports_s)
        else:
            twice = 2 if self.kind == "all_reduce" else 1
            moved_s = n * (twice * (p - 1) / p / min(self.bus_bytes_per_s, across_bytes_per_s))
        # Sums go up a tree of hosts and down again; other kinds go around a ring.
        hops = 2 * math.ceil(math.log2(h)) if self.kind == "all_reduce" else h - 1
        in_a_row = p // h - 1 if self.kind == "all_reduce" else p - h
        begun_s = self.base_s + self.rank_s * in_a_row + self.host_s * hops
        return np.asarray(begun_s + moved_s + n / p / self.copy_bytes_per_s, dtype=np.float64)


@dataclass(frozen=True)
class Fabric:
    """Speeds that collectives reach on a cluster, whichever algorithm was asked for.

    Attributes:
        protocols: of each kind at least one.
        overlap: seconds of a collective that devices compute beside, over those of one alone; along the axis of the
            batch, where gradients are reduced and weights are gathered.
        source: where the figures come from.
    """

    protocols: tuple[Protocol, ...]
    overlap: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "protocols", tuple(self.protocols))
        check_string("the fabric", "source", self.source, may_be_empty=True)
        check_rate("the fabric", "overlap", self.overlap)
        if not 1 <= self.overlap < math.inf:
            raise refusal("the fabric", "overlap", self.overlap, "a number of 1 or more")
        if not self.protocols or not all(isinstance(each, Protocol) for each in self.protocols):
            raise ClusterError("the fabric has no protocols; expected one at least, under [[fabric.protocols]].")

    def knows(self, kind: str, ranks_of_host: int) -> bool:
        """True if there are figures for a kind of collective among that many ranks of each host."""
        return bool(self._usable(kind, ranks_of_host))

    def seconds(
        self,
        kind: str,
        size_bytes: FloatArray | IntArray,
        ranks: int,
        hosts: int,
        across_bytes_per_s: float,
        copies: float = 1.0,
    ) -> FloatArray:
        """float64, in the shape of the sizes: by the quickest protocol.

        Args:
            kind: one that it `knows`.
            size_bytes: of the whole tensor, as `graphs.transforms.derived.Collective.bytes`.
            ranks: all of them, equally many on each host.
            hosts: how many have some of the ranks.
            across_bytes_per_s: that the ports between hosts carry for the ranks of one host together.
            copies: rows of an all-to-all that are of one token, which goes to each host, and each rank, once.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        usable = self._usable(kind, ranks // hosts)
        if kind == SHIFT:
            found = [each.shift_seconds(size, ranks, hosts, across_bytes_per_s) for each in usable]
        else:
            found = [each.seconds(size, ranks, hosts, across_bytes_per_s, copies) for each in usable]
        return np.asarray(np.min(found, axis=0), dtype=np.float64)

    def scaled(self, bandwidth: float = 1.0, latency: float = 1.0, between_hosts: float = 1.0) -> Fabric:
        """The fabric with figures times factors: bandwidths, times inside a host, those of steps from host to host."""
        protocols = (
            replace(
                each,
                base_s=each.base_s * latency,
                rank_s=each.rank_s * latency,
                host_s=each.host_s * between_hosts,
                bus_bytes_per_s=each.bus_bytes_per_s * bandwidth,
                copy_bytes_per_s=each.copy_bytes_per_s * bandwidth,
            )
            for each in self.protocols
        )
        return replace(self, protocols=tuple(protocols))

    def _usable(self, kind: str, ranks_of_host: int) -> list[Protocol]:
        own = [each for each in self.protocols if each.kind == kind]
        if not own and kind in ("reduce_scatter", SHIFT):
            own = [each for each in self.protocols if each.kind == "all_gather"]
        # One rank of each host has no other inside; what the protocol takes to begin holds for it as well.
        return [each for each in own if max(ranks_of_host, 2) >= each.least_ranks]


def _sent(copies: float, places: int) -> float:
    """Share of rows that is sent where so many rows of a token go anywhere evenly, and each place needs one of them."""
    missed = float((1.0 - 1.0 / places) ** copies)
    return places * (1.0 - missed) / copies
