"""Network levels: which devices of a cluster are close to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from env.problem import BoolArray, Problem
from graphs.opgraph import IntArray


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
    for least in np.unique(bandwidth[~np.eye(len(devices), dtype=np.bool_)])[::-1].tolist():
        reached: BoolArray = bandwidth >= least
        for _ in range(len(devices).bit_length()):
            reached = reached @ reached
        joined = reached.argmax(axis=1)  # the first device of the group stands for it
        sizes = np.bincount(joined)[np.unique(joined)]
        if (sizes == sizes[0]).all() and sizes[0] > np.bincount(group)[0]:
            levels.append(Level(int(sizes[0] // np.bincount(group)[0]), least))
            group = joined
            groups.append(group)
    return tuple(levels) or (Level(1, math.inf),), devices[np.lexsort(groups)]
