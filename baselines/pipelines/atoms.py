"""`Atoms`: a graph as a contiguous split sees it, and what each of its slices costs on each class of devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baselines.pipelines.contraction import Quotient, allowed_parts, rows
from env.problem import Problem
from env.simulation.scoring import Charges
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Classes:
    """Devices a split may exchange for each other: equal op times, pins, memory and share in transfers (C classes).

    Attributes:
        problem: the graph and the cluster.
        nearest: cost a transfer as over the fastest routes of a class, not as over its mean route.
    """

    problem: Problem
    nearest: bool = False

    @cached_property
    def devices(self) -> tuple[IntArray, ...]:
        """C arrays of device numbers, each increasing; classes by their first device."""
        problem, (enters, leaves) = self.problem, self._pairs
        found: dict[tuple[object, ...], list[int]] = {}
        for d, capacity in enumerate(problem.capacity_bytes.tolist()):
            pays = bool(enters[2][:, d].any()), bool(leaves[2][d].any())
            column = problem.op_s[:, d].tobytes(), problem.allowed[:, d].tobytes()
            found.setdefault((capacity, pays, *column), []).append(d)
        return tuple(np.array(members, dtype=np.int64) for members in found.values())

    @cached_property
    def count(self) -> IntArray:
        """int64 [C]: devices of each class."""
        return np.array([len(members) for members in self.devices], dtype=np.int64)

    @cached_property
    def first(self) -> IntArray:
        """int64 [C]: the first device of each class."""
        return np.array([members[0] for members in self.devices], dtype=np.int64)

    @cached_property
    def capacity_bytes(self) -> IntArray:
        """int64 [C]: memory of one device of each class."""
        return self.problem.capacity_bytes[self.first]

    @cached_property
    def are_alike(self) -> bool:
        """True if all routes into (and out of) a class cost the same, so that it does not matter where a tensor is."""
        n = self.problem.cluster.n_devices
        for per_pair, inwards in zip(self._pairs, (True, False), strict=True):
            for members in self.devices:
                away = _others(per_pair, members, n, inwards)
                if away.size and (np.ptp(away, axis=1) > 1e-12 * np.abs(away).max(axis=1)).any():
                    return False
        return True

    @property
    def are_exact(self) -> bool:
        """True if a slice costs a device just what its ops and their tensors say, wherever the others are."""
        return self.are_alike and self.problem.cluster.is_blocking

    @cached_property
    def enter_s(self) -> FloatArray:
        """float64 [m, C]: what a tensor costs a device of each class that receives it."""
        return self._charge(self._pairs[0], inwards=True)

    @cached_property
    def leave_s(self) -> FloatArray:
        """float64 [m, C]: what a tensor costs a device of each class that sends it, to however many others."""
        return self._charge(self._pairs[1], inwards=False)

    @cached_property
    def _pairs(self) -> tuple[FloatArray, FloatArray]:
        """float64 [3, D, D] for receiver and sender: seconds per transfer, per byte and per measured second."""
        problem, charges = self.problem, Charges(self.problem)
        n = problem.cluster.n_devices
        if charges.blocking:
            shares = charges.receiver_pays, charges.sender_pays
            measured = np.ones((n, n))
        else:
            ptr, links = problem.route
            exclusive = np.array([problem.cluster.links[k].exclusive for k in links.tolist()], dtype=np.float64)
            total = np.concatenate([[0.0], np.cumsum(exclusive)])
            loaded = (total[ptr[1:]] > total[ptr[:-1]]).astype(np.float64).reshape(n, n)
            shares = loaded, loaded
            measured = problem.hops.astype(np.float64)
        per_byte = 1.0 / problem.bandwidth_bytes_per_s
        receiver, sender = (
            np.stack([share * problem.latency_s, share * per_byte, share * measured]) for share in shares
        )
        return receiver, sender

    def _charge(self, per_pair: FloatArray, inwards: bool) -> FloatArray:
        graph, n = self.problem.graph, self.problem.cluster.n_devices
        result = np.zeros((graph.n_tensors, len(self.devices)))
        for c, members in enumerate(self.devices):
            away = _others(per_pair, members, n, inwards)
            if away.size:
                per_transfer, per_byte, per_second = away.min(axis=1) if self.nearest else away.mean(axis=1)
                modelled = per_transfer + graph.transfer_bytes * per_byte
                measured = graph.tensor_transfer_s * per_second
                result[:, c] = np.where(np.isnan(measured), modelled, measured)
        return result


def _others(per_pair: FloatArray, members: IntArray, n_devices: int, inwards: bool) -> FloatArray:
    """float64 [3, x]: the entries of all pairs of a member and another device."""
    apart = ~np.eye(n_devices, dtype=np.bool_)
    inside = np.zeros(n_devices, dtype=np.bool_)
    inside[members] = True
    return per_pair[:, apart & (inside[None, :] if inwards else inside[:, None])]


@dataclass(frozen=True, eq=False)
class Atoms:
    """The parts that a contiguous split cannot cut, in one linear order that respects what must precede what.

    N atoms, M nets, C classes. A net is all tensors of one atom that the same other atoms read.

    Attributes:
        classes: the devices.
        of_op: int64 [n], atom of each op.
        op_s: float64 [N, C], seconds of an atom's ops; infinite where one of them may not run.
        net_producer: int64 [M].
        net_readers: ``(ptr [M + 1], atoms)``, increasing, without the producer.
        net_of_tensor: int64 [m], -1 for a tensor that only its own atom reads, or nobody.
        notes: what a split of the atoms does not see, for people.
    """

    classes: Classes
    of_op: IntArray
    op_s: FloatArray
    net_producer: IntArray
    net_readers: tuple[IntArray, IntArray]
    net_of_tensor: IntArray
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.op_s)

    @cached_property
    def nets_of(self) -> tuple[IntArray, IntArray]:
        """``(ptr [N + 1], nets)``: the nets each atom produces or reads."""
        ptr, readers = self.net_readers
        ends = np.concatenate([self.net_producer, readers])
        nets = np.concatenate([np.arange(len(ptr) - 1), np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))])
        return rows(ends, nets, self.count)

    @cached_property
    def enter_s(self) -> FloatArray:
        """float64 [M, C]: what a net costs a slice that reads it without producing it."""
        return self._per_net(self.classes.enter_s)

    @cached_property
    def leave_s(self) -> FloatArray:
        """float64 [M, C]: what a net costs a slice that produces it, if not all readers are in the slice."""
        return self._per_net(self.classes.leave_s)

    @cached_property
    def least_s(self) -> FloatArray:
        """float64 [N]: seconds of each atom on the class that is fastest for it; infinite if none may run it."""
        result: FloatArray = self.op_s.min(axis=1)
        return result

    def _per_net(self, per_tensor: FloatArray) -> FloatArray:
        result = np.zeros((len(self.net_producer), *per_tensor.shape[1:]))
        moved = self.net_of_tensor >= 0
        np.add.at(result, self.net_of_tensor[moved], per_tensor[moved])
        return result


def atoms_of(quotient: Quotient, classes: Classes) -> Atoms:
    """The atoms of an ordered quotient: every edge leads from a lower number to a higher."""
    problem, part, count = classes.problem, quotient.of_op, quotient.count
    graph = problem.graph
    op_s = np.zeros((count, len(classes.first)))
    np.add.at(op_s, part, problem.op_s[:, classes.first])
    op_s[~allowed_parts(problem, quotient)[:, classes.first]] = np.inf
    _, consumer, tensor = graph.edge_list
    source = part[graph.tensor_producer]
    away = source[tensor] != part[consumer]
    pairs = np.unique(tensor[away] * count + part[consumer[away]])
    moved, reader = pairs // count, pairs % count
    tensors, start = np.unique(moved, return_index=True)
    readers, ends = reader.tolist(), [*start.tolist(), len(reader)]
    nets: dict[tuple[int, ...], int] = {}
    net_of_tensor = np.full(graph.n_tensors, -1, dtype=np.int64)
    for i, t in enumerate(tensors.tolist()):
        net_of_tensor[t] = nets.setdefault((int(source[t]), *readers[ends[i] : ends[i + 1]]), len(nets))
    ptr = np.concatenate([[0], np.cumsum([len(net) - 1 for net in nets])]).astype(np.int64)
    return Atoms(
        classes=classes,
        of_op=part,
        op_s=op_s,
        net_producer=np.array([net[0] for net in nets], dtype=np.int64),
        net_readers=(ptr, np.array([atom for net in nets for atom in net[1:]], dtype=np.int64)),
        net_of_tensor=net_of_tensor,
        notes=quotient.notes,
    )
