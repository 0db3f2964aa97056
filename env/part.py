"""`part_of`: some devices of a cluster, and what joins them, as a cluster of its own."""

from __future__ import annotations

import numpy as np

from env.cluster import Cluster
from graphs.arrays import IntArray


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
