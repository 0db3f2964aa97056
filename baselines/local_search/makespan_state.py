"""Records of the compiled local search for the makespan: what it moves, and everything one chain remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from baselines.local_search.groups import groupings
from env.problem import Problem
from env.simulation.step_state import Arrays, arrays_of
from env.units import Units
from graphs.arrays import pointers
from graphs.opgraph import FloatArray, IntArray

Index = NDArray[np.int32]
Flags = NDArray[np.uint8]
INF = np.inf
# Integers are handed on 64 bits wide, lest numba compiles the same function for every mixture of widths.
wide = cast("Callable[[Any], int]", np.int64)
SLACK = 1.0 + 1e-9  # rounding: tails and work are sums in another sequence than simulated times

# Slots of MakespanState.counts: entries of the logs, lengths of `path_op`, `hot_edge` and `picked`, whether tails are
# the keys, trials so far, and instants simulated.
LOGGED, LOGGED_KEYS, PATH, HOT, PICKED, BY_TAIL, TRIAL, INSTANTS = range(8)
N_COUNTS = 8
# Slots of MakespanState.values: step times accepted and best, how much slower a trial may be (mean, and its factor per
# trial). In seconds.
NOW, BEST, TEMPERATURE, DECAY = range(4)
N_VALUES = 4
N_MOVES = 10  # kinds of moves


class Movable(NamedTuple):
    """What the search moves: U units, and groups of them, on D devices."""

    unit_of: Index  # [n]
    unit_ptr: Index  # [U + 1]
    unit_op: Index  # [n]
    allowed: Flags  # [U, D]
    group_of: Index  # [levels * U], number over all levels
    group_ptr: Index  # [groups + 1]
    group_unit: Index  # [levels * U]
    counts: IntArray  # [2], U and levels
    capacity_bytes: IntArray  # [D]


class MakespanInstance(NamedTuple):
    """A `Problem` for the compiled search."""

    arrays: Arrays
    movable: Movable

    @property
    def simulated(self) -> int:
        """Ops and edges."""
        return len(self.arrays.kind_s) + len(self.arrays.consumer)


class MakespanState(NamedTuple):
    """One chain of the search: n ops, e edges, D devices, L links, U units."""

    device: Index  # [n]
    key: FloatArray  # [n], read unless BY_TAIL
    tail: FloatArray  # [n]
    best_device: Index  # [n]
    best_key: FloatArray  # [n]
    counts: IntArray  # [N_COUNTS]
    values: FloatArray  # [N_VALUES]
    random: NDArray[np.uint64]  # [1]
    weight: FloatArray  # [2 * N_MOVES], tries and successes of each kind of move
    # what a trial changed
    log_op: Index  # [n]
    log_device: Index  # [n]
    log_key_op: Index  # [2 n]
    log_key: FloatArray  # [2 n]
    mark: Index  # [U], last trial that picked the unit
    picked: Index  # [U]
    trial_tail: FloatArray  # [n]
    work_s: FloatArray  # [D], seconds of all ops on each device
    # the accepted schedule
    start_s: FloatArray  # [n]
    arrived_s: FloatArray  # [n], when the last input was there
    before: Index  # [n], op that ran before on the device, or -1
    # its critical path, last op first
    path_op: Index  # [n]
    hot_edge: Index  # [n + e], transfers on it
    # room to work in
    started: Index  # [n]
    last_op: Index  # [D]
    link_last: Index  # [L + 2]
    transfer_edge: Index  # [e + 1], first edge of each transfer
    transfer_behind: Index  # [e + 1], transfer that kept a link busy, or -1


def new_state(instance: MakespanInstance, n_links: int, seed: int) -> MakespanState:
    """Memory of one chain."""
    n, n_devices = len(instance.arrays.kind_s), len(instance.arrays.owner)
    e, n_units = len(instance.arrays.consumer), len(instance.movable.unit_ptr) - 1

    def ints(size: int) -> Index:
        return np.zeros(size, np.int32)

    return MakespanState(
        device=ints(n),
        key=np.zeros(n),
        tail=np.zeros(n),
        best_device=ints(n),
        best_key=np.zeros(n),
        counts=np.zeros(N_COUNTS, np.int64),
        values=np.zeros(N_VALUES),
        random=np.array([seed | 1], np.uint64),
        weight=np.zeros(2 * N_MOVES),
        log_op=ints(n),
        log_device=ints(n),
        log_key_op=ints(2 * n),
        log_key=np.zeros(2 * n),
        mark=ints(n_units),
        picked=ints(n_units),
        trial_tail=np.zeros(n),
        work_s=np.zeros(n_devices),
        start_s=np.zeros(n),
        arrived_s=np.zeros(n),
        before=ints(n),
        path_op=ints(n),
        hot_edge=ints(n + e),
        started=ints(n),
        last_op=ints(n_devices),
        link_last=ints(n_links + 2),
        transfer_edge=ints(e + 1),
        transfer_behind=ints(e + 1),
    )


def instance_of(problem: Problem) -> MakespanInstance:
    """The problem as the kernel takes it."""
    return MakespanInstance(arrays_of(problem), _movable(Units.of(problem)))


def grouped(instance: MakespanInstance, units: Units) -> MakespanInstance:
    """The same problem with other units, groups of its own: only placements that keep them together."""
    return instance._replace(movable=_movable(units))


def _movable(units: Units) -> Movable:
    labels, n_units = groupings(units), units.n_units
    # Groups are numbered through all levels.
    first = np.cumsum([0, *(int(level.max()) + 1 for level in labels)])
    group_of = np.concatenate([np.zeros(0, np.int64), *(level + a for level, a in zip(labels, first, strict=False))])
    return Movable(
        unit_of=_index(units.unit_of),
        unit_ptr=_index(units.ptr),
        unit_op=_index(units.members),
        allowed=units.allowed.astype(np.uint8),
        group_of=_index(group_of),
        group_ptr=_index(pointers(group_of, int(first[-1]))),
        group_unit=_index(np.argsort(group_of, kind="stable") % n_units),
        counts=np.array([n_units, len(labels)]),
        capacity_bytes=units.problem.capacity_bytes.copy(),
    )


def _index(values: NDArray[np.int64]) -> Index:
    return np.ascontiguousarray(values, dtype=np.int32)
