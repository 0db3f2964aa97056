"""`CollectiveCosts`: what the collectives of a mesh take on a cluster, all groups of ranks along an axis at a time.

The groups along one axis work side by side, as replicas do: eight rings over the network adapters of two hosts, or one
all-reduce inside each host. Where they share links they wait for each other. So they are simulated together, for a few
sizes; in between times are linear in the bytes. Groups that share no link do not disturb each other: of those that look
alike one is simulated. Where the cluster has figures of collectives (`env.communication.as_used`), these count instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

import networkx as nx
import numpy as np

from env.cluster import Cluster
from env.communication.as_used import OVERLAPPED_AXES, AsUsed
from env.communication.formulas import BY_RECURRENCE, EXPANDED_RANKS, ManyRanks, buffer_bytes
from env.communication.least_times import different, first_quickest
from env.communication.times import at_least_s, host_size, side_by_side, with_hosts
from env.resizing import part_of, used_among
from env.routes import TABLE_DEVICES
from graphs.arrays import FloatArray, IntArray
from graphs.transforms.collectives import ALGORITHMS
from graphs.transforms.collectives.rounds import carried_out_by

SIZES = (0, 2**14, 2**18, 2**22, 2**26, 2**30)  # bytes for which times are simulated; linear in between and beyond
SIMULATED_DEVICES = 64  # of groups that share links; more of them are timed by formula


class CollectiveCosts:
    """Seconds of collectives on a grid of devices.

    Args:
        devices: int64 [stages, *sizes of the mesh], numbers of devices of the cluster; a stage is one mesh.
        axes: names of the axes of the mesh; along some of them devices compute meanwhile (`OVERLAPPED_AXES`).
        copies: of what is exchanged along each of them, as of `AsUsed`; by default 1.
    """

    def __init__(
        self, cluster: Cluster, devices: IntArray, axes: Sequence[str] = (), copies: Sequence[float] = ()
    ) -> None:
        self.cluster, self.devices, self.copies = cluster, np.asarray(devices, dtype=np.int64), copies
        self.overlapped = frozenset(number for number, name in enumerate(axes) if name in OVERLAPPED_AXES)
        self._as_used: dict[tuple[int, int], AsUsed | None] = {}
        self._networks: dict[tuple[int, int], tuple[Network, ...]] = {}
        self._curves: dict[tuple[str, int, str, int], FloatArray] = {}

    @overload
    def seconds(self, kind: str, axis: int, size_bytes: float, algorithm: str = "", stage: int = 0) -> float: ...

    @overload
    def seconds(
        self, kind: str, axis: int, size_bytes: FloatArray | IntArray, algorithm: str = "", stage: int = 0
    ) -> FloatArray: ...

    def seconds(
        self,
        kind: str,
        axis: int,
        size_bytes: float | FloatArray | IntArray,
        algorithm: str = "",
        stage: int = 0,
    ) -> float | FloatArray:
        """Seconds until the last group along an axis of one stage is done, all having begun together.

        Args:
            kind: one of `graphs.transforms.collectives.KINDS`.
            axis: number of the axis of the mesh, 0 for the outermost.
            size_bytes: of each group's whole tensor, as `graphs.transforms.derived.Collective.bytes`; one or many.
            algorithm: one of `graphs.transforms.collectives.ALGORITHMS`; "" for the quickest at each size.

        Raises:
            UnknownNameError: an unknown kind or algorithm.
        """
        figures = self.as_used(kind, axis, stage)
        if figures is not None:
            if algorithm:
                carried_out_by(kind, algorithm)  # refuses unknown names
            found = figures.seconds(kind, size_bytes, axis in self.overlapped)
            return float(found) if np.ndim(size_bytes) == 0 else found
        key = kind, axis, algorithm, stage
        if key not in self._curves:
            networks = self.networks(axis, stage)
            names = [algorithm] if algorithm else _worth_timing(kind, networks)
            self._curves[key] = _quickest_somewhere(networks, kind, names)
        result = np.min([_interpolated(size_bytes, curve) for curve in self._curves[key]], axis=0)
        return float(result) if np.ndim(size_bytes) == 0 else result

    def exactly(self, kind: str, axis: int, size_bytes: int, algorithm: str, stage: int = 0) -> tuple[float, int]:
        """``(seconds, bytes of buffers)`` at one size, without interpolation. Arguments as of `seconds`."""
        figures = self.as_used(kind, axis, stage)
        if figures is not None:
            seconds = float(figures.seconds(kind, size_bytes, axis in self.overlapped))
            return seconds, buffer_bytes(kind, algorithm, size_bytes, figures.ranks)
        networks = self.networks(axis, stage)
        return (
            max((network.seconds(kind, algorithm, size_bytes) for network in networks), default=0.0),
            max((network.buffer_bytes(kind, algorithm, size_bytes) for network in networks), default=0),
        )

    def quickest(self, kind: str, axis: int, size_bytes: int, stage: int = 0) -> str:
        """The quickest algorithm at one size, rounded up to a power of two. Arguments as of `seconds`."""
        if self.as_used(kind, axis, stage) is not None:
            return ALGORITHMS[0]  # all are one
        size = 1 << max(size_bytes - 1, 0).bit_length()
        networks = self.networks(axis, stage)
        return first_quickest(
            different(kind, (networks[0].named(name) for name in _worth_timing(kind, networks))),
            lambda name: max(float(network.least_s(kind, name, (size,))[0]) for network in networks),
            lambda name: self.exactly(kind, axis, size, name, stage)[0],
        )

    def as_used(self, kind: str, axis: int, stage: int = 0) -> AsUsed | None:
        """The cluster's figures of a kind of collective along an axis; None where it has none."""
        key = axis, stage
        if key not in self._as_used:
            grid = np.moveaxis(self.devices[stage], axis, -1)
            used = AsUsed.of(self.cluster, grid.reshape(-1, grid.shape[-1]))
            self._as_used[key] = used if used is None or not self.copies else replace(used, copies=self.copies[axis])
        found = self._as_used[key]
        return found if found is not None and found.knows(kind) else None

    def networks(self, axis: int, stage: int = 0) -> tuple[Network, ...]:
        """The groups along an axis: those that share links in one network, and of equal networks one.

        Groups of one rank exchange nothing, and there is no network then.
        """
        key = axis, stage
        if key not in self._networks:
            grid = np.moveaxis(self.devices[stage], axis, -1)
            groups = grid.reshape(-1, grid.shape[-1])
            together = _sharing_links(self.cluster, groups) if groups.shape[1] > 1 else []
            unlike: dict[tuple[object, ...], list[int]] = {}
            for part in together:
                unlike.setdefault(_look(self.cluster, groups[part]), part)
            found = (_network(self.cluster, groups[part]) for part in unlike.values())
            self._networks[key] = tuple(dict.fromkeys(found))
        return self._networks[key]


@dataclass(frozen=True)
class SideBySide:
    """Groups of ranks whose routes meet, on the part of a cluster that they use.

    Attributes:
        cluster: of their devices alone, named by number, so that networks that look alike are equal.
        groups: numbers of its devices, by rank.
    """

    cluster: Cluster
    groups: tuple[tuple[int, ...], ...]

    def named(self, algorithm: str) -> str:
        """The algorithm with the hosts of the ranks for groups, where it has groups."""
        return with_hosts(algorithm, self.cluster, self.groups[0])

    def seconds(self, kind: str, algorithm: str, size_bytes: int) -> float:
        """Seconds of one collective of each group, all at a time."""
        return self._outcome(kind, algorithm, size_bytes)[0]

    def least_s(self, kind: str, algorithm: str, sizes: Sequence[int]) -> FloatArray:
        """float64 [sizes]: seconds that they take at least."""
        return at_least_s(self.cluster, self.groups, kind, algorithm, sizes)

    def buffer_bytes(self, kind: str, algorithm: str, size_bytes: int) -> int:
        """Most bytes of others that a rank holds at a time."""
        return self._outcome(kind, algorithm, size_bytes)[1]

    @lru_cache(maxsize=65536)  # noqa: B019 - networks are few, and equal ones share their times
    def _outcome(self, kind: str, algorithm: str, size_bytes: int) -> tuple[float, int]:
        score = side_by_side(self.cluster, self.groups, kind, size_bytes, algorithm)
        return score.step_time_s, int(score.peak_bytes.max())


Network = SideBySide | ManyRanks


def _network(cluster: Cluster, groups: IntArray) -> Network:
    """Network of groups [g, ranks] of devices of a cluster, by number."""
    if _is_timed_by_formula(groups):
        return ManyRanks.of(cluster, groups, host_size(cluster, groups[0].tolist()))
    part = part_of(cluster, groups)
    local = {cluster.device_index[device.name]: number for number, device in enumerate(part.devices)}
    return SideBySide(_numbered(part), tuple(tuple(local[d] for d in group) for group in groups.tolist()))


def _look(cluster: Cluster, groups: IntArray) -> tuple[object, ...]:
    """Key of groups [g, ranks] of devices: equal keys have equal networks, which take longer to make."""
    if _is_timed_by_formula(groups):
        return (groups.tobytes(),)
    devices, links = used_among(cluster, groups)
    number = {cluster.devices[d].name: i for i, d in enumerate(devices)}
    owner = {d: i for i, d in enumerate(devices)}
    ways = []
    for link in (cluster.links[each] for each in links):
        ends = (number.setdefault(end, len(number)) for end in (link.src, link.dst))
        ways.append((*ends, link.bandwidth_bytes_per_s, link.latency_s, link.exclusive))
    kinds = tuple((int(cluster.alike[d]), owner[int(cluster.memory_owner[d])]) for d in devices)
    return kinds, tuple(ways), tuple(owner[d] for d in groups.reshape(-1).tolist()), groups.shape


def _is_timed_by_formula(groups: IntArray) -> bool:
    return groups.shape[1] > EXPANDED_RANKS or groups.size > SIMULATED_DEVICES


def _sharing_links(cluster: Cluster, groups: IntArray) -> list[list[int]]:
    """Numbers of groups, those together whose routes have a link in common."""
    near = nx.Graph()
    near.add_nodes_from(range(len(groups)))
    user: dict[int, int] = {}
    for number, group in enumerate(groups):
        for link in _links_among(cluster, group).tolist():
            if cluster.links[link].exclusive:
                near.add_edge(user.setdefault(link, number), number)
    return [sorted(part) for part in nx.connected_components(near)]


def _links_among(cluster: Cluster, devices: IntArray) -> IntArray:
    """Links of all routes among devices, by number, increasing; of many devices those between neighbours."""
    if len(devices) > SIMULATED_DEVICES:
        source, target = devices, np.roll(devices, -1)
    else:
        source, target = (pairs.reshape(-1) for pairs in np.meshgrid(devices, devices, indexing="ij"))
    return np.unique(cluster.routes.links_of(source, target)[1])


def _numbered(cluster: Cluster) -> Cluster:
    """The cluster with numbers for names."""
    name = {device.name: f"d{i}" for i, device in enumerate(cluster.devices)}
    for link in cluster.links:
        for end in (link.src, link.dst):
            name.setdefault(end, f"s{len(name)}")
    items = [
        replace(device, name=name[device.name], memory_of=name[device.memory_of] if device.memory_of else "")
        for device in cluster.devices
    ]
    joined = [replace(link, src=name[link.src], dst=name[link.dst]) for link in cluster.links]
    return Cluster("part", tuple(items), tuple(joined))


def _worth_timing(kind: str, networks: Sequence[Network]) -> list[str]:
    """Algorithms without those that are carried out as one before them, and of very many ranks with a formula alone."""
    names = different(kind, ALGORITHMS)
    if not any(isinstance(each, ManyRanks) and each.ranks > TABLE_DEVICES for each in networks):
        return names
    return [name for name in names if carried_out_by(kind, name) not in BY_RECURRENCE]


@lru_cache(maxsize=4096)
def _curve(network: Network, kind: str, algorithm: str) -> FloatArray:
    """float64: seconds at each of `SIZES`."""
    return np.array([network.seconds(kind, network.named(algorithm), size) for size in SIZES])


def _quickest_somewhere(networks: Sequence[Network], kind: str, names: Sequence[str]) -> FloatArray:
    """float64 [k, sizes]: seconds by each algorithm that is the quickest at one of `SIZES`, and maybe by others."""
    none = np.zeros(len(SIZES))
    least = {name: np.max([_least(each, kind, name) for each in networks] or [none], axis=0) for name in names}
    kept, quickest = [], np.full(len(SIZES), np.inf)
    for name in sorted(names, key=lambda name: float(np.log1p(1e9 * least[name]).sum())):
        if (least[name] < quickest).any():
            curve = np.max([_curve(each, kind, name) for each in networks] or [none], axis=0)
            if (curve < quickest).any():
                kept.append(curve)
                quickest = np.minimum(quickest, curve)
    return np.array(kept)


@lru_cache(maxsize=4096)
def _least(network: Network, kind: str, algorithm: str) -> FloatArray:
    """float64: seconds that it takes at least at each of `SIZES`."""
    return network.least_s(kind, network.named(algorithm), SIZES)


def _interpolated(size_bytes: float | FloatArray | IntArray, seconds: FloatArray) -> FloatArray:
    """Linear between `SIZES` and beyond them."""
    size = np.asarray(size_bytes, dtype=np.float64)
    slope = (seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])
    found = np.interp(size, SIZES, seconds) + np.maximum(size - SIZES[-1], 0.0) * slope
    return np.asarray(found, dtype=np.float64)
