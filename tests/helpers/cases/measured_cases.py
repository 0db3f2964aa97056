"""A small model and clusters of CPU cores, for tests of measuring."""

from __future__ import annotations

from env.cluster import Cluster, Device, both_ways


def cpu_cluster(devices: int = 1, kind: str = "cpu", model: str = "") -> Cluster:
    made = tuple(Device(f"d{i}", kind, 10**9, {"float32": 1e9}, 1e9, model=model) for i in range(devices))
    ways = tuple(link for i in range(devices) for j in range(i) for link in both_ways(f"d{i}", f"d{j}", 1e9, 1e-4))
    return Cluster("test", made, ways)
