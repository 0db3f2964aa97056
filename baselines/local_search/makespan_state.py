"""Records of the compiled local search for the makespan: the problem, and everything one chain remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from baselines.local_search.groups import groupings
from env.problem import Problem
from env.units import Units
from graphs.arrays import pointers
from graphs.opgraph import FloatArray, IntArray

Index = NDArray[np.int32]
Flags = NDArray[np.uint8]
INF = np.inf
# Integers are handed on 64 bits wide, lest numba compiles the same function for every mixture of widths.
wide = cast("Callable[[Any], int]", np.int64)
SNAPSHOTS = 12
SLACK = 1.0 + 1e-9  # rounding: tails and work left are sums in another sequence than simulated times

# Slots of MakespanState.counts: entries of the logs, the half of doubled arrays that is accepted, lengths of `path_op`,
# `hot_edge` and `picked`, whether tails are the keys, dirty ops, the last of them in topological order, trials so far,
# and instants simulated.
LOGGED, LOGGED_TAILS, LOGGED_KEYS, CURRENT, PATH, HOT, PICKED, BY_TAIL, DIRTY, TOP, TRIAL, INSTANTS = range(12)
N_COUNTS = 12
# Slots of MakespanState.values: step times accepted and best, how much slower a trial may be (mean, and its factor per
# trial), and when the trial begins to differ from the accepted schedule. In seconds.
NOW, BEST, TEMPERATURE, DECAY, AFFECTED = range(5)
N_VALUES = 5
N_MOVES = 10  # kinds of moves


class MakespanInstance(NamedTuple):
    """A `Problem`: n ops, m tensors, e edges, D devices, U units."""

    op_s: FloatArray  # [n, D]
    edge_ptr: Index  # [n + 1], edges an op feeds
    consumer: Index  # [e]
    producer: Index  # [e]
    edge_tensor: Index  # [e]
    input_ptr: Index  # [n + 1]
    input_edge: Index  # [e], edges by consumer
    edge_latency: FloatArray  # [e], 0 where the transfer time is measured, else 1
    edge_bytes: FloatArray  # [e], 0 where the transfer time is measured
    edge_measured_s: FloatArray  # [e], per link of the route; 0 where modelled
    topological: Index  # [n]
    position: Index  # [n], the inverse
    latency_s: FloatArray  # [D, D]
    bandwidth: FloatArray  # [D, D]
    hops: FloatArray  # [D, D]
    route_ptr: Index  # [D * D + 1]
    route_link: Index  # [...], exclusive links only
    tensor_bytes: IntArray  # [m], sent
    memory_bytes: IntArray  # [m], held by the producer's device: 0 in place
    tensor_producer: IntArray  # [m]
    kept_bytes: IntArray  # [n]
    workspace_bytes: IntArray  # [n]
    output_bytes: IntArray  # [n]
    capacity_bytes: IntArray  # [D]
    memory_owner: Index  # [D], device in whose memory each works
    unit_of: Index  # [n]
    unit_ptr: Index  # [U + 1]
    unit_op: Index  # [n]
    allowed: Flags  # [U, D]
    group_of: Index  # [levels * U], number over all levels
    group_ptr: Index  # [groups + 1]
    group_unit: Index  # [levels * U]


class MakespanState(NamedTuple):
    """One chain of the search. Doubled arrays hold the accepted schedule and the one being tried."""

    device: Index  # [n]
    key: FloatArray  # [n], read unless BY_TAIL
    tail: FloatArray  # [n]
    work: FloatArray  # [D], seconds of all ops on each device
    best_device: Index  # [n]
    best_key: FloatArray  # [n]
    counts: IntArray  # [N_COUNTS]
    values: FloatArray  # [N_VALUES]
    random: NDArray[np.uint64]  # [1]
    weight: FloatArray  # [2 * N_MOVES], tries and successes of each kind of move
    # what a trial changed
    dirty: Flags  # [n], by topological position
    log_op: Index  # [n]
    log_device: Index  # [n]
    log_tail_op: Index  # [n]
    log_tail: FloatArray  # [n]
    log_key_op: Index  # [n]
    log_key: FloatArray  # [n]
    mark: Index  # [U], last trial that picked the unit
    picked: Index  # [U]
    # one simulation
    missing: Index  # [n]
    ready_s: FloatArray  # [n]
    base: Index  # [D + 1]
    ready: Index  # [n], heaps by key
    future: Index  # [n], heaps by ready time
    n_ready: Index  # [D]
    n_future: Index  # [D]
    running: Index  # [D]
    last_op: Index  # [D]
    next_s: FloatArray  # [D]
    left_s: FloatArray  # [D], work not started yet
    link_free: FloatArray  # [L]
    link_last: Index  # [L]
    sent: Index  # [D]
    # schedules, doubled
    start_s: FloatArray  # [2, n]
    end_s: FloatArray  # [2, n]
    rank: Index  # [2, n]
    before: Index  # [2, n], op that ran before on the device
    edge_transfer: Index  # [2, e], or -1
    transfer_edge: Index  # [2, e + 1]
    transfer_target: Index  # [2, e + 1]
    transfer_start: FloatArray  # [2, e + 1]
    transfer_end: FloatArray  # [2, e + 1]
    transfer_behind: Index  # [2, e + 1], transfer that kept a link busy, or -1
    n_transfers: Index  # [2]
    arrived_s: FloatArray  # [n], ready_s of the accepted schedule
    # snapshots, doubled: row 2 k and 2 k + 1
    snap_row: Index  # [SNAPSHOTS], row that belongs to the accepted schedule
    snap_now: FloatArray  # [2 * SNAPSHOTS], infinite if there is none
    snap_started: Index  # [2 * SNAPSHOTS]
    snap_transfers: Index  # [2 * SNAPSHOTS]
    snap_missing: Index  # [2 * SNAPSHOTS, n]
    snap_ready_s: FloatArray  # [2 * SNAPSHOTS, n]
    snap_queue: Index  # [2 * SNAPSHOTS, n], ready then future ops of each device
    snap_ints: Index  # [2 * SNAPSHOTS, 5 * D + L]
    snap_floats: FloatArray  # [2 * SNAPSHOTS, 2 * D + L]
    # the critical path of the accepted schedule, last op first
    path_op: Index  # [n]
    hot_edge: Index  # [n + e], transfers on it
    # memory
    free_s: FloatArray  # [m + e]
    change_s: FloatArray  # [2 n + m + 2 e]
    change_bytes: IntArray  # [2 n + m + 2 e]
    change_next: Index  # [2 n + m + 2 e]
    sorted_change: Index  # [2 n + m + 2 e]
    bucket_in: IntArray  # [buckets]
    bucket_out: IntArray  # [buckets]
    bucket_head: Index  # [buckets]
    held_bytes: IntArray  # [D]
    largest_bytes: IntArray  # [D]


def new_state(instance: MakespanInstance, n_links: int, seed: int) -> MakespanState:
    """Memory of one chain."""
    n, n_devices = instance.op_s.shape
    m, e, n_units = len(instance.tensor_bytes), len(instance.consumer), len(instance.unit_ptr) - 1
    changes, rows, buckets = 2 * n + m + 2 * e, 2 * SNAPSHOTS, max(16, n // n_devices)
    sizes = {
        "device": n, "key": n, "tail": n, "work": n_devices, "best_device": n, "best_key": n,
        "counts": N_COUNTS, "values": N_VALUES, "random": 1, "weight": 2 * N_MOVES,
        "dirty": n, "log_op": n, "log_device": n, "log_tail_op": n, "log_tail": n, "log_key_op": 2 * n,
        "log_key": 2 * n,
        "mark": n_units, "picked": n_units,
        "missing": n, "ready_s": n, "base": n_devices + 1, "ready": n, "future": n, "n_ready": n_devices,
        "n_future": n_devices, "running": n_devices, "last_op": n_devices, "next_s": n_devices, "left_s": n_devices,
        "link_free": n_links, "link_last": n_links, "sent": n_devices,
        "start_s": 2 * n, "end_s": 2 * n, "rank": 2 * n, "before": 2 * n, "edge_transfer": 2 * e,
        "transfer_edge": 2 * e + 2, "transfer_target": 2 * e + 2, "transfer_start": 2 * e + 2,
        "transfer_end": 2 * e + 2, "transfer_behind": 2 * e + 2, "n_transfers": 2, "arrived_s": n,
        "snap_row": SNAPSHOTS, "snap_now": rows, "snap_started": rows, "snap_transfers": rows,
        "snap_missing": rows * n, "snap_ready_s": rows * n, "snap_queue": rows * n,
        "snap_ints": rows * (5 * n_devices + n_links), "snap_floats": rows * (2 * n_devices + n_links),
        "path_op": n, "hot_edge": n + e,
        "free_s": m + e, "change_s": changes, "change_bytes": changes, "change_next": changes,
        "sorted_change": changes, "bucket_in": buckets, "bucket_out": buckets, "bucket_head": buckets,
        "held_bytes": n_devices, "largest_bytes": n_devices,
    }  # fmt: skip
    floats = {
        "key", "tail", "work", "best_key", "values", "weight", "log_tail", "log_key", "ready_s", "next_s", "left_s",
        "link_free", "start_s", "end_s", "transfer_start", "transfer_end", "arrived_s", "snap_now", "snap_ready_s",
        "snap_floats", "free_s", "change_s",
    }  # fmt: skip
    other: dict[str, Any] = {
        "counts": np.int64, "random": np.uint64, "dirty": np.uint8, "change_bytes": np.int64, "held_bytes": np.int64,
        "largest_bytes": np.int64, "bucket_in": np.int64, "bucket_out": np.int64,
    }  # fmt: skip
    arrays = {k: np.zeros(v, np.float64 if k in floats else other.get(k, np.int32)) for k, v in sizes.items()}
    state = MakespanState(**arrays)
    state.random[0] = seed | 1
    return state


def instance_of(problem: Problem) -> MakespanInstance:
    """The problem as the kernel takes it."""
    graph, units = problem.graph, Units.of(problem)
    producer, consumer, tensor = graph.edge_list
    measured_s = graph.tensor_transfer_s[tensor]
    modelled = np.isnan(measured_s)
    position = graph.topological_position
    route_ptr, route_link = problem.route
    exclusive = np.array([link.exclusive for link in problem.cluster.links], dtype=np.bool_)[route_link]
    return MakespanInstance(
        op_s=problem.op_s,
        edge_ptr=_index(graph.consumer_ptr[graph.output_ptr]),
        consumer=_index(consumer),
        producer=_index(producer),
        edge_tensor=_index(tensor),
        input_ptr=_index(graph.inputs[0]),
        input_edge=_index(np.lexsort((tensor, consumer))),
        edge_latency=modelled.astype(np.float64),
        edge_bytes=np.where(modelled, graph.tensor_bytes[tensor], 0).astype(np.float64),
        edge_measured_s=np.where(modelled, 0.0, measured_s),
        topological=_index(graph.topological_order),
        position=_index(position),
        latency_s=problem.latency_s,
        bandwidth=problem.bandwidth_bytes_per_s,
        hops=np.diff(route_ptr).astype(np.float64),
        route_ptr=_index(np.concatenate([[0], np.cumsum(exclusive)])[route_ptr]),
        route_link=_index(route_link[exclusive]),
        tensor_bytes=graph.tensor_bytes,
        memory_bytes=graph.tensor_memory_bytes,
        tensor_producer=graph.tensor_producer,
        kept_bytes=graph.standing_bytes,
        workspace_bytes=graph.workspace_bytes,
        output_bytes=graph.output_bytes + graph.coming_bytes,
        capacity_bytes=problem.capacity_bytes,
        memory_owner=_index(problem.memory_owner),
        **_unit_fields(units),
    )


def grouped(instance: MakespanInstance, units: Units) -> MakespanInstance:
    """The same problem with other units, groups of its own: only placements that keep them together."""
    return instance._replace(**_unit_fields(units))


def _unit_fields(units: Units) -> dict[str, Any]:
    group_of, group_ptr, group_unit = _levels(groupings(units), units.n_units)
    return {
        "unit_of": _index(units.unit_of),
        "unit_ptr": _index(units.ptr),
        "unit_op": _index(units.members),
        "allowed": units.allowed.astype(np.uint8),
        "group_of": group_of,
        "group_ptr": group_ptr,
        "group_unit": group_unit,
    }


def _levels(labels: list[IntArray], n_units: int) -> tuple[Index, Index, Index]:
    """``(group_of, group_ptr, group_unit)`` of `MakespanInstance`, groups numbered through all levels."""
    first = np.cumsum([0, *(int(level.max()) + 1 for level in labels)])
    group_of = np.concatenate([np.zeros(0, np.int64), *(level + a for level, a in zip(labels, first, strict=False))])
    ptr = pointers(group_of, int(first[-1]))
    return _index(group_of), _index(ptr), _index(np.argsort(group_of, kind="stable") % n_units)


def _index(values: NDArray[np.int64]) -> Index:
    return np.ascontiguousarray(values, dtype=np.int32)
