"""Clusters of the same kind with fewer or more devices."""

from __future__ import annotations

import dataclasses
from itertools import combinations, permutations

import numpy as np
import pytest

from env.cluster import Cluster, Device, Link, both_ways
from env.resizing import part_of, resized
from graphs.errors import ClusterError


def names(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices]


def test_hosts_are_filled_one_after_the_other() -> None:
    cluster = Cluster.preset("2x8xH100-ib")
    five, nine = resized(cluster, 5), resized(cluster, 9)
    assert names(five) == [f"host0/gpu{i}" for i in range(5)]
    assert names(nine) == [*(f"host0/gpu{i}" for i in range(8)), "host1/gpu0"]
    assert resized(cluster, 16) == dataclasses.replace(cluster, name="2x8xH100-ib with 16")


def test_more_hosts_are_like_the_first_one() -> None:
    cluster = Cluster.preset("2x8xH100-ib")
    larger = resized(cluster, 60)
    assert len(larger.compute_devices) == 60
    assert names(larger)[:16] == names(cluster)
    assert names(larger)[-1] == "host7/gpu3"
    for one, other, like in (("host5/gpu1", "host5/gpu2", "host0/gpu2"), ("host5/gpu1", "host7/gpu2", "host1/gpu2")):
        pair = larger.device_index[one], larger.device_index[other]
        before = cluster.device_index["host0/gpu1"], cluster.device_index[like]
        assert larger.routes.latency_s[pair] == cluster.routes.latency_s[before]
        assert larger.routes.bandwidth_bytes_per_s[pair] == cluster.routes.bandwidth_bytes_per_s[before]
    assert resized(larger, 16).hash == cluster.hash


@pytest.mark.parametrize("name", ["8xH100-nvswitch", "4xV100-pcie", "4xK40-pcie"])
def test_without_hosts_more_devices_are_like_the_first_one(name: str) -> None:
    cluster = Cluster.preset(name)
    n = len(cluster.compute_devices)
    larger = resized(cluster, 2 * n + 1)
    assert len(larger.compute_devices) == 2 * n + 1
    assert [larger.devices[d].name for d in larger.compute_devices][-1] == f"gpu{2 * n}"
    pair, before = (larger.device_index["gpu0"], larger.device_index[f"gpu{2 * n}"]), (0, 1)
    assert larger.routes.latency_s[pair] == cluster.routes.latency_s[before]
    assert larger.routes.bandwidth_bytes_per_s[pair] == cluster.routes.bandwidth_bytes_per_s[before]
    assert resized(larger, n).hash == cluster.hash


def test_devices_that_are_all_linked_with_each_other_stay_so() -> None:
    gpus = [Device(f"gpu{i}", "gpu", 2**30, {"float32": 1e12}, 1e12) for i in range(3)]
    links = [link for a, b in combinations("012", 2) for link in both_ways(f"gpu{a}", f"gpu{b}", 1e9, 1e-6)]
    larger = resized(Cluster("mesh", tuple(gpus), tuple(links)), 5)
    ends = sorted((link.src, link.dst) for link in larger.links)
    assert ends == sorted(permutations([f"gpu{i}" for i in range(5)], 2))
    faster = replace_bandwidth(links)
    with pytest.raises(ClusterError, match="nor devices and links that are all alike"):
        resized(Cluster("mesh", tuple(gpus), tuple(faster)), 4)


def replace_bandwidth(links: list[Link]) -> list[Link]:
    """The same links, one of them faster."""
    return [dataclasses.replace(links[0], bandwidth_bytes_per_s=2e9), *links[1:]]


def test_the_cpus_of_a_host_come_with_it() -> None:
    gpus = [Device(f"host{h}/gpu0", "gpu", 2**30, {"float32": 1e12}, 1e12) for h in range(2)]
    cpus = [Device(f"host{h}/cpu", "cpu", 2**30, {"float32": 1e9}, 1e10) for h in range(2)]
    links = [link for d in (*gpus, *cpus) for link in both_ways(d.name, "net", 1e9, 1e-6)]
    cluster = Cluster("two", (*gpus, *cpus), tuple(links))
    assert names(resized(cluster, 1)) == ["host0/gpu0", "host0/cpu"]
    assert names(resized(cluster, 3))[-2:] == ["host2/gpu0", "host2/cpu"]


def test_what_cannot_be_repeated_is_refused() -> None:
    for name, n in (("8xV100-nvlink", 8), ("mixed-gpus", 4)):  # uneven links, and different devices
        with pytest.raises(ClusterError, match=f"has {n} devices, got {n + 1}, and neither several hosts .* alike"):
            resized(Cluster.preset(name), n + 1)
    two = Cluster.preset("2x8xH100-ib")
    slower = dataclasses.replace(two.devices[-1], memory_bytes_per_s=1e12, rates=None)
    with pytest.raises(ClusterError, match="its hosts are not alike; give at most 16"):
        resized(dataclasses.replace(two, devices=(*two.devices[:-1], slower)), 17)
    with pytest.raises(ClusterError, match="cannot have 0 devices"):
        resized(two, 0)


@pytest.mark.parametrize(
    ("preset", "chosen"), [("2x8xH100-ib", [0, 3, 8]), ("8xV100-nvlink", [0, 5, 7]), ("mixed-gpus", [1])]
)
def test_a_part_of_a_cluster_keeps_devices_and_routes(preset: str, chosen: list[int]) -> None:
    cluster = Cluster.preset(preset)
    part = part_of(cluster, np.array(chosen))
    wanted = [cluster.devices[d].name for d in chosen]
    assert set(wanted) <= set(part.device_index)
    assert len(part.devices) < len(cluster.devices)
    for a, b in permutations(wanted, 2):
        whole = cluster.routes[cluster.device_index[a], cluster.device_index[b]]
        found = part.routes[part.device_index[a], part.device_index[b]]
        assert [part.links[e] for e in found.links] == [cluster.links[e] for e in whole.links]


def test_a_part_of_a_cluster_has_the_memories_its_devices_work_in() -> None:
    cluster = Cluster.preset("8xH100-nvswitch").with_lanes()
    part = part_of(cluster, cluster.lane_of[[2, 4]])
    assert list(part.device_index) == ["gpu2", "gpu4", "gpu2.lane", "gpu4.lane"]
    assert part.memory_owner.tolist() == [0, 1, 0, 1]
