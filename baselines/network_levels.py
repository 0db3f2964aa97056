"""Network levels: which devices of a cluster are close to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True)
class Level:
    """One level of a network: ``count`` equal machines or groups of the level below, at ``bandwidth_bytes_per_s``."""

    count: int
    bandwidth_bytes_per_s: float


def network_levels(problem: Problem, devices: IntArray) -> tuple[tuple[Level, ...], IntArray]:
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
            levels.append(Level(int(sizes[0] // np.bincount(group)[0]), least))
            group = joined.copy()
            groups.append(group)
    return tuple(levels) or (Level(1, math.inf),), devices[np.lexsort(groups)]


def _strongest_tree(bandwidth: FloatArray) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Its bandwidths, falling, each with its pairs: a maximum spanning tree hangs together wherever all pairs do."""
    from scipy.sparse.csgraph import minimum_spanning_tree  # type: ignore[import-untyped]

    values, rank = np.unique(-bandwidth, return_inverse=True)
    weight = rank.reshape(bandwidth.shape) + 1.0
    np.fill_diagonal(weight, 0.0)  # no edge
    tree = minimum_spanning_tree(weight).tocoo()
    for level in np.unique(tree.data):
        at = tree.data == level
        yield float(-values[int(level) - 1]), list(zip(tree.row[at].tolist(), tree.col[at].tolist(), strict=True))
