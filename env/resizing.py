"""`resized`: a cluster of the same kind with fewer or more devices; `part_of`, `one_of_each`: some of its devices."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np

from env.cluster import Cluster
from env.device import HOST, Device, Link, host_of
from graphs.arrays import IntArray
from graphs.errors import ClusterError

_NUMBER = re.compile(r"\d+$")


def resized(cluster: Cluster, count: int) -> Cluster:
    """The cluster with `count` of its compute devices, the first ones; beyond that, with more hosts like its own.

    CPUs beside the devices of a host come along with them, and those outside of hosts stay. A cluster without hosts
    gets more devices like its own, linked as they are: a switch is taken to have as many ports.

    Raises:
        ClusterError: a count below 1, more devices than there are and no equal hosts or devices to repeat, or what is
            left has no route without what is left out.
    """
    if count < 1:
        raise ClusterError(f"cluster {cluster.name!r} cannot have {count} devices; give 1 or more.")
    name = f"{cluster.name} with {count}"
    if count > len(cluster.compute_devices):
        has_hosts = any(host_of(device.name) is not None for device in cluster.devices)
        cluster = _with_hosts(cluster, count) if has_hosts else _with_devices(cluster, count)
    names = [cluster.devices[d].name for d in cluster.compute_devices.tolist()]
    hosts = {None, *map(host_of, names[:count])}
    gone = {*names[count:], *(device.name for device in cluster.devices if host_of(device.name) not in hosts)}
    return replace(
        cluster,
        name=name,
        devices=tuple(device for device in cluster.devices if device.name not in gone),
        links=tuple(link for link in cluster.links if not {link.src, link.dst} & gone),
    )


def part_of(cluster: Cluster, devices: IntArray) -> Cluster:
    """The devices with these numbers, and those that routes among them or their memories need, on the same routes."""
    kept, links = used_among(cluster, devices)
    return Cluster(
        name=cluster.name,
        devices=tuple(cluster.devices[d] for d in kept),
        links=tuple(cluster.links[number] for number in links),
        communication=cluster.communication,
        collectives=cluster.collectives,
        fabric=cluster.fabric,
    )


def one_of_each(cluster: Cluster) -> Cluster:
    """The first device of each kind, and what routes among those need: what one device takes, it takes there, too."""
    return part_of(cluster, np.unique(cluster.alike, return_index=True)[1])


def used_among(cluster: Cluster, devices: IntArray) -> tuple[list[int], list[int]]:
    """``(devices, links)`` of `part_of`, by number and increasing."""
    chosen = np.unique(devices)
    source, target = (pairs.reshape(-1) for pairs in np.meshgrid(chosen, chosen, indexing="ij"))
    used = set(cluster.routes.links_of(source, target)[1].tolist())
    ends = {end for each in used for end in (cluster.links[each].src, cluster.links[each].dst)}
    kept = {*chosen.tolist(), *cluster.memory_owner[chosen].tolist()}
    kept |= {cluster.device_index[end] for end in ends if end in cluster.device_index}
    names = {cluster.devices[d].name for d in kept}
    used |= {k for k in cluster.free_links if cluster.links[k].src in names and cluster.links[k].dst in names}
    return sorted(kept), sorted(used)


def _with_hosts(cluster: Cluster, count: int) -> Cluster:
    """The cluster with as many more hosts as `count` devices need, which are like its first one.

    Raises:
        ClusterError: it has no hosts, or they are not alike.
    """
    hosts = dict.fromkeys(host for device in cluster.devices if (host := host_of(device.name)) is not None)
    has, named = len(cluster.compute_devices), f"cluster {cluster.name!r}"
    if any(host_of(device.name) is None for device in cluster.devices) or len(hosts) < 2:
        raise ClusterError(
            f"{named} has {has} devices, got {count}, and not several hosts that have all of them (devices named "
            f"host0/..., host1/...); give at most {has}, or a cluster of several hosts."
        )
    first, *others = hosts
    pattern = _part(cluster, first)
    if any(_renamed(pattern, first, other) != _part(cluster, other) for other in others):
        raise ClusterError(f"{named} has {has} devices, got {count}, and its hosts are not alike; give at most {has}.")
    of_each = has // len(hosts)
    stem = HOST.match(f"{first}/")
    assert stem is not None
    new = (f"{stem[1]}{number}" for number in itertools.count() if f"{stem[1]}{number}" not in hosts)
    parts = [_renamed(pattern, first, name) for name in itertools.islice(new, -(-count // of_each) - len(hosts))]
    return replace(
        cluster,
        devices=(*cluster.devices, *(device for devices, _ in parts for device in devices)),
        links=(*cluster.links, *(link for _, links in parts for link in links)),
    )


def _with_devices(cluster: Cluster, count: int) -> Cluster:
    """A cluster without hosts and with `count` compute devices, the new ones like its first one.

    Raises:
        ClusterError: its devices or their links are not alike.
    """
    names = [cluster.devices[d].name for d in cluster.compute_devices.tolist()]
    device, own = cluster.devices[cluster.device_index[names[0]]], _links_outside(cluster, names, names[0])
    between: dict[tuple[str, str], list[Link]] = {pair: [] for pair in itertools.permutations(names, 2)}
    for link in cluster.links:
        if (link.src, link.dst) in between:
            between[link.src, link.dst].append(replace(link, src=names[0], dst=names[1]))
    kinds = list(between.values())
    is_alike = all(
        replace(cluster.devices[cluster.device_index[name]], name=device.name) == device
        and _links_outside(cluster, names, name) == own
        for name in names
    )
    if not is_alike or any(kind != kinds[0] for kind in kinds):
        raise ClusterError(
            f"cluster {cluster.name!r} has {len(names)} devices, got {count}, and neither several hosts (devices named "
            "host0/..., host1/...) nor devices and links that are all alike, of which it could have more; give at "
            f"most {len(names)}."
        )
    stem = _NUMBER.sub("", names[0])
    free = (f"{stem}{number}" for number in itertools.count() if f"{stem}{number}" not in cluster.device_index)
    new = list(itertools.islice(free, count - len(names)))
    links = [_relinked(link, names[0], name) for name in new for link in own]
    for a, b in itertools.permutations([*names, *new], 2) if kinds and kinds[0] else ():
        if (a, b) not in between:
            links += [replace(link, src=a, dst=b) for link in kinds[0]]
    return replace(
        cluster,
        devices=(*cluster.devices, *(replace(device, name=name) for name in new)),
        links=(*cluster.links, *links),
    )


def _links_outside(cluster: Cluster, names: list[str], name: str) -> list[Link]:
    """The links between a device and what is no compute device, under the name of the first device."""
    others = set(names) - {name}
    outside = (link for link in cluster.links if name in (link.src, link.dst) and not {link.src, link.dst} & others)
    return [_relinked(link, name, names[0]) for link in outside]


def _relinked(link: Link, name: str, other: str) -> Link:
    """A link of one device as that of another."""
    return replace(link, src=other if link.src == name else link.src, dst=other if link.dst == name else link.dst)


def _part(cluster: Cluster, host: str) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The devices of a host, and the links that begin or end there."""
    devices = tuple(device for device in cluster.devices if host_of(device.name) == host)
    return devices, tuple(link for link in cluster.links if host in (host_of(link.src), host_of(link.dst)))


def _renamed(
    part: tuple[tuple[Device, ...], tuple[Link, ...]], host: str, other: str
) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """A host's devices and links under the name of another host."""

    def name(end: str) -> str:
        return other + end.removeprefix(host) if host_of(end) == host else end

    devices = tuple(replace(d, name=name(d.name), memory_of=name(d.memory_of)) for d in part[0])
    return devices, tuple(replace(link, src=name(link.src), dst=name(link.dst)) for link in part[1])
