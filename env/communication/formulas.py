"""Times of collectives on an idle network: a formula for each algorithm, and the figures of a cluster for it.

Letters as in Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521): latency a, seconds per byte b, seconds
to add up one byte g, n bytes, p ranks. They hold where every rank has its own port to a switch that carries both
directions at once, and are then what the simulator finds. Where hosts are joined by slower links, the hierarchical
algorithm has figures for both (`ManyRanks`). A transfer holds its whole route, latency and all
(docs/score.md). So a server pays a latency for each of its p - 1 transfers, where textbooks let them overlap and count
one; and it adds up one tensor while the next one arrives.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from env.communication.as_used import OVERLAPPED_AXES, as_used_of
from env.routes import pairs_among
from graphs.transforms.collectives.expansion import MOVED_PER_BYTE
from graphs.transforms.collectives.rounds import Rounds, carried_out_by, group_size, rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from env.cluster import Cluster
    from graphs.arrays import FloatArray, IntArray
    from graphs.transforms.derived import Collective

BY_RECURRENCE = ("double_tree", "doubling")  # algorithms whose ranks overlap, so that no closed formula holds
EXPANDED_RANKS = 16  # a collective of more ranks is fused: its ops grow with the square of their number


@dataclass(frozen=True)
class Interconnect:
    """The network between ranks, as one latency and one bandwidth.

    Attributes:
        latency_s: of one transfer.
        s_per_byte: the inverse of the bandwidth.
        adding_s_per_byte: seconds to add up one byte; 0 leaves reductions out.
    """

    latency_s: float
    s_per_byte: float
    adding_s_per_byte: float = 0.0

    @staticmethod
    def among(cluster: Cluster, devices: Sequence[int]) -> Interconnect:
        """The slowest route, and the slowest device at adding up, among devices of a cluster given by number.

        Among many devices only the routes of `pairs_among` count.
        """
        chosen = np.array(devices, dtype=np.int64)
        latency_s, bandwidth = cluster.routes.figures_of(*pairs_among(chosen))
        s_per_byte = 1.0 / float(bandwidth.min(initial=np.inf))
        return Interconnect(float(latency_s.max(initial=0.0)), s_per_byte, _adding_s_per_byte(cluster, chosen))

    @staticmethod
    def busiest(cluster: Cluster, source: IntArray, target: IntArray) -> Interconnect:
        """Network that transfers which begin together leave to each other: those that share a link take turns.

        Args:
            source, target: numbers of devices, of as many transfers of equal size; not all to themselves.
        """
        routes = cluster.routes
        latency_s, bandwidth = routes.figures_of(source, target)
        s_per_byte = 1.0 / bandwidth
        transfer, link = routes.links_of(source, target)
        exclusive = np.array([cluster.links[each].exclusive for each in link.tolist()], dtype=np.bool_)
        transfer, link = transfer[exclusive], link[exclusive]
        latency, per_byte = (
            max(float(each.max()), float(np.bincount(link, each[transfer], minlength=1).max()))
            for each in (latency_s, s_per_byte)
        )
        return Interconnect(latency, per_byte, _adding_s_per_byte(cluster, np.unique(source)))


@dataclass(frozen=True)
class ManyRanks:
    """Equal groups of ranks that communicate at the same time, and what they have between them, for formulas.

    Attributes:
        ranks: of each group.
        flat: the slowest route of any group, with the bandwidth that rings of all groups leave to each other.
        host: ranks in a row that the hierarchical algorithm puts together; 0 for none.
        inside, across: of its rings inside hosts, and of those from host to host.
    """

    ranks: int
    flat: Interconnect
    host: int
    inside: Interconnect
    across: Interconnect

    @staticmethod
    def of(cluster: Cluster, groups: IntArray, host: int) -> ManyRanks:
        """Ranks on groups of devices, int64 [groups, ranks], by number."""
        ranks = groups.shape[1]
        found = [Interconnect.among(cluster, group.tolist()) for group in groups]
        ring = Interconnect.busiest(cluster, groups.reshape(-1), np.roll(groups, -1, axis=1).reshape(-1))
        latency_s, s_per_byte, adding = (
            max(getattr(each, name) for each in (ring, *found))
            for name in ("latency_s", "s_per_byte", "adding_s_per_byte")
        )
        flat = Interconnect(latency_s, s_per_byte, adding)
        if not 1 < host < ranks:
            return ManyRanks(ranks, flat, 0, flat, flat)
        grid = groups.reshape(len(groups), ranks // host, host)
        inside, across = (
            Interconnect.busiest(cluster, grid.reshape(-1), np.roll(grid, -1, axis=axis).reshape(-1)) for axis in (2, 1)
        )
        return ManyRanks(ranks, flat, host, inside, across)

    def named(self, algorithm: str) -> str:
        """The algorithm with the hosts of the ranks for groups, where it has groups."""
        return f"{algorithm}{self.host}" if self.host and algorithm == "hierarchical" else algorithm

    def seconds(self, kind: str, algorithm: str, size_bytes: float) -> float:
        """Seconds of one collective of each group, by formula.

        Raises:
            UnknownNameError: an unknown kind or algorithm.
        """
        name = carried_out_by(kind, algorithm)
        if not self.host or not name.startswith("hierarchical"):
            return collective_s(kind, algorithm, size_bytes, self.ranks, self.flat)
        s, p, n = self.host, self.ranks, size_bytes
        inner, outer = (s - 1) * n / s, (p // s - 1) * n / p  # bytes that each rank sends
        spread = (s - 1) * self.inside.latency_s + inner * self.inside.s_per_byte
        spread += (p // s - 1) * self.across.latency_s + outer * self.across.s_per_byte
        collect = spread + (inner + outer) * self.flat.adding_s_per_byte
        return float({"all_reduce": collect + spread, "reduce_scatter": collect}.get(kind, spread))

    def least_s(self, kind: str, algorithm: str, sizes: Sequence[int]) -> FloatArray:
        """float64 [sizes]: as `seconds`, which leaves nothing open."""
        return np.array([self.seconds(kind, algorithm, size) for size in sizes])

    def buffer_bytes(self, kind: str, algorithm: str, size_bytes: int) -> int:
        """Most bytes of others that a rank holds at a time."""
        return buffer_bytes(kind, algorithm, size_bytes, self.ranks)


def _adding_s_per_byte(cluster: Cluster, devices: IntArray) -> float:
    """Seconds to add up one byte of float32 on the slowest device."""
    _, first = np.unique(cluster.alike[devices], return_index=True)
    items = [cluster.devices[d] for d in devices[first].tolist()]
    return float(max(max(MOVED_PER_BYTE / d.bytes_per_s, 0.25 / d.flops_per_s("float32")) for d in items))


def collective_s(kind: str, algorithm: str, size_bytes: float, ranks: int, network: Interconnect) -> float:
    """Seconds of one collective on an idle network.

    Args:
        kind: one of `graphs.transforms.collectives.KINDS`.
        algorithm: one of `graphs.transforms.collectives.ALGORITHMS`.
        size_bytes: of the whole tensor, as `Collective.bytes`.

    Raises:
        UnknownNameError: an unknown kind or algorithm.
    """
    name = carried_out_by(kind, algorithm)
    p, n = ranks, size_bytes
    if p == 1:
        return 0.0
    send, add = network.latency_s + n * network.s_per_byte, n * network.adding_s_per_byte
    if name in BY_RECURRENCE:
        return _by_recurrence(rounds_of(kind, name, p), n / (2 if name == "double_tree" else 1), network)
    spread: float
    if name == "tree":
        depth = (p - 1).bit_length()
        spread, collect = depth * send, depth * (send + add)
    elif name == "central":
        # The server adds up one tensor while the next one arrives.
        spread, collect = (p - 1) * send, (p - 1) * max(send, add) + min(send, add)
    else:
        sent = (p - 1) / p**2 if name == "pairwise" else (p - 1) / p
        if kind == "shift":
            return network.latency_s + n / p * network.s_per_byte
        spread = _rounds_of_pieces(name, p) * network.latency_s + sent * n * network.s_per_byte
        collect = spread + sent * add
    return {"all_reduce": collect + spread, "reduce_scatter": collect, "reduce": collect}.get(kind, spread)


def buffer_bytes(kind: str, algorithm: str, size_bytes: int, ranks: int) -> int:
    """Most bytes of others that a rank holds at a time while it takes part in a collective. Arguments as above.

    Sums are made in what the rank gave, so a reduction needs room for what arrives at a time; what is gathered waits
    until all of it is there.
    """
    name, n, p = carried_out_by(kind, algorithm), size_bytes, ranks
    if p == 1:
        return 0
    if kind == "all_to_all":
        return (p - 1) * n // p**2
    if kind == "shift":  # what arrives is the result
        return 0
    if kind in ("all_gather", "broadcast"):
        return (p - 1) * n // p if name in ("ring", "sharded") else n
    if name == "central" or (name == "doubling" and p & (p - 1)):
        return 2 * n
    group = group_size(name, p)
    return -(-n // {"ring": p, "sharded": p, "butterfly": 2}.get(name, group if group > 1 else p if group else 1))


def fused_s(
    cluster: Cluster,
    collectives: Sequence[Collective],
    algorithms: Sequence[str],
    devices: Sequence[Sequence[int]],
    beside: Sequence[object] | None = None,
) -> FloatArray:
    """float64, for `reduce`: seconds of each collective that is fused, NaN for one to be spelt out.

    Fused are those of which the cluster has figures (`AsUsed`), and those of more than `EXPANDED_RANKS` ranks.

    Args:
        algorithms, devices: of each collective, and by number those of its ranks.
        beside: of each collective, whatever tells apart which of them go side by side; by default their axes.
    """
    result = np.full(len(collectives), np.nan)
    networks: dict[tuple[tuple[int, ...], int], ManyRanks] = {}
    groups = beside if beside is not None else [collective.axis for collective in collectives]
    used = as_used_of(cluster, groups, devices)
    for c, (collective, name, ranks) in enumerate(zip(collectives, algorithms, devices, strict=True)):
        figures = used[c]
        if figures is not None and figures.knows(collective.kind):
            carried_out_by(collective.kind, name)  # refuses unknown names
            if collective.copies != 1.0:
                figures = replace(figures, copies=collective.copies)
            result[c] = figures.seconds(collective.kind, collective.bytes, collective.axis in OVERLAPPED_AXES)
        elif len(ranks) > EXPANDED_RANKS:
            key = tuple(ranks), group_size(name, len(ranks))
            if key not in networks:
                networks[key] = ManyRanks.of(cluster, np.array([ranks], dtype=np.int64), key[1])
            result[c] = networks[key].seconds(collective.kind, name, collective.bytes)
    return result


def _rounds_of_pieces(algorithm: str, p: int) -> int:
    """Rounds in which each rank comes from its own piece to all p."""
    if algorithm == "butterfly":
        return (p - 1).bit_length()
    group = group_size(algorithm, p)
    return p // group - 1 + group - 1 if group else p - 1


def _by_recurrence(rounds: Rounds, size_bytes: float, network: Interconnect) -> float:
    """The end of rounds in which ranks overlap, so that no closed formula holds; every tensor has `size_bytes`.

    A rank sends what it has added up so far; ports take transfers in the order in which these can start.
    """
    send_s = network.latency_s + size_bytes * network.s_per_byte
    add_s = size_bytes * network.adding_s_per_byte
    sends = [(send, part.adds) for part in rounds for send in part.sends]
    # A rank's piece has versions: 0 is its own, and every tensor that arrives makes the next one.
    versions: dict[tuple[int, int], int] = defaultdict(int)
    needs, makes = [], []
    for part in rounds:
        needs += [(send.source, send.start, versions[send.source, send.start]) for send in part.sends]
        for send in part.sends:
            versions[send.target, send.start] += 1
            makes.append((send.target, send.start, versions[send.target, send.start]))
    waiting: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for k, need in enumerate(needs):
        waiting[need].append(k)
    done: dict[tuple[int, int, int], float] = {}
    arrived: dict[tuple[int, int, int], tuple[float, bool]] = {}
    requests: list[tuple[float, int, int]] = []
    free: dict[tuple[str, int], float] = defaultdict(float)

    def have(version: tuple[int, int, int], time_s: float) -> None:
        done[version] = time_s
        for k in waiting[version]:
            heapq.heappush(requests, (time_s, sends[k][0].source, k))
        after = (*version[:2], version[2] + 1)
        if after in arrived:
            arrival_s, adds = arrived.pop(after)
            have(after, max(arrival_s, time_s) + (add_s if adds else 0.0))

    for rank, start in {(rank, start) for rank, start, _ in (*needs, *makes)}:
        have((rank, start, 0), 0.0)
    while requests:
        time_s, source, k = heapq.heappop(requests)
        ports = ("out", source), ("in", sends[k][0].target)
        end_s = max(time_s, *(free[port] for port in ports)) + send_s
        free.update(dict.fromkeys(ports, end_s))
        rank, start, version = makes[k]
        arrived[makes[k]] = end_s, sends[k][1]
        before = (rank, start, version - 1)
        if before in done:
            arrival_s, adds = arrived.pop(makes[k])
            have(makes[k], max(arrival_s, done[before]) + (add_s if adds else 0.0))
    return max(done.values())
