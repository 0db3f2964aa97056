"""Network levels: which devices of a cluster are close to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True)
class NetworkLevel:
    """One level of a network: ``count`` equal machines or groups of the level below, at ``bandwidth_bytes_per_s``."""

    count: int
    bandwidth_bytes_per_s: float


def network_levels(problem: Problem, devices: IntArray) -> tuple[tuple[NetworkLevel, ...], IntArray]:
    """Levels of equally close devices, innermost first, and the devices (int64 [K]) group by group.

    A level's bandwidth is the highest at which its groups hang together, by routes in both directions. Groups of a
    level must be equally many everywhere; where they are not, they count as part of the next level. One level where
    all devices are equally close; a single device is a level of its own.
    """
    pairs = np.ix_(devices, devices)
    bandwidth = np.minimum(problem.bandwidth_bytes_per_s[pairs], problem.bandwidth_bytes_per_s[pairs].T)
    group = np.arange(len(devices))
    groups, levels = [group], []
    joined = group.copy()  # the first device of a group stands for it
    for least, edges in _strongest_tree(bandwidth):
        for a, b in edges:
            first, other = sorted((joined[a], joined[b]))
            joined[joined == other] = first
        sizes = np.bincount(joined)[np.unique(joined)]
        if (sizes == sizes[0]).all() and sizes[0] > np.bincount(group)[0]:
            levels.append(NetworkLevel(int(sizes[0] // np.bincount(group)[0]), least))
            group = joined.copy()
            groups.append(group)
    return tuple(levels) or (NetworkLevel(1, math.inf),), devices[np.lexsort(groups)]


def _strongest_tree(bandwidth: FloatArray) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Its bandwidths, falling, each with its pairs: a maximum spanning tree hangs together wherever all pairs do.

    R. C. Prim, "Shortest connection networks and some generalizations", Bell System Technical Journal 36(6), 1957
    (doi:10.1002/j.1538-7305.1957.tb01515.x), for dense graphs: O(K^2) for K devices.
    """
    n = len(bandwidth)
    strongest, nearest = bandwidth[0].copy(), np.zeros(n, dtype=np.int64)  # of each device to the tree
    strongest[0] = -1.0  # in the tree
    edges: dict[float, list[tuple[int, int]]] = {}
    for _ in range(n - 1):
        new = int(strongest.argmax())
        edges.setdefault(float(strongest[new]), []).append((int(nearest[new]), new))
        closer = (bandwidth[new] > strongest) & (strongest >= 0)
        strongest[closer], nearest[closer] = bandwidth[new][closer], new
        strongest[new] = -1.0
    yield from sorted(edges.items(), reverse=True)
