"""A second simulator: docs/score.md in plain Python, slow, for checking the fast one.

It shares no code with `env.kernel`, `env.simulator` or `env.problem`. So that ties fall the same way, both use the
same arithmetic: end = start + seconds, transfer seconds = latency + bytes / bandwidth, remaining path = op seconds +
max(transfer seconds + remaining path).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from env.cluster import Cluster, Device
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import ANY_DEVICE, Op, OpGraph, Tensor

PRIORITIES = ("longest_path", "fifo", "msr")


@dataclass(frozen=True)
class Interval:
    """Bytes on a device from ``start_s`` until just before ``end_s``."""

    device: int
    start_s: float
    end_s: float
    size_bytes: int


@dataclass(frozen=True)
class Sending:
    """One transfer: tensor number, source and target device numbers, start and end (s)."""

    tensor: int
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ReferenceResult:
    """What one step did (n ops, D devices, L links).

    Attributes:
        step_time_s: end of the last op.
        busy_s: D numbers, seconds each device computes.
        peak_bytes: D numbers.
        link_bytes: L numbers, bytes over each link.
        op_start_s, op_end_s: n numbers.
        transfers: in order of request.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    link_bytes: tuple[float, ...]
    op_start_s: tuple[float, ...]
    op_end_s: tuple[float, ...]
    transfers: tuple[Sending, ...]


def simulate_reference(
    graph: OpGraph,
    cluster: Cluster,
    placement: Sequence[int] | Mapping[str, str],
    priority: str = "longest_path",
    order: Sequence[float] | None = None,
) -> ReferenceResult:
    """Simulate one step.

    Args:
        graph, cluster: any; pins and colocation are not looked at.
        placement: a device number per op, or device names by op name.
        priority: ``"longest_path"``, ``"fifo"`` or ``"msr"``.
        order: a number per op, lower first; replaces ``priority``.

    Raises:
        UnknownNameError: the priority does not exist.
        MismatchError: the placement is not one device of the cluster per op of the graph.
    """
    if order is None and priority not in PRIORITIES:
        raise UnknownNameError("priority", priority, PRIORITIES)
    step = _Step(graph, cluster, device_numbers(graph, cluster, placement), priority, order)
    step.run()
    return step.result()


def device_numbers(graph: OpGraph, cluster: Cluster, placement: Sequence[int] | Mapping[str, str]) -> list[int]:
    """A placement as one device number per op.

    Raises:
        MismatchError: not exactly one device of the cluster for each op of the graph.
    """
    names = {device.name: number for number, device in enumerate(cluster.devices)}
    if isinstance(placement, Mapping):
        for op in graph.op_names:
            if op not in placement:
                raise MismatchError(f"the placement has no device for op {op!r}; place every op of the graph once.")
        for op in set(placement) - set(graph.op_names):
            raise MismatchError(f"the placement names op {op!r}, which graph {graph.name!r} does not have.")
        for op, device in placement.items():
            if device not in names:
                raise MismatchError(
                    f"op {op!r} is placed on {device!r}, but cluster {cluster.name!r} has {', '.join(names)}."
                )
        return [names[placement[op]] for op in graph.op_names]
    numbers = [int(number) for number in placement]
    if len(numbers) != graph.n_ops or any(not 0 <= number < len(names) for number in numbers):
        raise MismatchError(
            f"a placement has one number from 0 to {len(names) - 1} for each of {graph.n_ops} ops; "
            f"got {len(numbers)} numbers from {min(numbers, default=0)} to {max(numbers, default=0)}."
        )
    return numbers


def op_seconds(op: Op, device: Device) -> float:
    """Time of an op on a device: measured, or the roofline."""
    for key in (device.name, device.model, device.kind, ANY_DEVICE):
        if key in op.time_s:
            return float(op.time_s[key])
    peak = device.peak_flops[op.dtype] if op.dtype in device.peak_flops else device.peak_flops["float32"]
    return op.kernels * device.launch_overhead_s + max(op.flops / peak, op.bytes_moved / device.memory_bytes_per_s)


def transfer_seconds(tensor: Tensor, cluster: Cluster, source: int, target: int) -> float:
    """Time to move a tensor from one device to another over idle links."""
    links = [cluster.links[number] for number in cluster.routes[source, target].links]
    if tensor.transfer_s is not None:
        return tensor.transfer_s * len(links)
    latency_s = sum(link.latency_s for link in links)
    slowest = min((link.bandwidth_bytes_per_s for link in links), default=math.inf)
    return latency_s + tensor.bytes / slowest


def memory_intervals(
    ops: Sequence[Op],
    tensors: Sequence[Tensor],
    device: Sequence[int],
    op_start_s: Sequence[float],
    op_end_s: Sequence[float],
    transfers: Sequence[Sending],
) -> list[Interval]:
    """Everything that takes memory for part of the step: workspaces and the copies of tensors."""
    number = {op.name: i for i, op in enumerate(ops)}
    found = [
        Interval(device[i], op_start_s[i], op_end_s[i], op.workspace_bytes)
        for i, op in enumerate(ops)
        if op.workspace_bytes > 0
    ]
    sent: dict[int, list[Sending]] = {}
    for transfer in transfers:
        sent.setdefault(transfer.tensor, []).append(transfer)
    for t, tensor in enumerate(tensors):
        producer = number[tensor.producer]
        readers = [number[name] for name in tensor.consumers]
        home = device[producer]
        last_use_s = [op_end_s[producer]]
        last_use_s += [op_end_s[c] for c in readers if device[c] == home]
        last_use_s += [transfer.end_s for transfer in sent.get(t, ())]
        found.append(Interval(home, op_start_s[producer], max(last_use_s), tensor.bytes))
        for transfer in sent.get(t, ()):
            ends = [op_end_s[c] for c in readers if device[c] == transfer.target]
            found.append(Interval(transfer.target, transfer.start_s, max(ends, default=transfer.end_s), tensor.bytes))
    return found


def peak_memory(kept_bytes: Sequence[int], intervals: Sequence[Interval]) -> tuple[int, ...]:
    """The largest sum of bytes at any instant, per device; ``kept_bytes`` are there all the time."""
    changes: list[list[tuple[float, int]]] = [[] for _ in kept_bytes]
    for interval in intervals:
        if interval.start_s < interval.end_s:
            changes[interval.device] += [
                (interval.start_s, interval.size_bytes),
                (interval.end_s, -interval.size_bytes),
            ]
    peaks = []
    for kept, events in zip(kept_bytes, changes, strict=True):
        now = peak = kept
        for _, change in sorted(events):  # at one instant, what ends (a negative change) comes first
            now += change
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


@dataclass
class _Step:
    """The state of one simulated step."""

    graph: OpGraph
    cluster: Cluster
    device: list[int]
    priority: str
    order: Sequence[float] | None
    now: float = 0.0
    running: dict[int, int] = field(default_factory=dict)  # device -> op
    transfers: list[Sending] = field(default_factory=list)
    under_way: list[tuple[float, int]] = field(default_factory=list)  # heap of (end, transfer)

    def __post_init__(self) -> None:
        self.ops, self.tensors = self.graph.records()
        number = {op.name: i for i, op in enumerate(self.ops)}
        self.readers = [[number[name] for name in tensor.consumers] for tensor in self.tensors]
        self.outputs: list[list[int]] = [[] for _ in self.ops]
        self.missing = [0] * len(self.ops)
        for t, tensor in enumerate(self.tensors):
            self.outputs[number[tensor.producer]].append(t)
            for c in self.readers[t]:
                self.missing[c] += 1
        self.op_s = [op_seconds(op, self.cluster.devices[d]) for op, d in zip(self.ops, self.device, strict=True)]
        self.remaining_s = self._remaining_paths()
        self.ready_since = {i: 0.0 for i, missing in enumerate(self.missing) if missing == 0}
        self.ready: list[list[int]] = [[] for _ in self.cluster.devices]
        for i in self.ready_since:
            self.ready[self.device[i]].append(i)
        self.start_s = [math.nan] * len(self.ops)
        self.end_s = [math.nan] * len(self.ops)
        self.link_free_s = [0.0] * len(self.cluster.links)
        self.link_bytes = [0.0] * len(self.cluster.links)

    def _remaining_paths(self) -> list[float]:
        remaining = [0.0] * len(self.ops)
        for i in reversed(self.graph.topological_order.tolist()):
            onward = [0.0]
            for t in self.outputs[i]:
                for c in self.readers[t]:
                    if self.device[c] == self.device[i]:
                        onward.append(remaining[c])
                    else:
                        onward.append(self._transfer_s(t, self.device[i], self.device[c]) + remaining[c])
            remaining[i] = self.op_s[i] + max(onward)
        return remaining

    def _transfer_s(self, tensor: int, source: int, target: int) -> float:
        return transfer_seconds(self.tensors[tensor], self.cluster, source, target)

    def run(self) -> None:
        while True:
            while self._end_ops() + self._arrive() + self._start_ops():
                pass
            upcoming = [self.end_s[i] for i in self.running.values()] + [end for end, _ in self.under_way[:1]]
            if not upcoming:
                return
            self.now = min(upcoming)

    def _end_ops(self) -> int:
        ended = [d for d in sorted(self.running) if self.end_s[self.running[d]] == self.now]
        for d in ended:
            i = self.running.pop(d)
            for t in self.outputs[i]:
                targets = dict.fromkeys(self.device[c] for c in self.readers[t])  # in order of their first consumer
                for target in targets:
                    if target == d:
                        self._deliver(t, d)
                    else:
                        self._request(t, d, target)
        return len(ended)

    def _request(self, tensor: int, source: int, target: int) -> None:
        links = self.cluster.routes[source, target].links
        start = max([self.now, *(self.link_free_s[link] for link in links if self.cluster.links[link].exclusive)])
        end = start + self._transfer_s(tensor, source, target)
        for link in links:
            self.link_free_s[link] = end
            self.link_bytes[link] += self.tensors[tensor].bytes
        heapq.heappush(self.under_way, (end, len(self.transfers)))
        self.transfers.append(Sending(tensor, source, target, start, end))

    def _arrive(self) -> int:
        arrived = 0
        while self.under_way and self.under_way[0][0] == self.now:
            transfer = self.transfers[heapq.heappop(self.under_way)[1]]
            self._deliver(transfer.tensor, transfer.target)
            arrived += 1
        return arrived

    def _deliver(self, tensor: int, device: int) -> None:
        for c in self.readers[tensor]:
            if self.device[c] == device:
                self.missing[c] -= 1
                if self.missing[c] == 0:
                    self.ready_since[c] = self.now
                    self.ready[device].append(c)

    def _start_ops(self) -> int:
        started = 0
        for d, ready in enumerate(self.ready):
            if d not in self.running and ready:
                i = min(ready, key=self._rank)
                ready.remove(i)
                self.running[d] = i
                self.start_s[i] = self.now
                self.end_s[i] = self.now + self.op_s[i]
                started += 1
        return started

    def _rank(self, i: int) -> tuple[float, ...]:
        """Ready ops start in increasing order of this."""
        if self.order is not None:
            return self.order[i], i
        if self.priority == "fifo":
            return self.ready_since[i], i
        if self.priority == "msr":
            return -self._msr_score(i), -self.remaining_s[i], i
        return -self.remaining_s[i], i

    def _msr_score(self, i: int) -> int:
        score = 0
        for t in self.outputs[i]:
            for c in self.readers[t]:
                score += 1
                score += 1 if self.device[c] != self.device[i] else 0
                score += 1 if self.missing[c] == 1 else 0
                score += 5 if self.device[c] not in self.running else 0
        return score

    def result(self) -> ReferenceResult:
        n_devices = len(self.cluster.devices)
        kept = [0] * n_devices
        busy = [0.0] * n_devices
        for i, op in enumerate(self.ops):
            kept[self.device[i]] += op.kept_bytes
            busy[self.device[i]] += self.op_s[i]
        intervals = memory_intervals(self.ops, self.tensors, self.device, self.start_s, self.end_s, self.transfers)
        return ReferenceResult(
            step_time_s=max(self.end_s),
            busy_s=tuple(busy),
            peak_bytes=peak_memory(kept, intervals),
            link_bytes=tuple(self.link_bytes),
            op_start_s=tuple(self.start_s),
            op_end_s=tuple(self.end_s),
            transfers=tuple(self.transfers),
        )
