"""Hosts as devices: the CPU of a cluster into whose memory each accelerator may move what does not fit into its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphs.records import HOST

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.arrays import IntArray


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
