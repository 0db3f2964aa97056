"""Chains of slices: the best way to cut a row of atoms into one slice per device, and which device each gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.memory import Allowance
from baselines.meter import OutOfTimeError, charge, stopped_in_time, work_left_s
from baselines.pipelines.atoms import Atoms
from env.problem import Problem
from env.units import Units
from graphs.arrays import sums
from graphs.errors import InfeasibleError
from graphs.formatting import exact_bytes
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from baselines.pipelines import row_kernel


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory charged to a slice: the sum of its atoms' own bytes and the largest of their top bytes, int64 [N] each."""

    own_bytes: IntArray
    top_bytes: IntArray


@dataclass(frozen=True, eq=False)
class SliceChain:
    """A cut: its largest load as the slices see it; class, first atom and end of each slice, from the first on."""

    value_s: float
    slices: tuple[tuple[int, int, int], ...]

    def device(self, atoms: Atoms) -> IntArray:
        """int64 [n]: slices of a class to its devices in cluster order."""
        of_atom = np.empty(atoms.count, dtype=np.int64)
        free = [iter(members.tolist()) for members in atoms.classes.devices]
        for c, start, end in self.slices:
            of_atom[start:end] = next(free[c])
        return of_atom[atoms.of_op]


def charged(atoms: Atoms, units: Units, allowance: Allowance) -> Memory:
    """The memory of one attempt of `place_within_memory`."""
    per_op = np.zeros(len(atoms.of_op), dtype=np.int64)
    per_op[units.first_op] = allowance.unit_bytes
    top = np.zeros_like(per_op)
    top[units.first_op] = allowance.working_bytes
    return Memory(sums(atoms.of_op, per_op, atoms.count), _largest(atoms, top))


def best_chain(atoms: Atoms, memory: Memory, count: IntArray, limit_s: float) -> SliceChain | None:
    """The cut of a row of atoms with the least largest load below a limit; None if there is none.

    Args:
        count: int64 [C], how many devices of each class may be used.

    Raises:
        OutOfTimeError: no work is left.
    """
    from baselines.pipelines import row_kernel

    if np.isinf(atoms.least_s).any():  # no device may run all ops of some atom
        return None
    # States are numbers of devices used of each class, in mixed radix.
    n, n_states = atoms.count, int(np.prod(count + 1))
    stride = np.concatenate([[1], np.cumprod(count[:-1] + 1)]).astype(np.int64)
    used = np.arange(n_states)[:, None] // stride % (count + 1)
    table = row_kernel.Table(
        best_s=np.full((n + 1, n_states), np.inf),
        least_s=np.full(n + 1, np.inf),
        start=np.zeros((n + 1, n_states), np.int32),
        last=np.zeros((n + 1, n_states), np.int8),
    )
    allotted = int(min((n + 1) ** 2, work_left_s() / prices.VISIT_S))  # all slices there are, and more
    left = np.array([allotted])
    rows, blocking = _rows(atoms, memory, stride, used), atoms.classes.problem.cluster.is_blocking
    with stopped_in_time(lambda: left.fill(-1)):
        is_done = row_kernel.best_cuts(rows, table, blocking, limit_s, left)
    charge(prices.VISIT_S * (allotted - max(0, int(left[0]))))
    if not is_done:
        raise OutOfTimeError
    if table.least_s[n] == np.inf:
        return None
    end, state = n, int(table.best_s[n].argmin())
    value_s, slices = float(table.best_s[end, state]), []
    while end:
        start, c = int(table.start[end, state]), int(table.last[end, state])
        slices.append((c, start, end))
        end, state = start, state - int(stride[c])
    return SliceChain(value_s, tuple(reversed(slices)))


def _rows(atoms: Atoms, memory: Memory, stride: IntArray, used: IntArray) -> row_kernel.Rows:
    from baselines.pipelines import row_kernel

    net_ptr, net_at = atoms.nets_of
    ptr, reader = atoms.net_readers
    return row_kernel.Rows(
        op_s=atoms.op_s,
        net_ptr=net_ptr,
        net_at=net_at,
        producer=atoms.net_producer,
        readers=np.diff(ptr),
        last_reader=reader[ptr[1:] - 1],
        enter_s=atoms.enter_s,
        leave_s=atoms.leave_s,
        own_bytes=memory.own_bytes,
        top_bytes=memory.top_bytes,
        capacity=atoms.classes.capacity_bytes,
        stride=stride,
        used=used,
        work_s=np.concatenate([[0.0], np.cumsum(atoms.least_s)]),
        reach=used @ shares(atoms),
    )


def shares(atoms: Atoms) -> FloatArray:
    """float64 [C]: at most this much of an atom's least time does a device of a class do in each of its seconds."""
    least = atoms.least_s[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(least > 0, least / atoms.op_s, 0.0)
    return np.where((atoms.least_s > 0).any(), ratio.max(axis=0, initial=0.0), 1.0) * np.ones(len(ratio[0]))


def largest_cost_s(atoms: Atoms) -> float:
    """No slice on any device costs as much."""
    finite = np.where(np.isfinite(atoms.op_s), atoms.op_s, 0.0)
    wire = (atoms.enter_s + atoms.leave_s).max(axis=1, initial=0.0).sum()
    return float(finite.max(axis=1, initial=0.0).sum() + wire) * 1.001 + 1e-12


def no_chain(atoms: Atoms, memory: Memory) -> InfeasibleError:
    """The error for a problem without a contiguous split."""
    problem = atoms.classes.problem
    names, devices = problem.graph.op_names, problem.cluster.devices
    sizes = np.bincount(atoms.of_op, minlength=atoms.count)
    refused = np.flatnonzero(np.isinf(atoms.least_s))
    if len(refused):
        ops = np.flatnonzero(atoms.of_op == refused[0])
        listed = ", ".join(repr(names[i]) for i in ops[:3].tolist())
        return InfeasibleError(
            f"no contiguous split can separate ops {listed}{' ...' if len(ops) > 3 else ''}, and no device of cluster "
            f"{problem.cluster.name!r} suits all of them; take a method without contiguity."
        )
    used, top, d = 0, 0, 0
    for atom in range(atoms.count):
        own, largest = int(memory.own_bytes[atom]), int(memory.top_bytes[atom])
        while used + own + max(top, largest) > devices[d].usable_bytes:
            if d + 1 == len(devices):
                op = int(np.flatnonzero(atoms.of_op == atom)[0])
                free = max(0, devices[d].usable_bytes - used - max(0, top - largest))
                group = f" with the {sizes[atom] - 1} ops that cannot be cut off it" if sizes[atom] > 1 else ""
                return InfeasibleError(
                    f"op {names[op]!r}{group} needs {exact_bytes(own + largest)} on {devices[d].name}, where "
                    f"{exact_bytes(free)} are free behind the ops before it; no contiguous split fits."
                )
            used, top, d = 0, 0, d + 1
        used, top = used + own, max(top, largest)
    atom = int((memory.own_bytes + memory.top_bytes).argmax())
    op = int(np.flatnonzero(atoms.of_op == atom)[0])
    d = int(np.where(problem.allowed[op], problem.capacity_bytes, -1).argmax())
    return InfeasibleError(
        f"op {names[op]!r} needs {exact_bytes(int(memory.own_bytes[atom] + memory.top_bytes[atom]))} on "
        f"{devices[d].name}, where at most {exact_bytes(devices[d].usable_bytes)} are free, and no contiguous split "
        f"fits memory and pins of cluster {problem.cluster.name!r}; take a method without contiguity."
    )


def _largest(atoms: Atoms, per_op: IntArray) -> IntArray:
    result = np.zeros(atoms.count, dtype=np.int64)
    np.maximum.at(result, atoms.of_op, per_op)
    return result


# -- Which device each slice gets -----------------------------------------------------------------------------


def arranged(problem: Problem, device: IntArray, classes: Iterable[IntArray]) -> IntArray:
    """The same parts, int64 [n], swapped between the devices of each class as long as the busiest link gains by it.

    Only overlapped communication has links to relieve. Each swap takes O(D^2 * links), whatever the graph.
    """
    n_devices = problem.cluster.n_devices
    exclusive = np.array([link.exclusive for link in problem.cluster.links], dtype=np.bool_)
    if problem.cluster.is_blocking or not exclusive.any():
        return device
    traffic, on_link = _traffic(problem, device), _on_link(problem)[:, exclusive]
    per_unit = np.stack([problem.latency_s, 1 / problem.bandwidth_bytes_per_s, problem.hops.astype(np.float64)])

    def busiest_s(place: IntArray) -> float:
        there = per_unit[:, place[:, None], place[None, :]]
        route = (place[:, None] * n_devices + place[None, :]).reshape(-1)
        return float(((traffic * there).sum(axis=0).reshape(-1) @ on_link[route]).max())

    place = np.arange(n_devices)  # where each part goes, by where it is now
    pairs = [pair for members in classes for pair in itertools.combinations(members.tolist(), 2)]
    best_s, improved = busiest_s(place), True
    while improved:
        improved = False
        for a, b in pairs:
            swapped = place.copy()
            swapped[[a, b]] = place[[b, a]]
            value_s = busiest_s(swapped)
            if value_s < best_s * (1 - 1e-9):
                best_s, place, improved = value_s, swapped, True
    return place[device]


def _traffic(problem: Problem, device: IntArray) -> FloatArray:
    """float64 [3, D, D]: transfers, bytes and measured seconds per link, from device to device."""
    graph, n = problem.graph, problem.cluster.n_devices
    producer, consumer, tensor = graph.edge_list
    remote = device[producer] != device[consumer]
    moved, target = np.divmod(np.unique(tensor[remote] * n + device[consumer[remote]]), n)
    pair = device[graph.tensor_producer[moved]] * n + target
    measured = graph.tensor_transfer_s[moved]
    modelled = np.isnan(measured)
    amounts = modelled, graph.tensor_bytes[moved] * modelled, np.where(modelled, 0.0, measured)
    return np.stack([np.bincount(pair, amount, n * n).reshape(n, n) for amount in amounts])


def _on_link(problem: Problem) -> FloatArray:
    """float64 [D * D, links]: 1 where a link is part of a route."""
    ptr, links = problem.route
    result = np.zeros((len(ptr) - 1, len(problem.cluster.links)))
    result[np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)), links] = 1.0
    return result
