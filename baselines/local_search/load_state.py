"""The arrays that `load_kernel` works on: a problem with the objective throughput, and a search on it.

Names: *unit*, ops that share a device; *tensor*, one that units other than its own read; *resource*, a device or a link
that can be a bottleneck: numbers 0 .. D - 1 are the devices; *copy*, a tensor on a device that reads but does not
write it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.problem import BoolArray, Problem
from env.simulation.scoring import Charges
from env.units import Units
from graphs.arrays import pointers
from graphs.opgraph import FloatArray, IntArray

Counts = NDArray[np.int32]
Records = NDArray[np.void]
_MOST = 64  # units in one change

# Records rather than one array per field: what is used together lies together, and a call that hands on 50 arrays
# takes longer than most of the functions here.
UNIT = np.dtype([("bytes", "i8"), ("workspace", "i8"), ("input", "i8"), ("output", "i8")])
TENSOR = np.dtype(
    [("writer", "i8"), ("reader", "i8"), ("bytes", "i8"), ("held", "i8"), ("modelled", "f8"), ("measured_s", "f8")]
)
DEVICE = np.dtype([("capacity_bytes", "i8"), ("same_to_all", "i8"), ("owner", "i8"), ("next", "i8")])
PAIR = np.dtype(
    [("latency_s", "f8"), ("s_per_byte", "f8"), ("hops", "f8"), ("sends", "f8"), ("receives", "f8"), ("route", "i8")]
)
PLACED = np.dtype([("device", "i8"), ("slot", "i8"), ("best", "i8"), ("is_changed", "i8"), ("stamp", "i8")])
HOLDS = np.dtype([("bytes", "i8"), ("largest", "i8"), ("units", "i8")])
STEP = np.dtype([("unit", "i8"), ("came_from", "i8"), ("cluster", "i8")])
SEARCH = np.dtype(
    [
        ("random", "u8"),  # never 0
        ("hottest", "i8"),  # resource with the largest load
        ("moved", "i8"),  # units in the change at hand
        ("changed", "i8"),  # units that may not be where they were in the best placement
        ("stamp", "i8"),
        ("reference_s", "f8"),  # what loads are compared with: the largest when a call began
        ("best_s", "f8"),  # largest load of the best placement
    ]
)


class LoadInstance(NamedTuple):
    """A `Problem`: U units, T tensors, D devices, R resources, W sizes of workspace."""

    unit: Records  # UNIT [U + 1]: bytes charged, index of the largest workspace, first input, first output
    unit_s: FloatArray  # [U, D]
    allowed: BoolArray  # [U, D]
    input: IntArray  # tensors by the unit that reads them; unit u writes tensors unit[u].output .. unit[u + 1].output
    tensor: Records  # TENSOR [T + 1]: writer, first reader, bytes, those charged to a receiver; modelled: 1 if its time
    # is not measured, else 0
    reader: IntArray  # units other than the writer, by tensor
    device: Records  # DEVICE [D]; same_to_all: a copy costs a blocking sender the same wherever it goes; owner: the
    # device in whose memory it works; next: another device on the same memory, -1 behind the last; the owner is first
    workspace_bytes: IntArray  # [W], increasing from 0
    pair: Records  # PAIR [D * D + 1]; hops: how often a measured time counts; sends, receives: who pays if blocking
    route: IntArray  # resources that a transfer occupies, by pair of devices a * D + b; none if blocking
    link_ptr: IntArray  # [R - D + 1]
    link_pair: IntArray  # pairs of devices by link
    blocking: bool


class LoadState(NamedTuple):
    """A placement and everything that follows from it, and the best one found so far."""

    unit: Records  # PLACED [U]: device, slot in `member`, device in the best placement, last cluster it was in
    device: Records  # HOLDS [D]: bytes charged without workspace, at the owner of the memory; index of the largest
    # workspace; units
    readers: Counts  # [T, D + 1], units on each device that read the tensor; last: devices with such units
    load_s: FloatArray  # [R]
    saved_s: FloatArray  # [R], before the change at hand
    workspaces: Counts  # [D, W], units by workspace
    member: Counts  # [D, U], the units of each device, in any order
    changed: IntArray  # [U], units that may not be where they were in the best placement
    change: Records  # STEP [MOST]: units of the change at hand and their devices before; and a cluster of units
    search: Records  # SEARCH [1]


def new_state(instance: LoadInstance, seed: int) -> LoadState:
    """A state without a placement."""
    (n_units, n_devices), n_tensors = instance.unit_s.shape, len(instance.tensor) - 1
    n_resources = n_devices + len(instance.link_ptr) - 1
    search = np.zeros(1, dtype=SEARCH)
    search["random"], search["best_s"] = seed | 1, np.inf
    return LoadState(
        unit=np.zeros(n_units, dtype=PLACED),
        device=np.zeros(n_devices, dtype=HOLDS),
        readers=np.zeros((n_tensors, n_devices + 1), dtype=np.int32),
        load_s=np.zeros(n_resources),
        saved_s=np.zeros(n_resources),
        workspaces=np.zeros((n_devices, len(instance.workspace_bytes)), dtype=np.int32),
        member=np.zeros((n_devices, n_units), dtype=np.int32),
        changed=np.zeros(n_units, dtype=np.int64),
        change=np.zeros(_MOST, dtype=STEP),
        search=search,
    )


def instance_of(units: Units) -> LoadInstance:
    """The problem as the kernel takes it."""
    problem, graph = units.problem, units.problem.graph
    charges = Charges(problem)
    number, writer, read, reader = _tensors(problem)
    measured_s = graph.tensor_transfer_s[number]
    modelled = np.isnan(measured_s)
    takes_time = problem.fastest_s > 0  # else it may need none
    workspace = np.maximum.reduceat((graph.workspace_bytes * takes_time)[units.members], units.ptr[:-1])
    workspace_bytes, workspace_index = np.unique(np.append(workspace, 0), return_inverse=True)  # 0: nothing there
    route_ptr, route, link_ptr, link_pair = _routes(problem, charges.blocking)
    unit = np.zeros(units.n_units + 1, dtype=UNIT)
    unit["workspace"] = workspace_index
    unit["input"], unit["output"] = pointers(reader, units.n_units), pointers(writer, units.n_units)
    tensor = np.zeros(len(number) + 1, dtype=TENSOR)
    tensor["writer"][:-1], tensor["bytes"][:-1] = writer, graph.tensor_bytes[number]
    tensor["reader"] = pointers(read, len(number))
    tensor["modelled"][:-1], tensor["measured_s"][:-1] = modelled, np.where(modelled, 0.0, measured_s)
    device = np.zeros(problem.cluster.n_devices, dtype=DEVICE)
    device["capacity_bytes"] = problem.capacity_bytes
    device["owner"], device["next"] = problem.memory_owner, _next_on_memory(problem.memory_owner)
    device["same_to_all"] = _same_to_all(problem, charges, bool(modelled.any()))
    pair = np.zeros(len(route_ptr), dtype=PAIR)
    pair["latency_s"][:-1] = problem.latency_s.ravel()
    pair["s_per_byte"][:-1] = 1.0 / problem.bandwidth_bytes_per_s.ravel()
    pair["hops"][:-1] = 1.0 if charges.blocking else problem.hops.reshape(-1)
    pair["sends"][:-1], pair["receives"][:-1] = charges.sender_pays.ravel(), charges.receiver_pays.ravel()
    pair["route"] = route_ptr
    instance = LoadInstance(
        unit=unit,
        unit_s=units.op_s,
        allowed=units.allowed,
        input=read[np.lexsort((read, reader))],
        tensor=tensor,
        reader=reader,
        device=device,
        workspace_bytes=workspace_bytes,
        pair=pair,
        route=route,
        link_ptr=link_ptr,
        link_pair=link_pair,
        blocking=charges.blocking,
    )
    charge(instance, units, 1.0)
    return instance


def charge(instance: LoadInstance, units: Units, share: float) -> None:
    """Set what tensors are charged with in an instance: this share of their bytes, wherever they are."""
    graph = units.problem.graph
    made = np.bincount(units.problem.unit_of[graph.tensor_producer], graph.tensor_memory_bytes, units.n_units)
    instance.unit["bytes"][:-1] = units.kept_bytes + np.ceil(share * made).astype(np.int64)
    instance.tensor["held"] = np.ceil(share * instance.tensor["bytes"])


def _tensors(problem: Problem) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Tensors that other units read, sorted by the unit that writes them: number in the graph and writer, [T] each;
    and the pairs of such a tensor, 0 .. T - 1, and a unit that reads it, sorted."""
    graph, unit_of = problem.graph, problem.unit_of
    producer, consumer, tensor = graph.edge_list
    between = unit_of[producer] != unit_of[consumer]
    n_units = problem.n_units
    writer = unit_of[graph.tensor_producer]
    by_writer = np.lexsort((np.arange(graph.n_tensors), writer))
    rank = np.empty(graph.n_tensors, dtype=np.int64)
    rank[by_writer] = np.arange(graph.n_tensors)
    pairs = np.unique(rank[tensor[between]] * n_units + unit_of[consumer[between]])
    ranks, read_tensor = np.unique(pairs // n_units, return_inverse=True)
    kept = by_writer[ranks]
    return kept, writer[kept], read_tensor.astype(np.int64), pairs % n_units


def _routes(problem: Problem, blocking: bool) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Routes as resources by pair of devices, and pairs by link; each with pointers, and exclusive links only."""
    n_devices = problem.cluster.n_devices
    ptr, link = problem.route
    pair = np.repeat(np.arange(n_devices * n_devices), np.diff(ptr))
    exclusive = np.array([one.exclusive for one in problem.cluster.links], dtype=np.bool_)
    counts = exclusive[link] & (not blocking) if len(link) else np.zeros(0, dtype=np.bool_)
    links, number = np.unique(link[counts], return_inverse=True)
    pair = pair[counts]
    by_link = np.argsort(number, kind="stable")
    route = (n_devices + number).astype(np.int64)
    return pointers(pair, n_devices * n_devices), route, pointers(number, len(links)), pair[by_link]


def _next_on_memory(owner: IntArray) -> IntArray:
    """int64 [D]: from each owner on through all devices on its memory, -1 at the end."""
    result = np.full(len(owner), -1, dtype=np.int64)
    for d in np.unique(owner).tolist():
        others = np.flatnonzero(owner == d)
        row = np.concatenate([[d], others[others != d]])
        result[row[:-1]] = row[1:]
    return result


def _same_to_all(problem: Problem, charges: Charges, modelled: bool) -> BoolArray:
    """bool [D]: whether any copy of a tensor costs a blocking sender the same; `modelled`, by bytes and route."""
    tables = [charges.sender_pays, problem.latency_s, problem.bandwidth_bytes_per_s]
    others = ~np.eye(problem.cluster.n_devices, dtype=np.bool_)
    rows = [[row[other] for row, other in zip(table, others, strict=True)] for table in tables[: 3 if modelled else 1]]
    return np.array([all((row == row[:1]).all() for row in per) for per in zip(*rows, strict=True)], dtype=np.bool_)
