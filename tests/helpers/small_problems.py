"""Two branches of ops and the small clusters that tests place them on."""

from __future__ import annotations

from env.cluster import Cluster, Device, both_ways
from graphs.opgraph import Op, OpGraph, Tensor

MIB = 2**20


def device(name: str, memory_bytes: int = 100 * MIB, kind: str = "gpu") -> Device:
    return Device(name, kind, memory_bytes, {"float32": 1e12}, 1e12)


def cluster_of(*devices: Device, name: str = "pair") -> Cluster:
    links = [link for d in devices for link in both_ways(d.name, "switch", 1e9, 1e-6)] if len(devices) > 1 else []
    return Cluster(name, devices, tuple(links))


def two_branches(kept_bytes: int = MIB, name: str = "two_branches") -> OpGraph:
    """a feeds b and c of 1 s each, which feed d: two devices take 3 s plus next to nothing, one takes 4 s."""
    ops = [Op(n, kept_bytes=kept_bytes, time_s={"*": 1.0}) for n in "abcd"]
    return OpGraph.build(
        ops, [Tensor("a", 1000, ("b", "c")), Tensor("b", 1000, ("d",)), Tensor("c", 1000, ("d",))], name
    )


PAIR = cluster_of(device("gpu0"), device("gpu1"))
