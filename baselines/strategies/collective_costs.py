"""`CollectiveCosts`: seconds of collectives along the axes of a mesh."""

from __future__ import annotations

import numpy as np

from env.cluster import Cluster
from env.collectives import Interconnect, collective_s
from graphs.arrays import FloatArray, IntArray


class CollectiveCosts:
    """Placeholder."""

    def __init__(self, cluster: Cluster, devices: IntArray) -> None:
        self.cluster, self.devices = cluster, devices

    def seconds(self, kind: str, axis: int, size_bytes: FloatArray, stage: int = 0, algorithm: str = "") -> FloatArray:
        grid = np.moveaxis(self.devices[stage], axis, -1)
        ranks = grid.reshape(-1, grid.shape[-1])[0].tolist()
        network = Interconnect.among(self.cluster, ranks)
        names = [algorithm] if algorithm else ["ring", "butterfly"]
        return np.array(
            [min(collective_s(kind, name, float(n), len(ranks), network) for name in names) for n in size_bytes]
        )
