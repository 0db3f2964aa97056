"""Devices on one memory, their hosts, and lanes, which communicate while the device beside them computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from env.device import Device, Link, both_ways
from graphs.errors import ClusterError
from graphs.records import HOST, LANE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from env.cluster import Cluster
    from graphs.arrays import IntArray

OUTER_LANE = "outer_lane"  # how the name of a lane for what goes between hosts ends
_FREE = {"bandwidth_bytes_per_s": float("inf"), "latency_s": 0.0}


def with_lanes(cluster: Cluster, *, outer: bool = False) -> Cluster:
    """`cluster`, where every device that has no lane yet has one, behind all other devices, and then outer ones.

    CPU cores whose collectives were measured get none: they copy and add up themselves, and compute nothing meanwhile.

    Args:
        outer: whether each gets an outer lane, too.
    """
    lanes = [
        replace(device, name=_name(device, suffix), kind=LANE, model="", memory_of=device.memory_of or device.name)
        for suffix in ((LANE, OUTER_LANE) if outer else (LANE,))
        for device, lane in zip(cluster.devices, lanes_of(cluster.devices, suffix).tolist(), strict=True)
        if lane < 0 and device.kind != LANE and not (cluster.collectives and device.kind == "cpu")
    ]
    links = [link for lane in lanes for link in both_ways(lane.name, lane.memory_of, **_FREE)]
    return replace(cluster, devices=(*cluster.devices, *lanes), links=(*cluster.links, *links))


def with_lanes_of(cluster: Cluster, other: Cluster) -> Cluster:
    """`cluster` with the lanes that the devices of another one have: none, one each, or outer ones, too."""
    if other.lane_of.max(initial=-1) < 0:
        return cluster
    return with_lanes(cluster, outer=bool(other.outer_lane_of.max() >= 0))


def without_lanes(cluster: Cluster) -> Cluster:
    """`cluster` as it was before `with_lanes`."""
    lanes = {device.name for device in cluster.devices if device.kind == LANE}
    devices = tuple(device for device in cluster.devices if device.name not in lanes)
    links = tuple(link for link in cluster.links if not lanes & {link.src, link.dst})
    return replace(cluster, devices=devices, links=links)


def memory_owner(devices: Sequence[Device]) -> IntArray:
    """int64 [D]: the number of the device in whose memory each one works; its own where it has a memory."""
    number = {device.name: d for d, device in enumerate(devices)}
    return np.array([number[device.memory_of or device.name] for device in devices], dtype=np.int64)


def check_memories(cluster: Cluster) -> None:
    """Refuse devices on a memory that is not there, that is described twice, or that has a way of its own to it.

    Raises:
        ClusterError: says which device, and what was expected.
    """
    number, at = cluster.device_index, _links_at(cluster)
    for device in cluster.devices:
        what = f"device {device.name!r}"
        if device.kind == LANE and not device.memory_of:
            raise ClusterError(f"{what} is a lane, and has no memory_of; name the device in whose memory it works.")
        if not device.memory_of:
            continue
        what = f"{what} has memory_of = {device.memory_of!r}"
        if device.memory_of not in number:
            raise ClusterError(f"{what}, which is no device of cluster {cluster.name!r}; name one of them.")
        owner = cluster.devices[number[device.memory_of]]
        if owner is device or owner.memory_of:
            own = "itself" if owner is device else f"which works in the memory of {owner.memory_of!r}"
            raise ClusterError(f"{what}, {own}; name a device that has a memory of its own.")
        for key in ("memory_bytes", "reserved_bytes"):
            if getattr(device, key) != getattr(owner, key):
                raise ClusterError(
                    f"{what}, but {key} = {getattr(device, key)}; expected that device's {getattr(owner, key)}."
                )
        ways = at.get(device.name, [])
        joined = {(link.src, link.dst) for link in ways if link.is_free}
        if joined != {(device.name, owner.name), (owner.name, device.name)} or len(ways) > len(joined):
            raise ClusterError(
                f"{what}; expected one link each way between the two, of infinite bandwidth and without latency, and "
                "no other link: it has the routes of the device whose memory it works in."
            )


def _links_at(cluster: Cluster) -> dict[str, list[Link]]:
    """The links that begin or end at each place."""
    result: dict[str, list[Link]] = {}
    for link in cluster.links:
        for end in {link.src, link.dst}:
            result.setdefault(end, []).append(link)
    return result


def lanes_of(devices: Sequence[Device], suffix: str) -> IntArray:
    """int64 [D]: the number of each device's lane, or outer lane, -1 where it has none."""
    number = {device.name: d for d, device in enumerate(devices) if device.kind == LANE}
    return np.array([number.get(_name(device, suffix), -1) for device in devices], dtype=np.int64)


def _name(device: Device, suffix: str) -> str:
    return f"{device.name}.{suffix}"


def host_devices(cluster: Cluster) -> IntArray:
    """int64 [D]: number of the CPU in each device's host, as names tell hosts apart; -1 for none, and for CPUs.

    Where one host has several CPUs, each device takes the one with the widest route, the first of equals.
    """
    result = np.full(cluster.n_devices, -1, dtype=np.int64)
    compute = set(cluster.compute_devices.tolist())
    of_host: dict[int, list[int]] = {}
    for d, device in enumerate(cluster.devices):
        if device.kind == HOST and d not in compute:
            of_host.setdefault(int(cluster.host_number[d]), []).append(d)
    for d in compute:
        near = of_host.get(int(cluster.host_number[d]), [])
        if near:
            result[d] = max(near, key=lambda cpu: cluster.routes[d, cpu].bandwidth_bytes_per_s if near[1:] else 0.0)
    return result
