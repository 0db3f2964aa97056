"""Chains of slices: the best way to cut ideals of atoms into one slice per device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.memory import Allowance
from baselines.meter import OutOfTimeError, charge, stopped_in_time, work_left_s
from baselines.pipelines.atoms import Atoms
from baselines.pipelines.contraction import rows
from env.units import Units
from graphs.arrays import pointers, sums
from graphs.errors import InfeasibleError
from graphs.formatting import exact_bytes
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from baselines.pipelines import ideal_kernel
    from baselines.pipelines.lattice_kernel import Bits, Narrow

_MOST_VALUES = 2**23  # of a table of ideals by states: 64 MB, and 40 MB to find the way back


@dataclass(frozen=True, eq=False)
class Lattice:
    """Ideals of atoms and what can be taken from each (I ideals, x steps); `ideal_kernel` says more.

    Attributes:
        ptr: int64 [I + 1].
        atom, smaller: int32 [x], the atom each step takes and the ideal it leaves.
        members: uint64 [I, words], one bit per atom.
    """

    ptr: IntArray
    atom: Narrow
    smaller: Narrow
    members: Bits

    @property
    def count(self) -> int:
        return len(self.members)


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory charged to a slice: the sum of its atoms' own bytes and the largest of their top bytes, int64 [N] each."""

    own_bytes: IntArray
    top_bytes: IntArray


class OverBudgetError(Exception):
    """A search of chains would look at more slices than it may."""


@dataclass
class Visits:
    """Number of slices that may still be looked at."""

    left: int


@dataclass(frozen=True, eq=False)
class SliceChain:
    """A split: its largest load as the slices see it, the class of each slice from the first on, and its atoms."""

    value_s: float
    slices: tuple[tuple[int, IntArray], ...]

    def device(self, atoms: Atoms) -> IntArray:
        """int64 [n]: slices of a class to its devices in cluster order."""
        of_atom = np.empty(atoms.count, dtype=np.int64)
        free = [iter(members.tolist()) for members in atoms.classes.devices]
        for c, members in self.slices:
            of_atom[members] = next(free[c])
        return of_atom[atoms.of_op]


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """Numbers of devices used of each class: S combinations, mixed radix."""

    count: IntArray  # [C], devices that may be used

    @cached_property
    def stride(self) -> IntArray:
        """int64 [C]: how far apart states are that differ by one device of a class."""
        return np.concatenate([[1], np.cumprod(self.count[:-1] + 1)]).astype(np.int64)

    @property
    def total(self) -> int:
        return int(np.prod(self.count + 1))

    @cached_property
    def used(self) -> IntArray:
        """int64 [S, C]."""
        return np.arange(self.total)[:, None] // self.stride % (self.count + 1)


def charged(atoms: Atoms, units: Units, allowance: Allowance) -> Memory:
    """The memory of one attempt of `place_within_memory`."""
    per_op = np.zeros(len(atoms.of_op), dtype=np.int64)
    per_op[units.first_op] = allowance.unit_bytes
    top = np.zeros_like(per_op)
    top[units.first_op] = allowance.working_bytes
    return Memory(sums(atoms.of_op, per_op, atoms.count), _largest(atoms, top))


def prefixes(count: int) -> Lattice:
    """The ideals of one linear order."""
    below = np.arange(count + 1)[:, None] > np.arange(((count + 63) >> 6) * 64)[None, :]
    members = np.packbits(below, axis=1, bitorder="little").view(np.uint64)
    step = np.arange(count, dtype=np.int32)
    return Lattice(np.concatenate([[0], np.arange(count + 1)]).astype(np.int64), step, step, members)


def ideals(atoms: Atoms, most: int) -> Lattice | None:
    """All ideals, None if there are more than `most`, or more than 16 steps between them for each of these."""
    from baselines.pipelines import lattice_kernel

    before_ptr, before = atoms.before
    after = rows(before, np.repeat(np.arange(atoms.count), np.diff(before_ptr)), atoms.count)
    count, members, smaller, atom, larger = lattice_kernel.all_ideals(atoms.before, after, most, 16 * most)
    if not count:
        return None
    order = np.lexsort((atom, larger))  # found upwards, looked up from above
    ptr = pointers(larger, count)
    return Lattice(ptr, atom[order], smaller[order], members)


def best_chain(
    atoms: Atoms, lattice: Lattice, memory: Memory, count: IntArray, limit_s: float, visits: Visits, part: float
) -> SliceChain | None:
    """The chain of slices with the least largest load below a limit; None if there is none.

    Args:
        count: int64 [C], how many devices of each class may be used.
        visits: of which `part` may be spent on this.

    Raises:
        OverBudgetError: that does not suffice, or the table of ideals by states is too large.
        OutOfTimeError: no work is left.
    """
    from baselines.pipelines import ideal_kernel

    if np.isinf(atoms.least_s).any():  # no device may run all ops of some atom
        return None
    states = ClassCounts(count)
    if states.total * lattice.count > _MOST_VALUES:
        raise OverBudgetError
    size, n_ideals = (lattice.count, states.total), lattice.count
    table = ideal_kernel.Table(
        best_s=np.full(size, np.inf),
        least_s=np.full(n_ideals, np.inf),
        smaller=np.zeros(size, np.int32),
        last=np.zeros(size, np.int8),
    )
    rows = _rows(atoms, lattice, memory, states)
    affordable, wanted = work_left_s() / prices.VISIT_S, int(part * visits.left)
    allotted = int(min(wanted, affordable))
    left = np.array([allotted])
    blocking = atoms.classes.problem.cluster.is_blocking
    with stopped_in_time(lambda: left.fill(-1)):
        status = ideal_kernel.best_chains(rows, table, blocking, limit_s, left)
    looked_at = allotted - max(0, int(left[0]))
    visits.left -= looked_at
    charge(prices.VISIT_S * looked_at)
    if status == ideal_kernel.GAVE_UP:
        raise OutOfTimeError if allotted < wanted else OverBudgetError
    if status == ideal_kernel.NO_FIT:
        return None
    at, state = n_ideals - 1, int(table.best_s[-1].argmin())
    value_s, slices = float(table.best_s[at, state]), []
    while at:
        below, c = int(table.smaller[at, state]), int(table.last[at, state])
        slices.append((c, _members(lattice.members[at] ^ lattice.members[below])))
        at, state = below, state - int(states.stride[c])
    return SliceChain(value_s, tuple(reversed(slices)))


def _rows(atoms: Atoms, lattice: Lattice, memory: Memory, states: ClassCounts) -> ideal_kernel.Rows:
    from baselines.pipelines import ideal_kernel

    net_ptr, net_at = atoms.nets_of
    reader_ptr, reader = atoms.net_readers
    return ideal_kernel.Rows(
        ptr=lattice.ptr,
        step_atom=lattice.atom,
        step_ideal=lattice.smaller,
        sets=lattice.members,
        op_s=atoms.op_s,
        net_ptr=net_ptr,
        net_at=net_at,
        producer=atoms.net_producer,
        reader_ptr=reader_ptr,
        reader=reader,
        enter_s=atoms.enter_s,
        leave_s=atoms.leave_s,
        own_bytes=memory.own_bytes,
        top_bytes=memory.top_bytes,
        capacity=atoms.classes.capacity_bytes,
        stride=states.stride,
        used=states.used,
        work_s=_work(atoms, lattice),
        reach=states.used @ shares(atoms),
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


def _work(atoms: Atoms, lattice: Lattice) -> FloatArray:
    """float64 [I]: seconds of each ideal's atoms, each where it is fastest."""
    work_s = np.zeros(lattice.count)
    for word in range(lattice.members.shape[1]):
        bits = np.unpackbits(
            np.ascontiguousarray(lattice.members[:, word : word + 1]).view(np.uint8), axis=1, bitorder="little"
        )
        part = atoms.least_s[word * 64 : word * 64 + 64]
        work_s += bits[:, : len(part)] @ part
    return work_s


def _members(words: Bits) -> IntArray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _largest(atoms: Atoms, per_op: IntArray) -> IntArray:
    result = np.zeros(atoms.count, dtype=np.int64)
    np.maximum.at(result, atoms.of_op, per_op)
    return result
