"""Devices that a strategy uses, and those that a search should try: not every device is worth having."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from env.cluster import LANE, Cluster
from env.problem import Problem
from env.routes import TABLE_DEVICES
from graphs.arrays import BoolArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.derived import Derived
from graphs.transforms.splitting.cuts import shares
from graphs.transforms.strategy import Strategy


def devices_of(cluster: Cluster, strategy: Strategy) -> IntArray:
    """int64: numbers of the devices that a strategy may use, in its order: those that it names, else the cluster's.

    Raises:
        StrategyError: fewer than it needs, an unknown name, or one of a lane.
    """
    devices = cluster.compute_devices
    if strategy.device_names:
        known = [device.name for device in cluster.devices if device.kind != LANE]
        unknown = next((name for name in strategy.device_names if name not in known), None)
        if unknown is not None:
            raise StrategyError(
                f"strategy {strategy.text!r} names device {unknown!r}, and cluster {cluster.name!r} has no such device "
                f"that computes; it has {', '.join(known[:16])}{' and others' if len(known) > 16 else ''}."
            )
        devices = np.array([cluster.device_index[name] for name in strategy.device_names], dtype=np.int64)
    if strategy.devices > len(devices):
        left_out = len(cluster.devices) > len(devices) and not strategy.device_names
        hint = " (CPUs beside other devices are left out unless devices= names them)" if left_out else ""
        raise StrategyError(
            f"strategy {strategy.text!r} needs {strategy.devices} devices, and cluster {cluster.name!r} has "
            f"{len(devices)}{hint}; take a smaller mesh or a larger cluster."
        )
    return devices


def leaving_hosts(cluster: Cluster, grid: IntArray) -> BoolArray:
    """bool [stages, axes + 1]: whether some group of ranks along each axis of the mesh is on several hosts.

    The last column, that of no axis, is False.

    Args:
        grid: int64 [stages, *sizes of the mesh], devices by number.
    """
    host = cluster.host_number[grid]
    spread = [(host != host.take([0], axis)).reshape(len(host), -1).any(axis=1) for axis in range(1, host.ndim)]
    return np.stack([*spread, np.zeros(len(host), dtype=np.bool_)], axis=1)


def device_subsets(cluster: Cluster, n: int) -> Iterator[tuple[str, ...]]:
    """Sets of n devices to use, most promising first; () for the first n of the cluster's own order.

    Devices that are alike give one set, of those that lie close together; others give the fastest, those that lie
    closest to the fastest, and the cluster's first: slow ones are left out first.
    """
    compute = cluster.compute_devices.tolist()
    if n > len(compute) or n < 1:
        return
    by_speed = sorted(compute, key=lambda d: -_peak_flop_s(cluster, d))  # stable: equals stay in the cluster's order
    chosen = [_close_together(cluster, by_speed, n)]
    if not are_alike(cluster, compute):
        chosen = [sorted(by_speed[:n], key=compute.index), *chosen, compute[:n]]
    default = cluster.compute_devices[:n].tolist()
    named = ((() if found == default else tuple(cluster.devices[d].name for d in found)) for found in chosen)
    yield from dict.fromkeys(named)


def natural_groups(cluster: Cluster) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Devices that people try first: all, those of each host, those of each kind.

    Only the first of the groups with the same kinds of devices counts. Each is given by its number of devices and their
    names; () where these are the cluster's first ones.
    """
    compute = cluster.compute_devices
    by_kind = [compute[cluster.alike[compute] == kind].tolist() for kind in np.unique(cluster.alike[compute])]
    hosts = _hosts(cluster, compute) if len(compute) > 1 else []
    seen: set[tuple[int, ...]] = set()
    for group in (compute.tolist(), *hosts, *by_kind):
        kinds = tuple(sorted(cluster.alike[group].tolist()))
        if len(group) > 1 and kinds not in seen:
            seen.add(kinds)
            is_first = group == compute[: len(group)].tolist()
            yield len(group), () if is_first else tuple(cluster.devices[d].name for d in group)


def swapped(cluster: Cluster, used: IntArray) -> Iterator[IntArray]:
    """int64: devices in another order, or others: each with the next that is unlike it; hosts within or across axes."""
    figures = cluster.alike[used].tolist()
    kinds = set(figures)
    for i, own in enumerate(figures if len(kinds) > 1 else ()):
        other = next((j for j in range(i + 1, len(figures)) if figures[j] != own), None)
        if other is not None:
            result = used.copy()
            result[[i, other]] = used[[other, i]]
            yield result
    unused = sorted(set(cluster.compute_devices.tolist()) - set(used.tolist()))
    for d in (d for d in unused if kinds != {int(cluster.alike[d])}):
        unlike = next((i for i, own in enumerate(figures) if own != cluster.alike[d]), None)
        if unlike is not None:
            result = used.copy()
            result[unlike] = d
            yield result
    hosts = _hosts(cluster, used)
    if len(hosts) > 1 and len({len(host) for host in hosts}) == 1:
        grid = np.array(hosts, dtype=np.int64)
        yield grid.reshape(-1)
        yield grid.T.reshape(-1)


def proportional_shares(graph: OpGraph, cluster: Cluster, devices: IntArray) -> tuple[int, ...]:
    """Samples of each replica, in proportion to how fast its slowest device computes; () for equal shares.

    Args:
        devices: int64 [replicas, ...], the devices of each.
    """
    replicas = len(devices)
    samples = graph.origin.batch_size or 16 * replicas
    problem = problem_of(graph, cluster)
    on_one_s = problem.kind_s.sum(axis=0)
    speed = 1.0 / np.maximum(on_one_s[problem.kind_of[devices].reshape(replicas, -1)].max(axis=1), 1e-300)
    weights = tuple(np.maximum(np.rint(1e6 * speed / speed.max()), 1).astype(np.int64).tolist())
    if samples < replicas or len(set(weights)) == 1:
        return ()
    return whole_shares(samples, weights)


def whole_shares(samples: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """The shares that give each replica as many samples as these do, in the smallest numbers; () for equal ones."""
    found = np.rint(shares(samples, len(weights), weights) * samples).astype(np.int64)
    return () if len(set(found.tolist())) == 1 else tuple((found // np.gcd.reduce(found)).tolist())


def are_alike(cluster: Cluster, devices: Sequence[int]) -> bool:
    """Whether devices compute alike and have as much memory."""
    return len(np.unique(cluster.alike[np.asarray(devices)])) <= 1


@lru_cache(maxsize=8)
def recomputed(graph: OpGraph, patterns: tuple[str, ...], in_time: bool, stage: bytes = b"") -> Derived:
    """The graph with what the patterns match run again, which many strategies ask for; without any as it is.

    Args:
        in_time: the batch is to be cut into micro-batches.
        stage: int64 [n], of every op, whose second runs are to read nothing of another stage's.
    """
    from graphs.transforms.recomputing import recompute  # seldom needed

    if not patterns:
        return Derived.identity(graph)
    return recompute(graph, patterns, in_time, np.frombuffer(stage, dtype=np.int64) if stage else None)


@lru_cache(maxsize=8)
def problem_of(graph: OpGraph, cluster: Cluster) -> Problem:
    """The problem of placing a graph on a cluster, whose times of ops many strategies ask for."""
    return Problem(graph, cluster)


def _peak_flop_s(cluster: Cluster, device: int) -> float:
    given = cluster.devices[device]
    return max(given.peak_flops.values(), default=0.0) * given.compute_efficiency


def _close_together(cluster: Cluster, devices: Sequence[int], n: int) -> list[int]:
    """n of the devices: the first, and then whichever is reached at the greatest bandwidth from those chosen.

    Beyond `TABLE_DEVICES` devices, the first ones.
    """
    if n == len(devices) or len(devices) > TABLE_DEVICES:
        return sorted(devices[:n])
    left, reach = np.array(devices), np.full(len(devices), np.inf)
    chosen: list[int] = []
    while len(chosen) < n:
        best = int(reach.argmax())
        chosen.append(int(left[best]))
        left, reach = np.delete(left, best), np.delete(reach, best)
        reach = np.minimum(reach, cluster.routes.bandwidth_bytes_per_s[chosen[-1], left])
    return sorted(chosen)


def _hosts(cluster: Cluster, devices: IntArray) -> list[list[int]]:
    """Devices in groups whose links are faster than the slowest; each in the cluster's order."""
    if len(devices) > TABLE_DEVICES:
        from env.communication.times import host_size  # loads the simulator

        size = host_size(cluster, devices.tolist())
        return devices.reshape(-1, size).tolist() if size else [devices.tolist()]
    bandwidth = cluster.routes.bandwidth_bytes_per_s[np.ix_(devices, devices)]
    least = bandwidth.min()
    hosts: list[list[int]] = []
    left = sorted(devices.tolist())
    while left:
        host = [d for d in left if d == left[0] or cluster.routes.bandwidth_bytes_per_s[left[0], d] > least]
        hosts.append(host)
        left = [d for d in left if d not in host]
    return hosts
