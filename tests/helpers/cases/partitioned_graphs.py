"""Clusters and graphs in a row, for tests of partitioners."""

from __future__ import annotations

import itertools

from env.cluster import UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from graphs.opgraph import Op, OpGraph, Origin, Phase, Tensor


def gpus(count: int, memory: int = UNLIMITED_BYTES, bandwidth: float = 1.0) -> Cluster:
    """GPUs, each pair joined; each has a model of its own, m0, m1, ..., so that times may differ."""
    devices = tuple(Device(f"gpu{i}", "gpu", memory, {"float32": 1.0}, 1.0, model=f"m{i}") for i in range(count))
    pairs = itertools.combinations((d.name for d in devices), 2)
    return Cluster("gpus", devices, tuple(link for a, b in pairs for link in both_ways(a, b, bandwidth, 0.0)))


def hosts(count: int, each: int, inside: float, between: float) -> Cluster:
    """Hosts of GPUs, numbered across hosts (0, 2, 4 in the first of two), so that cluster order is not host order."""
    names = [f"gpu{i}" for i in range(count * each)]
    links: list[Link] = []
    for i, name in enumerate(names):
        links += both_ways(name, f"switch{i % count}", inside, 0.0)
    for h in range(count):
        links += both_ways(f"switch{h}", "network", between, 0.0)
    devices = tuple(Device(name, "gpu", UNLIMITED_BYTES, {"float32": 1.0}, 1.0) for name in names)
    return Cluster("hosts", devices, tuple(links))


def row(times: list[float], size_bytes: int = 1, kept_bytes: list[int] | None = None) -> OpGraph:
    """Ops one after the other."""
    kept = kept_bytes or [0] * len(times)
    ops = [Op(f"op{i}", time_s={"*": t}, kept_bytes=k) for i, (t, k) in enumerate(zip(times, kept, strict=True))]
    return OpGraph.build(ops, [Tensor(a.name, size_bytes, (b.name,)) for a, b in itertools.pairwise(ops)])


def training(times: list[float], sizes: list[int], kept: list[int]) -> OpGraph:
    """A chain forwards, backwards (twice the time, reading the forward op's output) and its updates by Adam."""
    n = len(times)
    ops = [Op(f"f{i}", time_s={"*": t}, kept_bytes=kept[i], colocation=i) for i, t in enumerate(times)]
    ops += [
        Op(f"b{i}", time_s={"*": 2 * times[i]}, phase=Phase.BACKWARD, forward_of=f"f{i}") for i in reversed(range(n))
    ]
    ops += [Op(f"u{i}", kind="optimizer.adam", time_s={"*": 0.0}, phase=Phase.UPDATE, colocation=i) for i in range(n)]
    tensors = [Tensor(f"f{i}", sizes[i], (*((f"f{i + 1}",) if i + 1 < n else ()), f"b{i}")) for i in range(n)]
    tensors += [Tensor(f"b{i}", sizes[i - 1], (f"b{i - 1}",)) for i in range(1, n)]
    tensors += [Tensor(f"b{i}", 0, (f"u{i}",)) for i in range(n)]
    return OpGraph.build(ops, tensors, origin=Origin(optimizer="adam"))
