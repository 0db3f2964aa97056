"""Paths under limits of memory: not all ops of a path can be on the device that runs them fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from env.bounds.heads import Pairs
    from env.bounds.memory_area import MemoryRoom
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray

_ROUNDS = 4  # paths for which prices are sought, each the longest under the prices of the one before, while that helps


def slowed_path_s(room: MemoryRoom, pairs: Pairs) -> float:
    """Seconds of the longest path with transfers where ops that keep bytes on a fast device pay for them.

    With a price z_d for each byte of device d, an op counts a_u = min_d (t_ud + z_d kept_u) - min_d z_d kept_u. Make
    each op of a schedule last longer by z_d kept_u - min z kept_u, and it ends later by at most their sum, which is at
    most sum_d z_d capacity_d - sum_u min_d z_d kept_u wherever the placement fits. Every op then lasts at least a_u, so
    each bound on schedules of such ops (`Pairs.heads`), less that sum, is a bound on this one. Prices are the best for
    one path, by the linear programme of `MemoryRoom.prices`.
    """
    free = replace(pairs, remote_s=np.zeros(len(pairs.source)))
    path, best_s = _longest(free)
    paying, unpaid_s = pairs, 0.0
    for _ in range(_ROUNDS):
        seconds, less_s = room.costs(room.prices(path, one_by_one=True))
        path, path_s = _longest(replace(free, op_s=seconds))
        if path_s + less_s <= best_s:
            break
        best_s, paying, unpaid_s = path_s + less_s, replace(pairs, op_s=seconds), less_s
    return 0.0 if paying is pairs else float((paying.heads() + paying.op_s).max()) + unpaid_s


def _longest(pairs: Pairs) -> tuple[BoolArray, float]:
    """bool [n]: a longest path where transfers are free; its seconds."""
    end_s: FloatArray = pairs.heads(1) + pairs.op_s
    by_target = np.argsort(pairs.target, kind="stable")
    ptr = np.searchsorted(pairs.target[by_target], np.arange(len(end_s) + 1))
    at = int(end_s.argmax())
    chosen = np.zeros(len(end_s), dtype=np.bool_)
    chosen[at] = True
    while ptr[at] < ptr[at + 1]:
        before = pairs.source[by_target[ptr[at] : ptr[at + 1]]]
        at = int(before[end_s[before].argmax()])
        chosen[at] = True
    return chosen, float(end_s.max())
