"""A second simulator: docs/score.md in plain Python, slow, for checking the fast one.

It shares no code with `env.simulation.kernel`, `env.simulation.simulator` or `env.problem`. So that ties fall the same
way, both use the same arithmetic: end = start + seconds, transfer seconds = latency + bytes / bandwidth, remaining path
= op seconds + max(transfer seconds + remaining path).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from env.checking.reference_memory import Sending, kept_bytes, memory_intervals, memory_numbers, peak_memory
from env.checking.reference_times import op_times
from env.cluster import Cluster
from env.plan import Plan
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import OpGraph, Tensor

PRIORITIES = ("longest_path", "fifo", "msr")


@dataclass(frozen=True)
class ReferenceResult:
    """The outcome of one step (n ops, D devices, L links).

    Attributes:
        step_time_s: end of the last op.
        busy_s: D numbers, seconds each device computes.
        peak_bytes: D numbers; of devices on one memory at its owner, and 0 at the others.
        link_bytes: L numbers, bytes over each link.
        op_start_s, op_end_s: n numbers.
        transfers: in order of request; of a fixed sequence in order of start.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    link_bytes: tuple[float, ...]
    op_start_s: tuple[float, ...]
    op_end_s: tuple[float, ...]
    transfers: tuple[Sending, ...]


def simulate_reference(graph: OpGraph, cluster: Cluster, plan: Plan, priority: str = "longest_path") -> ReferenceResult:
    """Simulate one step.

    Args:
        graph, cluster: any; pins and colocation are not looked at.
        plan: where every op runs, and possibly in which order.
        priority: ``"longest_path"``, ``"fifo"`` or ``"msr"``, for a plan without an order.

    Raises:
        UnknownNameError: the priority does not exist.
        MismatchError: the plan is not one device of the cluster per op of the graph; an order of transfers with other
            transfers than the placement needs, or that can never be carried out.
    """
    if plan.order is None and priority not in PRIORITIES:
        raise UnknownNameError("priority", priority, PRIORITIES)
    numbers = device_numbers(graph, cluster, plan)
    order = None if plan.order is None else plan.order.tolist()
    step = _Step(graph, cluster, numbers, priority, order)
    if plan.transfer_order is not None:
        moves = [(tensor, target) for tensor, target in plan.transfer_order.tolist()]
        step = _FixedStep(graph, cluster, numbers, priority, order, transfer_order=moves)
    step.run()
    return step.result()


def device_numbers(graph: OpGraph, cluster: Cluster, plan: Plan) -> list[int]:
    """A plan's device number of every op.

    Raises:
        MismatchError: not exactly one device of the cluster for each op of the graph.
    """
    numbers: list[int] = plan.device.tolist()
    n_devices = len(cluster.devices)
    if len(numbers) != graph.n_ops or any(not 0 <= number < n_devices for number in numbers):
        raise MismatchError(
            f"a placement has one number from 0 to {n_devices - 1} for each of {graph.n_ops} ops; "
            f"got {len(numbers)} numbers from {min(numbers, default=0)} to {max(numbers, default=0)}."
        )
    return numbers


def transfer_seconds(tensor: Tensor, cluster: Cluster, source: int, target: int) -> float:
    """Time to move a tensor from one device to another over idle links."""
    links = [cluster.links[number] for number in cluster.routes[source, target].links]
    if tensor.transfer_s is not None:
        return tensor.transfer_s * len(links)
    latency_s = sum(link.latency_s for link in links)
    slowest = min((link.bandwidth_bytes_per_s for link in links), default=math.inf)
    return latency_s + tensor.bytes / slowest


@dataclass
class _Step:
    """The state of one simulated step."""

    graph: OpGraph
    cluster: Cluster
    device: list[int]
    priority: str
    order: list[float] | None
    now: float = 0.0
    running: dict[int, int] = field(default_factory=dict)  # device -> op
    ending: list[tuple[float, int]] = field(default_factory=list)  # heap of (end, device) of those
    changed: set[int] = field(default_factory=set)  # devices that became idle or got a ready op
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
        self.op_s = op_times(self.ops, self.cluster.devices, self.device, self.graph.origin.stack)
        self.remaining_s = self._remaining_paths()
        self.ready_since: dict[int, float] = {}
        self.ready: list[list[tuple[float, ...]]] = [[] for _ in self.cluster.devices]  # heaps of ranks; of msr, lists
        for i, missing in enumerate(self.missing):
            if missing == 0:
                self._make_ready(i)
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
            while self._end_ops() + self._arrive() + self._start_transfers() + self._start_ops():
                pass
            upcoming = [end for end, _ in self.ending[:1] + self.under_way[:1]]
            if not upcoming:
                return
            self.now = min(upcoming)

    def _end_ops(self) -> int:
        ended = 0
        while self.ending and self.ending[0][0] == self.now:
            _, d = heapq.heappop(self.ending)
            i = self.running.pop(d)
            self.changed.add(d)
            ended += 1
            for t in self.outputs[i]:
                targets = dict.fromkeys(self.device[c] for c in self.readers[t])  # in order of their first consumer
                for target in targets:
                    if target == d:
                        self._deliver(t, d)
                    else:
                        self._request(t, d, target)
        return ended

    def _request(self, tensor: int, source: int, target: int) -> None:
        links = self.cluster.routes[source, target].links
        start = max([self.now, *(self.link_free_s[link] for link in links if self.cluster.links[link].exclusive)])
        self._send(tensor, source, target, start)

    def _start_transfers(self) -> int:
        return 0  # links serve first come, first served: a request settles the start

    def _send(self, tensor: int, source: int, target: int, start: float) -> None:
        end = start + self._transfer_s(tensor, source, target)
        for link in self.cluster.routes[source, target].links:
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
                    self._make_ready(c)

    def _make_ready(self, i: int) -> None:
        self.ready_since[i] = self.now
        self.changed.add(self.device[i])
        heapq.heappush(self.ready[self.device[i]], self._rank(i))

    def _start_ops(self) -> int:
        started = 0
        changed, self.changed = sorted(self.changed), set()
        for d in changed:
            i = None if d in self.running else self._choice(d)
            if i is not None:
                self.running[d] = i
                self.start_s[i] = self.now
                self.end_s[i] = self.now + self.op_s[i]
                heapq.heappush(self.ending, (self.end_s[i], d))
                started += 1
        return started

    def _choice(self, device: int) -> int | None:
        """The op that an idle device starts now, which is ready no more."""
        ready = self.ready[device]
        if not ready:
            return None
        if self.order is None and self.priority == "msr":  # whose ranks are others at every moment
            rank = min(ready, key=lambda rank: (-self._msr_score(int(rank[-1])), *rank))
            ready.remove(rank)
            return int(rank[-1])
        return int(heapq.heappop(ready)[-1])

    def _rank(self, i: int) -> tuple[float, ...]:
        """Ready ops start in increasing order of this; with msr, of those with the highest score."""
        if self.order is not None:
            return self.order[i], i
        if self.priority == "fifo":
            return self.ready_since[i], i
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
        memory = memory_numbers(self.cluster.devices)
        of_ops = kept_bytes(self.ops, self.tensors, self.graph.origin.stack)
        for i, standing in enumerate(of_ops.standing):
            kept[memory[self.device[i]]] += standing
            busy[self.device[i]] += self.op_s[i]
        times = self.start_s, self.end_s, self.transfers
        intervals = memory_intervals(self.ops, self.tensors, of_ops.coming, self.device, memory, *times)
        return ReferenceResult(
            step_time_s=max(self.end_s),
            busy_s=tuple(busy),
            peak_bytes=peak_memory(kept, intervals),
            link_bytes=tuple(self.link_bytes),
            op_start_s=tuple(self.start_s),
            op_end_s=tuple(self.end_s),
            transfers=tuple(self.transfers),
        )


@dataclass
class _FixedStep(_Step):
    """A step in which devices and links wait for what is next in their sequence."""

    transfer_order: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self.order
        if order is None:
            raise MismatchError("a transfer order needs an order of the ops beside it; pass both or neither.")
        self.next_ops = [
            sorted((i for i, own in enumerate(self.device) if own == d), key=lambda i: (order[i], i), reverse=True)
            for d in range(len(self.cluster.devices))
        ]
        self.home = [self.device[self.graph.op_names.index(tensor.producer)] for tensor in self.tensors]
        self._refuse_other_transfers()
        self.made: set[int] = set()
        self.waiting = list(self.transfer_order)
        self.not_ended = list(self.transfer_order)

    def _refuse_other_transfers(self) -> None:
        needed = {
            (t, self.device[c])
            for t, readers in enumerate(self.readers)
            for c in readers
            if self.device[c] != self.home[t]
        }
        for pair in needed.symmetric_difference(self.transfer_order):
            found = "lacks" if pair in needed else "has"
            raise MismatchError(
                f"a transfer order has exactly the transfers that the placement needs; it {found} tensor {pair[0]} to "
                f"device {pair[1]}."
            )
        if len(needed) < len(self.transfer_order):
            raise MismatchError(f"the transfer order has {len(self.transfer_order)} transfers, expected {len(needed)}.")

    def run(self) -> None:
        super().run()
        for queue in self.next_ops:
            if queue:
                name = self.ops[queue[-1]].name
                raise MismatchError(f"the sequences can never be carried out: op {name!r} waits without end.")

    def _request(self, tensor: int, source: int, target: int) -> None:
        self.made.add(tensor)

    def _start_transfers(self) -> int:
        startable = [pair for pair in self.waiting if pair[0] in self.made and not self._blocked(pair)]
        for tensor, target in startable:
            self.waiting.remove((tensor, target))
            self._send(tensor, self.home[tensor], target, self.now)
        return len(startable)

    def _blocked(self, pair: tuple[int, int]) -> bool:
        """True if an earlier transfer over one of its exclusive links has not ended."""
        earlier = self.not_ended[: self.not_ended.index(pair)]
        return any(self._exclusive(pair) & self._exclusive(other) for other in earlier)

    def _exclusive(self, pair: tuple[int, int]) -> set[int]:
        links = self.cluster.routes[self.home[pair[0]], pair[1]].links
        return {link for link in links if self.cluster.links[link].exclusive}

    def _deliver(self, tensor: int, device: int) -> None:
        if device != self.home[tensor]:
            self.not_ended.remove((tensor, device))
        super()._deliver(tensor, device)

    def _choice(self, device: int) -> int | None:
        queue = self.next_ops[device]
        if not queue or queue[-1] not in self.ready_since:
            return None
        return queue.pop()

    def result(self) -> ReferenceResult:
        place = {pair: k for k, pair in enumerate(self.transfer_order)}
        self.transfers.sort(key=lambda sent: (sent.start_s, place[sent.tensor, sent.target]))
        return super().result()
