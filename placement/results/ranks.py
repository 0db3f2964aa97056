"""`rank_map`: which ranks of a strategy work together along each axis, and on which device and host each one is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.devices import leaving_hosts
from baselines.strategies.folding import grid_of
from env.cluster import Cluster
from env.device import host_of
from env.lanes import without_lanes
from graphs.arrays import IntArray
from graphs.formatting import format_bytes, show
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import PLACED, Strategy

if TYPE_CHECKING:
    from placement.results.result import Result

_GPU = re.compile(r"gpu(\d+)$")
_FEW = 4  # ranks and hosts that are told one by one
_MOST_DEVICES = 64  # whose links are compared pair by pair


def rank_map(result: Result) -> str:
    """The ranks along each axis and their places, in words, e.g. "tp 8 in a host: ranks 0-7".

    Ranks are those of the mesh, stages first, then its axes, the last one fastest, as `torch.distributed` numbers them.

    Returns:
        "" where it does not matter: on one host whose devices are joined evenly and used in their order; without a
        strategy; where the result does not hold all of the devices.
    """
    if result.strategy.is_none or result.strategy.devices == 1:
        return ""
    cluster, strategy = without_lanes(result.cluster), result.strategy
    if len(cluster.compute_devices) < strategy.devices and not strategy.device_names:
        return ""  # one place of each stage stands for all
    grid = grid_of(cluster, strategy)
    order = visible_devices(cluster, grid.reshape(-1))
    hosts = len(np.unique(cluster.host_number[grid]))
    is_even = _is_even(cluster, grid.reshape(-1))
    if hosts == 1 and is_even and not order:
        return ""
    axes = _axes(cluster, strategy, grid, hosts > 1, is_even or hosts > 1)
    return "; ".join([", ".join(axes), order or _in_order(cluster, grid.reshape(-1))])


def _axes(cluster: Cluster, strategy: Strategy, grid: IntArray, several: bool, is_even: bool) -> list[str]:
    """Words about each axis: whether its groups stay in a host, the ranks of the first one, its narrowest route."""
    ranks = np.arange(grid.size).reshape(grid.shape)
    axes = ("dp (groups)" if rule.name == GROUPS else rule.name for rule in strategy.mesh if rule.size > 1)
    names = [PLACED if strategy.is_placed else "pp", *axes]
    leaves = np.concatenate([[_crosses(cluster, grid)], leaving_hosts(cluster, grid).any(axis=0)])
    told = []
    for axis in reversed(range(grid.ndim)):
        if grid.shape[axis] == 1:
            continue
        line = np.moveaxis(ranks, axis, -1).reshape(-1, grid.shape[axis])[0]
        where = "" if not several else " across hosts" if leaves[axis] else " in a host"
        told.append(f"{names[axis]} {grid.shape[axis]}{where}: ranks {_listed(line)}")
        if not is_even:
            told[-1] += f", {format_bytes(_narrowest(cluster, np.moveaxis(grid, axis, -1)))}/s at least"
    return told


def _crosses(cluster: Cluster, grid: IntArray) -> bool:
    host = cluster.host_number[grid]
    return bool((host != host[:1]).any())


def _narrowest(cluster: Cluster, groups: IntArray) -> float:
    """The least bandwidth from one rank of a group to the next, bytes per second."""
    _, bandwidth = cluster.routes.figures_of(groups[..., :-1].reshape(-1), groups[..., 1:].reshape(-1))
    return float(bandwidth.min())


def _is_even(cluster: Cluster, devices: IntArray) -> bool:
    if not 2 < len(devices) <= _MOST_DEVICES:
        return True
    first, second = np.triu_indices(len(devices), 1)
    _, bandwidth = cluster.routes.figures_of(devices[first], devices[second])
    return bool(np.ptp(bandwidth) <= 1e-9 * bandwidth.max())


def visible_devices(cluster: Cluster, devices: IntArray) -> str:
    """``CUDA_VISIBLE_DEVICES`` of each host whose GPUs are not used in their order from the first on; else "".

    Args:
        devices: int64, numbers of the devices of the ranks.
    """
    by_host: dict[str, list[int]] = {}
    for device in devices.tolist():
        name = cluster.devices[device].name
        found = _GPU.search(name)
        if found is None:
            return ""
        by_host.setdefault(host_of(name) or "", []).append(int(found[1]))
    lines = {host: ",".join(map(str, numbers)) for host, numbers in by_host.items()}
    odd = {host: lines[host] for host, numbers in by_host.items() if numbers != list(range(len(numbers)))}
    if len(odd) == len(lines) and len(set(odd.values())) == 1:
        return f"CUDA_VISIBLE_DEVICES={next(iter(odd.values()))}"
    told = [f"CUDA_VISIBLE_DEVICES={numbers} on {show(host)}" for host, numbers in odd.items()]
    return ", ".join(told[:_FEW]) + (f" and others on {len(told) - _FEW} more" if len(told) > _FEW else "")


def _in_order(cluster: Cluster, devices: IntArray) -> str:
    """The host and the number there of a rank, where ranks fill one host after the other."""
    hosts = cluster.host_number[devices]
    each = int((hosts == hosts[0]).sum())
    n = len(np.unique(hosts))
    if n == 1:
        return "rank r is cuda:r"
    if not np.array_equal(hosts, np.repeat(hosts[::each], each)[: len(hosts)]) or each * n != len(hosts):
        return "ranks are not host by host: see the devices of the strategy"
    names = [host_of(cluster.devices[device].name) or "" for device in devices[::each].tolist()]
    return f"{show(names[0])} has ranks 0-{each - 1}, and so on" if each > 1 else "a rank on each host"


def _listed(ranks: IntArray) -> str:
    """``"0-7"``, ``"0, 8, ..., 120"``."""
    step = int(ranks[1] - ranks[0])
    if step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _FEW:
        return ", ".join(map(str, ranks.tolist()))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
