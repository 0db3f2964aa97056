"""How long one collective takes on a cluster by each algorithm: spelt out, and scored by the simulator.

Unlike the formulas beside it, this sees contention: ports shared by several devices, routes that meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import networkx as nx
import numpy as np

from env.cluster import Cluster
from env.communication.as_used import AS_USED, AsUsed
from env.communication.formulas import EXPANDED_RANKS, fused_s
from env.communication.least_times import different, first_quickest, least_s
from env.plan import Plan
from env.problem import Problem
from env.routes import PAIRED_DEVICES
from env.simulation.simulator import Score, Simulator
from graphs.arrays import FloatArray, IntArray
from graphs.errors import ClusterError
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.transforms.collectives import ALGORITHMS, carried_out_by, reduce
from graphs.transforms.collectives.expansion import ITEM_BYTES, MOVED_PER_BYTE
from graphs.transforms.collectives.template import template
from graphs.transforms.derived import Collective, Derived

_EQUAL = 1e-3  # times that differ by no larger share are equally quick
SIZES = tuple(2**k for k in range(10, 31))  # 1 KiB to 1 GiB


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of one kind of collective on devices of a cluster.

    Attributes:
        kind: such as ``"all_reduce"``.
        devices: names of the ranks' devices.
        sizes: bytes of the whole tensor, increasing.
        seconds: by algorithm, one for each size; under `AS_USED` alone where the cluster has figures of it.
    """

    kind: str
    devices: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    @property
    def best(self) -> tuple[str, ...]:
        """The quickest algorithm for each size; of equally quick ones that which is named first."""
        # Parts of whole bytes make times differ by a little more than rounding: such are equal.
        least = [min(times) * (1.0 + _EQUAL) for times in zip(*self.seconds.values(), strict=True)]
        return tuple(
            next(name for name, times in self.seconds.items() if times[k] <= most) for k, most in enumerate(least)
        )

    @property
    def crossings(self) -> tuple[tuple[int, str], ...]:
        """The size from which on each algorithm is the quickest, increasing."""
        pairs = zip(self.best, self.sizes, strict=True)
        return tuple((next(run)[1], name) for name, run in groupby(pairs, key=lambda pair: pair[0]))


def collective_times(
    cluster: Cluster,
    ranks: int | None = None,
    kind: str = "all_reduce",
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = ALGORITHMS,
) -> CollectiveTimes:
    """Time one collective for each size and algorithm on the first devices of a cluster, CPUs beside others left out.

    They are scored by the simulator, or as the cluster's figures say, whatever the algorithm.

    Args:
        ranks: how many devices take part; None: all.

    Raises:
        ClusterError: fewer than two devices, or more ranks than devices.
        UnknownNameError: an unknown kind or algorithm.
    """
    devices = cluster.compute_devices.tolist()
    if len(devices) < 2:
        raise ClusterError(f"cluster {cluster.name!r} has one device that computes; a collective needs two or more.")
    if ranks is not None and not 2 <= ranks <= len(devices):
        raise ClusterError(
            f"{ranks} ranks were asked for on cluster {cluster.name!r}, which has {len(devices)} devices that compute; "
            f"give 2 to {len(devices)}."
        )
    chosen = devices[:ranks]
    used = AsUsed.of(cluster, np.array([chosen], dtype=np.int64))
    for name in algorithms:
        carried_out_by(kind, name)
    if used is not None and used.knows(kind):
        found = tuple(used.seconds(kind, np.array(sizes)).tolist())
        return CollectiveTimes(kind, tuple(cluster.devices[d].name for d in chosen), tuple(sizes), {AS_USED: found})
    names = [with_hosts(name, cluster, chosen) for name in algorithms]
    seconds = {name: tuple(lone_collective_s(cluster, chosen, kind, size, name) for size in sizes) for name in names}
    return CollectiveTimes(kind, tuple(cluster.devices[d].name for d in chosen), tuple(sizes), seconds)


def quickest(
    cluster: Cluster, collectives: Sequence[Collective], devices: Sequence[Sequence[int]], algorithms: Sequence[str]
) -> tuple[str, ...]:
    """The algorithm that is the quickest for each collective alone, its size rounded up to a power of two.

    Args:
        devices: of each collective's ranks, by number.
        algorithms: among which to choose.
    """
    found: dict[tuple[str, tuple[int, ...], int], str] = {}
    result = []
    for collective, ranks in zip(collectives, devices, strict=True):
        kind, size = collective.kind, 1 << max(collective.bytes - 1, 0).bit_length()
        if _is_as_used(cluster, [ranks], kind):
            result.append(algorithms[0])  # all are one
            continue
        key = kind, tuple(ranks), size
        if key not in found:
            found[key] = first_quickest(
                different(kind, (with_hosts(name, cluster, ranks) for name in algorithms)),
                lambda name: float(at_least_s(cluster, [ranks], kind, name, [size])[0]),  # noqa: B023 - called here
                lambda name: lone_collective_s(cluster, ranks, kind, size, name),  # noqa: B023
            )
        result.append(found[key])
    return tuple(result)


def lone_collective(kind: str, ranks: int, size_bytes: int, *, in_place: bool = False, groups: int = 1) -> Derived:
    """A graph of nothing else: rank r makes a tensor, and its part of a collective reads those of all ranks.

    Args:
        groups: how many such collectives there are, side by side; their ranks are numbered one group after the other.
    """
    given = given_bytes(kind, ranks, size_bytes)
    total = groups * ranks
    of_group = [range(g * ranks, (g + 1) * ranks) for g in range(groups)]
    ops = [Op(f"make{r}", kernels=0) for r in range(total)]
    ops += [Op(f"use{r}", kind=kind, kernels=0) for r in range(total)]
    readers = [tuple(f"use{r}" for r in members) for members in of_group]
    tensors = [Tensor(f"make{r}", given, readers[r // ranks], in_place=in_place) for r in range(total)]
    tensors += [Tensor(f"use{r}", size_bytes, in_place=in_place) for r in range(total)]
    collectives = (Collective(kind, "", tuple(total + r for r in members), size_bytes) for members in of_group)
    alone = Derived.identity(OpGraph.build(ops, tensors, name=kind))
    return replace(alone, part=np.tile(np.arange(total), 2), collectives=tuple(collectives))


def given_bytes(kind: str, ranks: int, size_bytes: int) -> int:
    """Bytes that each rank gives to a collective of so many bytes."""
    return size_bytes // ranks if kind in ("all_gather", "all_to_all", "shift") else size_bytes


def host_size(cluster: Cluster, devices: Sequence[int]) -> int:
    """How many devices in a row the fastest routes join, as those of a host; 0 where there are no such groups."""
    chosen = np.array(devices, dtype=np.int64)
    if len(chosen) > PAIRED_DEVICES:
        return _host_size_in_a_row(cluster, chosen)
    _, bandwidth = cluster.routes.figures_of(chosen[:, None], chosen[None, :])
    np.fill_diagonal(bandwidth, 0.0)
    if bandwidth.size == 0 or (bandwidth[~np.eye(len(chosen), dtype=np.bool_)] == bandwidth.max()).all():
        return 0
    near = nx.from_numpy_array((bandwidth == bandwidth.max()).astype(int))
    hosts = [sorted(host) for host in nx.connected_components(near)]
    size = len(hosts[0])
    regular = all(host == list(range(host[0], host[0] + size)) and host[0] % size == 0 for host in hosts)
    return size if regular and 1 < size < len(chosen) else 0


def _host_size_in_a_row(cluster: Cluster, devices: IntArray) -> int:
    """`host_size` of many devices, by the routes from each to the next and from the first to all."""
    _, following = cluster.routes.figures_of(devices[:-1], devices[1:])
    _, from_first = cluster.routes.figures_of(devices[:1], devices[1:])
    fastest = max(following.max(), from_first.max())
    begins = np.concatenate([[0], 1 + np.flatnonzero(following < fastest), [len(devices)]])
    sizes = np.diff(begins)
    size = int(sizes[0])
    regular = bool((sizes == size).all() and (from_first[size - 1 :] < fastest).all())
    return size if regular and 1 < size < len(devices) else 0


def lone_collective_s(cluster: Cluster, devices: Sequence[int], kind: str, size_bytes: int, algorithm: str) -> float:
    """Seconds of one collective among devices, by number, of a cluster where nothing else happens."""
    return side_by_side(cluster, [devices], kind, size_bytes, algorithm).step_time_s


def side_by_side(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: str, size_bytes: int, algorithm: str
) -> Score:
    """Equal collectives that begin together, one in each of several groups of equally many devices.

    Memory is that of what arrives from other ranks; what is given, and the result, lie in bytes that are kept.
    """
    members, ranks = tuple(tuple(group) for group in groups), len(groups[0])
    if _is_spelt_out(cluster, groups, kind):
        return _spelt_out(cluster, members, kind, algorithm).score(size_bytes)
    alone = lone_collective(kind, ranks, size_bytes, in_place=True, groups=len(groups))
    derived = reduce(alone, algorithm, fused_s(cluster, alone.collectives, [algorithm] * len(groups), groups))
    return Simulator(Problem(derived.graph, cluster)).score(_placed(members, derived))


def at_least_s(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: str, algorithm: str, sizes: Sequence[int]
) -> FloatArray:
    """float64 [sizes]: what `side_by_side` takes at least; 0 where the cluster has figures of it, or a formula."""
    if _is_spelt_out(cluster, groups, kind):
        return least_s(cluster, groups, kind, algorithm, sizes)
    return np.zeros(len(sizes))


def _is_spelt_out(cluster: Cluster, groups: Sequence[Sequence[int]], kind: str) -> bool:
    return 1 < len(groups[0]) <= EXPANDED_RANKS and not _is_as_used(cluster, groups, kind)


def _is_as_used(cluster: Cluster, groups: Sequence[Sequence[int]], kind: str) -> bool:
    figures = AsUsed.of(cluster, np.array([list(group) for group in groups], dtype=np.int64))
    return figures is not None and figures.knows(kind)


class _SpeltOut:
    """Equal collectives side by side as ops and tensors: made once, and scored at any size.

    The simulator takes a small part of the time that making such a graph takes.
    """

    def __init__(self, cluster: Cluster, groups: tuple[tuple[int, ...], ...], kind: str, algorithm: str) -> None:
        ranks = len(groups[0])
        self.kind, self.ranks, self.groups = kind, ranks, len(groups)
        self.form = template(kind, algorithm, ranks)
        derived = _without_bytes(kind, algorithm, ranks, len(groups))
        self.plan = _placed(groups, derived)
        self.simulator = Simulator(Problem(derived.graph, cluster))
        self.by_producer = np.argsort(self.form.tensor_producer, kind="stable")
        dtype = derived.graph.dtypes[0]
        kinds = self.simulator.problem.kinds
        self.flops_per_s = np.array([device.flops_per_s(dtype) for device in kinds])
        self.bytes_per_s = np.array([device.bytes_per_s for device in kinds])

    def score(self, size_bytes: int) -> Score:
        """The score that `side_by_side` returns."""
        size = np.array([size_bytes], dtype=np.int64)
        # First what ranks give; then of each group what the algorithm makes of it, and what its ranks have in the end.
        adds = self._laid_out(0, self.form.op_bytes(size)[0], 0)[:, None]
        seconds = np.maximum(adds / ITEM_BYTES / self.flops_per_s, MOVED_PER_BYTE * adds / self.bytes_per_s)
        given = given_bytes(self.kind, self.ranks, size_bytes)
        tensors = self._laid_out(given, self.form.tensor_bytes(size)[0][self.by_producer], size_bytes)
        return self.simulator.resized(seconds, tensors).score(self.plan)

    def _laid_out(self, first: int, between: IntArray, last: int) -> IntArray:
        """One number for each op, or tensor, of the graph."""
        group = np.concatenate([between, np.full(self.ranks, last)])
        return np.concatenate([np.full(self.ranks * self.groups, first), np.tile(group, self.groups)])


@lru_cache(maxsize=1024)
def _spelt_out(cluster: Cluster, groups: tuple[tuple[int, ...], ...], kind: str, algorithm: str) -> _SpeltOut:
    return _SpeltOut(cluster, groups, kind, algorithm)


@lru_cache(maxsize=1024)
def _without_bytes(kind: str, algorithm: str, ranks: int, groups: int) -> Derived:
    return reduce(lone_collective(kind, ranks, 0, in_place=True, groups=groups), algorithm)


def _placed(groups: tuple[tuple[int, ...], ...], derived: Derived) -> Plan:
    return Plan(np.array([d for group in groups for d in group], dtype=np.int64)[derived.part])


def with_hosts(algorithm: str, cluster: Cluster, devices: Sequence[int]) -> str:
    """The hierarchical algorithm with the hosts of the devices for groups, where there are any."""
    size = host_size(cluster, devices) if algorithm == "hierarchical" else 0
    return f"{algorithm}{size}" if size else algorithm
