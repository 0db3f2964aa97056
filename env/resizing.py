"""`resized`: a cluster of the same kind with fewer or more devices; `part_of`: some of its devices."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np

from env.cluster import Cluster
from env.device import Device, Link
from graphs.arrays import IntArray
from graphs.errors import ClusterError

_HOST = re.compile(r"(.*?)(\d+)/")  # of "host0/gpu1": "host" and its number


def resized(cluster: Cluster, count: int) -> Cluster:
    """The cluster with `count` of its compute devices, the first ones; beyond that, with more hosts like its own.

    CPUs beside the devices of a host come along with them, and those outside of hosts stay.

    Raises:
        ClusterError: a count below 1, more devices than there are and no equal hosts to repeat, or what is left has no
            route without what is left out.
    """
    if count < 1:
        raise ClusterError(f"cluster {cluster.name!r} cannot have {count} devices; give 1 or more.")
    name = f"{cluster.name} with {count}"
    if count > len(cluster.compute_devices):
        cluster = _with_hosts(cluster, count)
    names = [cluster.devices[d].name for d in cluster.compute_devices.tolist()]
    hosts = {None, *map(_host, names[:count])}
    gone = {*names[count:], *(device.name for device in cluster.devices if _host(device.name) not in hosts)}
    return replace(
        cluster,
        name=name,
        devices=tuple(device for device in cluster.devices if device.name not in gone),
        links=tuple(link for link in cluster.links if not {link.src, link.dst} & gone),
    )


def part_of(cluster: Cluster, devices: IntArray) -> Cluster:
    """The devices with these numbers, and those that routes among them or their memories need, on the same routes."""
    chosen = np.unique(devices)
    source, target = (pairs.reshape(-1) for pairs in np.meshgrid(chosen, chosen, indexing="ij"))
    used = set(cluster.routes.links_of(source, target)[1].tolist())
    ends = {end for each in used for end in (cluster.links[each].src, cluster.links[each].dst)}
    kept = {cluster.devices[d].name for d in [*chosen.tolist(), *cluster.memory_owner[chosen].tolist()]}
    kept |= ends & cluster.device_index.keys()
    return Cluster(
        name=cluster.name,
        devices=tuple(device for device in cluster.devices if device.name in kept),
        links=tuple(
            link
            for number, link in enumerate(cluster.links)
            if number in used or (link.is_free and link.src in kept and link.dst in kept)
        ),
        communication=cluster.communication,
    )


def _with_hosts(cluster: Cluster, count: int) -> Cluster:
    """The cluster with as many more hosts as `count` devices need, which are like its first one.

    Raises:
        ClusterError: it has no hosts, or they are not alike.
    """
    hosts = dict.fromkeys(host for device in cluster.devices if (host := _host(device.name)) is not None)
    has, named = len(cluster.compute_devices), f"cluster {cluster.name!r}"
    if any(_host(device.name) is None for device in cluster.devices) or len(hosts) < 2:
        raise ClusterError(
            f"{named} has {has} devices, got {count}, and no hosts of which it could have more (devices named "
            f"host0/..., host1/...); give at most {has}, or a cluster of several hosts."
        )
    first, *others = hosts
    pattern = _part(cluster, first)
    if any(_renamed(pattern, first, other) != _part(cluster, other) for other in others):
        raise ClusterError(f"{named} has {has} devices, got {count}, and its hosts are not alike; give at most {has}.")
    of_each = has // len(hosts)
    stem = _HOST.match(f"{first}/")
    assert stem is not None
    new = (f"{stem[1]}{number}" for number in itertools.count() if f"{stem[1]}{number}" not in hosts)
    parts = [_renamed(pattern, first, name) for name in itertools.islice(new, -(-count // of_each) - len(hosts))]
    return replace(
        cluster,
        devices=(*cluster.devices, *(device for devices, _ in parts for device in devices)),
        links=(*cluster.links, *(link for _, links in parts for link in links)),
    )


def _host(name: str) -> str | None:
    """``"host0"`` of ``"host0/gpu1"``; None of a name without a host."""
    found = _HOST.match(name)
    return None if found is None else found[0].removesuffix("/")


def _part(cluster: Cluster, host: str) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The devices of a host, and the links that begin or end there."""
    devices = tuple(device for device in cluster.devices if _host(device.name) == host)
    return devices, tuple(link for link in cluster.links if host in (_host(link.src), _host(link.dst)))


def _renamed(
    part: tuple[tuple[Device, ...], tuple[Link, ...]], host: str, other: str
) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """A host's devices and links under the name of another host."""

    def name(end: str) -> str:
        return other + end.removeprefix(host) if _host(end) == host else end

    devices = tuple(replace(d, name=name(d.name), memory_of=name(d.memory_of)) for d in part[0])
    return devices, tuple(replace(link, src=name(link.src), dst=name(link.dst)) for link in part[1])
