"""Figures of a cluster, each with what a change of it does to the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from env.cluster import Cluster
from env.device import Device, Link, host_of

_HOST, _NUMBER = re.compile(r"^.*/"), re.compile(r"\d+$")


@dataclass(frozen=True)
class ClusterFigure:
    """One figure of all devices of a model, or of all links of a kind.

    Attributes:
        name: in words, e.g. ``"bandwidth of links between gpu and infiniband"``.
        more_helps: a larger value is better; of latencies and overheads a smaller one.
        scaled: the cluster with the figure times a factor.
    """

    name: str
    more_helps: bool
    scaled: Callable[[float], Cluster]


def rates(cluster: Cluster) -> Iterator[ClusterFigure]:
    """The figures that times depend on; those that are 0 or infinite left out."""
    compute = [cluster.devices[d] for d in cluster.compute_devices.tolist()]
    for model in dict.fromkeys(map(_model, compute)):
        yield ClusterFigure(f"FLOP rate of {model}", True, partial(_devices_scaled, cluster, model, _faster))
        yield ClusterFigure(f"memory bandwidth of {model}", True, partial(_devices_scaled, cluster, model, _wider))
        if any(device.launch_overhead_s for device in compute if _model(device) == model):
            yield ClusterFigure(f"launch overhead of {model}", False, partial(_devices_scaled, cluster, model, _later))
    kinds: dict[str, list[Link]] = {}
    for link in cluster.links:
        kinds.setdefault(link_kind(link), []).append(link)
    for kind, links in kinds.items():
        if any(link.bandwidth_bytes_per_s < float("inf") for link in links):
            yield ClusterFigure(f"bandwidth of {kind}", True, partial(_bandwidth_scaled, cluster, kind))
        if any(link.latency_s for link in links):
            yield ClusterFigure(f"latency of {kind}", False, partial(_latency_scaled, cluster, kind))


def memories(cluster: Cluster) -> Iterator[ClusterFigure]:
    """Memory sizes of the models of devices."""
    compute = [cluster.devices[d] for d in cluster.compute_devices.tolist()]
    for model in dict.fromkeys(map(_model, compute)):
        yield ClusterFigure(f"memory of {model}", True, partial(_devices_scaled, cluster, model, _larger))


def link_kind(link: Link) -> str:
    """``"links between gpu and infiniband"``: by its ends without their hosts and numbers."""
    ends = sorted({_NUMBER.sub("", _HOST.sub("", end)) for end in (link.src, link.dst)})
    return f"links between {' and '.join(ends)}" if len(ends) > 1 else f"links among {ends[0]}s"


def _model(device: Device) -> str:
    return device.model or device.kind


def _devices_scaled(cluster: Cluster, model: str, change: Callable[[Device, float], Device], factor: float) -> Cluster:
    devices = (change(device, factor) if _model(device) == model else device for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _faster(device: Device, factor: float) -> Device:
    peaks = {dtype: rate * factor for dtype, rate in device.peak_flops.items()}
    return replace(device, peak_flops=peaks, rates=device.rates and device.rates.scaled(compute=factor))


def _wider(device: Device, factor: float) -> Device:
    rates = device.rates and device.rates.scaled(memory=factor)
    return replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor, rates=rates)


def _later(device: Device, factor: float) -> Device:
    return replace(device, launch_overhead_s=device.launch_overhead_s * factor)


def _larger(device: Device, factor: float) -> Device:
    return replace(device, memory_bytes=device.reserved_bytes + int(device.usable_bytes * factor))


def _bandwidth_scaled(cluster: Cluster, kind: str, factor: float) -> Cluster:
    changed = _links_changed(cluster, kind, lambda link: link.wider(factor))
    if cluster.fabric is None or not _is_inside_hosts(cluster, kind):  # the fabric asks links for ports between hosts
        return changed
    return replace(changed, fabric=cluster.fabric.scaled(bandwidth=factor))


def _latency_scaled(cluster: Cluster, kind: str, factor: float) -> Cluster:
    changed = _links_changed(cluster, kind, lambda link: replace(link, latency_s=link.latency_s * factor))
    if cluster.fabric is None:
        return changed
    inside = _is_inside_hosts(cluster, kind)
    return replace(changed, fabric=cluster.fabric.scaled(**{"latency" if inside else "between_hosts": factor}))


def _is_inside_hosts(cluster: Cluster, kind: str) -> bool:
    """Whether such links are on the way from the first device to the second one, on one host."""
    first, second = cluster.compute_devices[:2].tolist()
    route = [cluster.links[number] for number in cluster.routes[first, second].links]
    return any(link_kind(link) == kind and host_of(link.src) == host_of(link.dst) for link in route)


def _links_changed(cluster: Cluster, kind: str, change: Callable[[Link], Link]) -> Cluster:
    links = (change(link) if link_kind(link) == kind else link for link in cluster.links)
    return replace(cluster, links=tuple(links))
