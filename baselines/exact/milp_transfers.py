"""Columns and rows of the mixed-integer programme, and the loads of tensors that move among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from env.problem import Problem
from env.simulation.scoring import Charges
from graphs.opgraph import IntArray

Terms = list[tuple[int, float]]  # (column, coefficient) pairs
DEVICE, LINK = "device", "link"
Resource = tuple[str, int]  # whose time is loaded


@dataclass
class MilpRows:
    """Columns between 0 and ``upper`` with a value in the solution to start from; rows in CSR form."""

    upper: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_ptr: list[int] = field(default_factory=lambda: [0])
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add_column(self, warm: float, upper: float = 1.0) -> int:
        """Its number."""
        self.upper.append(upper)
        self.warm.append(float(warm))
        return len(self.warm) - 1

    def add(self, *terms: Terms, lower: float = -np.inf, upper: float = np.inf) -> None:
        """A row: ``lower <= sum of all terms <= upper``; no column twice."""
        for column, value in (term for part in terms for term in part):
            self.column.append(column)
            self.value.append(value)
        self.row_ptr.append(len(self.column))
        self.row_lower.append(lower)
        self.row_upper.append(upper)


@dataclass(frozen=True)
class Net:
    """Tensors that always move together: one producing unit and the same other units as consumers.

    Attributes:
        producer: unit.
        consumers: other units, increasing.
        tensors: int64, their numbers.
        measured: whether their transfer times are measured.
    """

    producer: int
    consumers: tuple[int, ...]
    tensors: IntArray
    measured: bool


def nets_of(problem: Problem) -> list[Net]:
    """All tensors that a placement can make move."""
    graph, unit = problem.graph, problem.unit_of
    ptr, consumers = graph.consumer_ptr.tolist(), unit[graph.consumers].tolist()
    producer, measured = unit[graph.tensor_producer].tolist(), (~np.isnan(graph.tensor_transfer_s)).tolist()
    grouped: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}
    for t in range(graph.n_tensors):
        others = tuple(sorted({*consumers[ptr[t] : ptr[t + 1]]} - {producer[t]}))
        if others:
            grouped.setdefault((producer[t], others, measured[t]), []).append(t)
    return [Net(p, others, np.array(tensors), known) for (p, others, known), tensors in grouped.items()]


@dataclass(frozen=True)
class _Crossing:
    """Resources that a transfer loads alike, whichever of ``sources`` it comes from and of ``targets`` it goes to."""

    sources: frozenset[int]
    targets: frozenset[int]
    resources: tuple[Resource, ...]


@dataclass(frozen=True)
class Transfers:
    """Writes the columns and rows of one net after the other (U units, D devices).

    Attributes:
        problem: any.
        rows: where they are written.
        unit_column: int64 [U, D], the column that says that a unit runs on a device, -1 where it does not.
        start: int64 [U], the placement to start from.
        load: for each resource the columns that load it, with seconds.
    """

    problem: Problem
    rows: MilpRows
    unit_column: IntArray
    start: IntArray
    load: dict[Resource, Terms] = field(default_factory=dict)

    def add(self, net: Net) -> None:
        """Add the net to all loads."""
        crossings = self._crossings[net.measured]
        if len(net.consumers) == 1 and crossings is not None:
            for crossing in crossings:
                self._cross(net, crossing)
            return
        for target in range(self._n_devices):
            self._receive(net, target)
        for source in range(self._n_devices) if self._charges.blocking else ():
            self._send(net, source)

    def on(self, unit: int, devices: Iterable[int], value: float = 1.0) -> Terms:
        """Terms that add up to ``value`` if the unit runs on one of these devices, else to 0."""
        return [(int(self.unit_column[unit, d]), value) for d in devices if self.unit_column[unit, d] >= 0]

    @property
    def _n_devices(self) -> int:
        return self.problem.cluster.n_devices

    @cached_property
    def _charges(self) -> Charges:
        return Charges(self.problem)

    def _charge(self, resources: Iterable[tuple[Resource, float]], column: int) -> None:
        for resource, amount in resources:
            self.load.setdefault(resource, []).append((column, amount))

    def _seconds(self, net: Net, source: int, target: int) -> float:
        """Seconds that a resource spends when the net moves from source to target."""
        seconds = self._charges.busy_s if self._charges.blocking else self._charges.transfer_s
        return float(seconds(net.tensors, np.array(source), np.array(target)).sum())

    def _resources(self, source: int, target: int) -> list[Resource]:
        """Resources that a transfer from source to target loads, apart from the sender."""
        cluster = self.problem.cluster
        if not self._charges.blocking:
            return [(LINK, link) for link in cluster.routes[source, target].links if cluster.links[link].exclusive]
        return [(DEVICE, target)] if self._charges.receiver_pays[source, target] else []

    def _rate(self, source: int, target: int, measured: bool) -> tuple[float, ...]:
        """Key of all that the time of a transfer depends on beside its tensor."""
        problem = self.problem
        if measured:
            return () if self._charges.blocking else (len(problem.cluster.routes[source, target].links),)
        return float(problem.latency_s[source, target]), float(problem.bandwidth_bytes_per_s[source, target])

    # -- one consumer ---------------------------------------------------------------------------------------------

    @cached_property
    def _crossings(self) -> dict[bool, tuple[_Crossing, ...] | None]:
        """Crossings of a transfer, by whether times are measured; None where a pair of sets cannot say it."""
        return {measured: self._find_crossings(measured) for measured in (False, True)}

    def _find_crossings(self, measured: bool) -> tuple[_Crossing, ...] | None:
        pairs: dict[tuple[Resource, tuple[float, ...]], set[tuple[int, int]]] = {}
        for a, b in self.problem.cluster.routes:
            sender: list[Resource] = [(DEVICE, a)] if self._charges.blocking and self._charges.sender_pays[a, b] else []
            for resource in (*self._resources(a, b), *sender):
                pairs.setdefault((resource, self._rate(a, b, measured)), set()).add((a, b))
        alike: dict[tuple[frozenset[int], frozenset[int], tuple[float, ...]], list[Resource]] = {}
        for (resource, rate), used in pairs.items():
            sources, targets = frozenset(a for a, _ in used), frozenset(b for _, b in used)
            if sources & targets or len(used) < len(sources) * len(targets):
                return None
            alike.setdefault((sources, targets, rate), []).append(resource)
        return tuple(_Crossing(a, b, tuple(resources)) for (a, b, _), resources in alike.items())

    def _cross(self, net: Net, crossing: _Crossing) -> None:
        """A column that is 1 if the producer is at one of the sources and the consumer at one of the targets."""
        source, target = min(crossing.sources), min(crossing.targets)
        seconds = self._seconds(net, source, target)
        (consumer,), everywhere = net.consumers, frozenset(range(self._n_devices))
        made, read = self.on(net.producer, crossing.sources), self.on(consumer, crossing.targets)
        if not (made and read and crossing.resources and seconds):
            return
        moves = self.start[net.producer] in crossing.sources and self.start[consumer] in crossing.targets
        column, lower = self.rows.add_column(moves), 1.0
        # column >= made + read - 1; either of the two is also 1 - the rest of its unit, often with fewer terms.
        terms = [(column, 1.0)]
        for unit, inside, devices in ((net.producer, made, crossing.sources), (consumer, read, crossing.targets)):
            outside = self.on(unit, everywhere - devices)
            if len(outside) < len(inside) or (len(outside) == len(inside) and unit == consumer):
                terms += outside
            else:
                terms += [(c, -value) for c, value in inside]
                lower -= 1.0
        self.rows.add(terms, lower=lower)
        self._charge([(resource, seconds) for resource in crossing.resources], column)

    # -- several consumers ------------------------------------------------------------------------------------------

    @cached_property
    def _sources(self) -> dict[bool, list[list[list[int]]]]:
        """All other devices by receiver and by whether times are measured, together where any tensor costs the same."""
        result: dict[bool, list[list[list[int]]]] = {}
        for measured in (False, True):
            result[measured] = []
            for b in range(self._n_devices):
                alike: dict[tuple[object, ...], list[int]] = {}
                for a in range(self._n_devices):
                    if a != b:
                        key = self._rate(a, b, measured), tuple(self._resources(a, b))
                        alike.setdefault(key, []).append(a)
                result[measured].append(list(alike.values()))
        return result

    def _receive(self, net: Net, target: int) -> None:
        """A device that runs consumers but not the producer gets the tensors once, from where they are made.

        For each set of sources told apart by what they cost: a column that says that they come from there. The free
        sources need none. With one costly set, "not from here or a free source" says it; with several, each column
        also needs the producer to be there.
        """
        rows = self.rows
        readers = [c for c in net.consumers if self.unit_column[c, target] >= 0]
        arrives = any(self.start[c] == target for c in readers)
        free, costly = self.on(net.producer, [target]), []
        for group in self._sources[net.measured][target] if readers else ():
            sources = [a for a in group if self.unit_column[net.producer, a] >= 0]
            used = self._resources(group[0], target)
            seconds = self._seconds(net, group[0], target)
            if sources and used and seconds:
                column = rows.add_column(arrives and self.start[net.producer] in sources)
                costly.append((column, sources))
                self._charge([(resource, seconds) for resource in used], column)
            else:
                free += self.on(net.producer, sources)
        for c in readers if costly else ():
            rows.add([(column, 1.0) for column, _ in costly], free, self.on(c, [target], -1.0), lower=0.0)
        for column, sources in costly if len(costly) > 1 else ():
            rows.add([(column, 1.0)], self.on(net.producer, sources, -1.0), upper=0.0)

    def _send(self, net: Net, source: int) -> None:
        """A device that produces what is consumed elsewhere sends it once, and pays for its dearest receiver."""
        if self.unit_column[net.producer, source] < 0:
            return
        for receivers, seconds in self._send_levels(net, source).items():
            leaves = self.start[net.producer] == source and any(self.start[c] in receivers for c in net.consumers)
            column = self.rows.add_column(leaves)
            self._charge([((DEVICE, source), seconds)], column)
            sent = [(column, 1.0), (int(self.unit_column[net.producer, source]), -1.0)]
            for c in net.consumers:
                reached = self.on(c, receivers, -1.0)
                others = self.on(c, set(range(self._n_devices)) - receivers)  # 1 - reached, often fewer terms
                if reached and len(others) <= len(reached):
                    self.rows.add(sent, others, lower=0.0)
                elif reached:
                    self.rows.add(sent, reached, lower=-1.0)

    def _send_levels(self, net: Net, source: int) -> dict[frozenset[int], float]:
        """Sets of receivers, and the seconds that a consumer anywhere in the set adds to what the sender pays."""
        receivers = np.flatnonzero(self._charges.sender_pays[source])
        levels: dict[frozenset[int], float] = {}
        for t in net.tensors if len(receivers) else ():
            busy_s = self._charges.busy_s(np.array(t), np.array(source), receivers)
            busy_s = np.broadcast_to(busy_s, receivers.shape)
            below = 0.0
            for seconds in np.unique(busy_s[busy_s > 0]).tolist():
                dear = frozenset(receivers[busy_s >= seconds].tolist())
                levels[dear] = levels.get(dear, 0.0) + seconds - below
                below = seconds
        return levels
