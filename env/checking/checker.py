"""Is a finished schedule right, and does a saved answer score what it says?

Written from docs/score.md, sharing no code with the compiled simulator or with anything that chooses placements; op and
transfer times and memory come from `env.checking.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from env.checking.reference import ReferenceResult, simulate_reference, transfer_seconds
from env.checking.reference_memory import Sending, kept_bytes, memory_intervals, memory_numbers, peak_memory
from env.checking.reference_times import op_times
from env.cluster import LANE, Cluster
from env.plan import Plan
from graphs.errors import MismatchError
from graphs.formatting import exact_bytes
from graphs.opgraph import FloatArray, IntArray, Op, OpGraph, Tensor

RELATIVE_TOLERANCE = 1e-9  # of the step time: times are sums of many rounded numbers


class ScheduleLike(Protocol):
    """A schedule as `check_schedule` reads it; `env.simulation.simulator.Schedule` is one."""

    @property
    def device(self) -> IntArray: ...
    @property
    def op_start_s(self) -> FloatArray: ...
    @property
    def op_end_s(self) -> FloatArray: ...
    @property
    def transfer_tensor(self) -> IntArray: ...
    @property
    def transfer_source(self) -> IntArray: ...
    @property
    def transfer_target(self) -> IntArray: ...
    @property
    def transfer_start_s(self) -> FloatArray: ...
    @property
    def transfer_end_s(self) -> FloatArray: ...


@dataclass(frozen=True)
class Audit:
    """A saved answer, scored again from scratch.

    Attributes:
        step_time_s: makespan.
        peak_bytes: by device name.
        bytes_moved: bytes sent from device to device, each tensor once per receiver.
        step: what the plain simulator says of the step.
        problems: sentences; empty if everything is in order.
    """

    step_time_s: float
    peak_bytes: Mapping[str, int]
    bytes_moved: int
    step: ReferenceResult
    problems: tuple[str, ...]


def audit(graph: OpGraph, cluster: Cluster, plan: Plan, priority: str = "longest_path") -> Audit:
    """Simulate a plan with the plain simulator and check the schedule that comes out.

    Args:
        graph, cluster: what the plan is for.
        plan: where every op runs, and possibly in which order; `env.checking.naming.plan_of` makes one of names.
        priority: how devices choose, see `env.checking.reference.simulate_reference`.

    Raises:
        MismatchError: the plan is for other ops or devices; an order of transfers with other transfers than the
            placement needs, or that can never be carried out.
    """
    result = simulate_reference(graph, cluster, plan, priority)
    sent = result.transfers
    schedule = _Times(
        device=plan.device,
        op_start_s=np.array(result.op_start_s),
        op_end_s=np.array(result.op_end_s),
        transfer_tensor=np.array([t.tensor for t in sent], dtype=np.int64),
        transfer_source=np.array([t.source for t in sent], dtype=np.int64),
        transfer_target=np.array([t.target for t in sent], dtype=np.int64),
        transfer_start_s=np.array([t.start_s for t in sent], dtype=np.float64),
        transfer_end_s=np.array([t.end_s for t in sent], dtype=np.float64),
    )
    sizes = graph.tensor_bytes.tolist()
    return Audit(
        step_time_s=result.step_time_s,
        peak_bytes={d.name: peak for d, peak in zip(cluster.devices, result.peak_bytes, strict=True)},
        bytes_moved=sum(sizes[t.tensor] for t in sent),
        step=result,
        problems=tuple(check_schedule(graph, cluster, schedule, plan)),
    )


def check_schedule(graph: OpGraph, cluster: Cluster, schedule: ScheduleLike, plan: Plan | None = None) -> list[str]:
    """Everything that is wrong with a schedule, as sentences; empty if it is valid.

    Every op runs once, where it may, for its time, with its colocation group; one op at a time per device; each tensor
    is sent once to each device that needs it, after its production, for its transfer time, over links that carry one
    transfer at a time; no op starts before its inputs are there; no device holds more than its memory.

    How devices and links choose among what waits is not checked, unless the plan is a fixed sequence: then devices and
    exclusive links must keep to it, and nothing may start later than it must.

    Args:
        graph, cluster, schedule: any.
        plan: what the schedule is to carry out: every op runs where it says.

    Raises:
        MismatchError: the plan is not one device per op of the graph.
    """
    if plan is not None and len(plan.device) != graph.n_ops:
        raise MismatchError(f"a plan has a device for each of {graph.n_ops} ops, got {len(plan.device)}.")
    n, x = graph.n_ops, len(schedule.transfer_tensor)
    lengths = [len(schedule.device), len(schedule.op_start_s), len(schedule.op_end_s)]
    if lengths != [n, n, n]:
        return [f"the schedule has {lengths} devices, starts and ends for {n} ops; each op runs exactly once."]
    sides = (schedule.transfer_source, schedule.transfer_target, schedule.transfer_start_s, schedule.transfer_end_s)
    if any(len(values) != x for values in sides):
        return ["the arrays of the schedule's transfers differ in length."]
    d = len(cluster.devices)
    for values, top in (
        (schedule.device, d),
        (sides[0], d),
        (sides[1], d),
        (schedule.transfer_tensor, graph.n_tensors),
    ):
        if any(not 0 <= value < top for value in values.tolist()):
            return [f"the schedule names device or tensor numbers outside 0 to {top - 1}."]
    times = np.concatenate([schedule.op_start_s, schedule.op_end_s, *sides[2:]])
    if not (np.isfinite(times).all() and times.min() >= 0):
        return ["the schedule has times that are negative or not finite."]
    step = _Checked(graph, cluster, schedule)
    return [
        *step.ops(),
        *step.groups(),
        *step.transfers(),
        *step.inputs(),
        *step.devices_and_links(),
        *step.memory(),
        *(() if plan is None else step.places(plan)),
        *(() if plan is None else step.sequences(plan)),
    ]


@dataclass(frozen=True)
class _Times:
    device: IntArray
    op_start_s: FloatArray
    op_end_s: FloatArray
    transfer_tensor: IntArray
    transfer_source: IntArray
    transfer_target: IntArray
    transfer_start_s: FloatArray
    transfer_end_s: FloatArray


@dataclass(frozen=True)
class _Turn:
    """An op or a transfer of a fixed sequence: where it takes its turn, and when what it needs is there."""

    what: str
    places: tuple[str, ...]
    needed_s: float
    start_s: float
    end_s: float


class _Checked:
    """A schedule as plain records, and one generator of complaints per rule."""

    def __init__(self, graph: OpGraph, cluster: Cluster, schedule: ScheduleLike) -> None:
        self.stack = graph.origin.stack
        self.cluster = cluster
        self.op_list: list[Op]
        self.tensor_list: list[Tensor]
        self.op_list, self.tensor_list = graph.records()
        self.number = {op.name: i for i, op in enumerate(self.op_list)}
        self.device: list[int] = schedule.device.tolist()
        self.start_s: list[float] = schedule.op_start_s.tolist()
        self.end_s: list[float] = schedule.op_end_s.tolist()
        columns = (
            schedule.transfer_tensor.tolist(),
            schedule.transfer_source.tolist(),
            schedule.transfer_target.tolist(),
            schedule.transfer_start_s.tolist(),
            schedule.transfer_end_s.tolist(),
        )
        self.sent = [Sending(*row) for row in zip(*columns, strict=True)]
        self.slack_s = RELATIVE_TOLERANCE * max(self.end_s)

    def _name(self, device: int) -> str:
        return self.cluster.devices[device].name

    def ops(self) -> Iterator[str]:
        op_s = op_times(self.op_list, self.cluster.devices, self.device, self.stack)
        for i, op in enumerate(self.op_list):
            device = self.cluster.devices[self.device[i]]
            if op.pins and not any(pin and pin in (device.name, device.model, device.kind) for pin in op.pins):
                yield f"op {op.name!r} may only run on {' or '.join(op.pins)}, but runs on {device.name}."
            elif device.kind == LANE and not op.pins:
                yield f"op {op.name!r} runs on {device.name}, a lane, which takes only ops pinned to it."
            expected_s, taken_s = op_s[i], self.end_s[i] - self.start_s[i]
            if abs(taken_s - expected_s) > self.slack_s:
                yield f"op {op.name!r} takes {taken_s} s on {device.name}, expected {expected_s} s."

    def groups(self) -> Iterator[str]:
        first: dict[object, int] = {}
        for i, op in enumerate(self.op_list):
            if op.colocation is not None:
                other = first.setdefault(op.colocation, i)
                if self.device[other] != self.device[i]:
                    yield (
                        f"ops {self.op_list[other].name!r} and {op.name!r} must share a device, but run on "
                        f"{self._name(self.device[other])} and {self._name(self.device[i])}."
                    )

    def transfers(self) -> Iterator[str]:
        seen: set[tuple[int, int]] = set()
        for transfer in self.sent:
            tensor = self.tensor_list[transfer.tensor]
            what = f"the output of op {tensor.producer!r} to {self._name(transfer.target)}"
            producer = self.number[tensor.producer]
            if (transfer.tensor, transfer.target) in seen:
                yield f"{what} is sent twice (tensor {transfer.tensor})."
            seen.add((transfer.tensor, transfer.target))
            if transfer.source != self.device[producer] or transfer.source == transfer.target:
                yield f"{what} is sent from {self._name(transfer.source)}, where it was not made or already needed."
                continue
            if all(self.device[self.number[c]] != transfer.target for c in tensor.consumers):
                yield f"{what} is sent, but no op there reads it."
            if transfer.start_s < self.end_s[producer] - self.slack_s:
                yield f"{what} starts at {transfer.start_s} s, before the op ends at {self.end_s[producer]} s."
            expected_s = transfer_seconds(tensor, self.cluster, transfer.source, transfer.target)
            taken_s = transfer.end_s - transfer.start_s
            if abs(taken_s - expected_s) > self.slack_s:
                yield f"{what} takes {taken_s} s, expected {expected_s} s."

    def inputs(self) -> Iterator[str]:
        for t, c, there_s in self._reads():
            name, producer = self.op_list[c].name, self.tensor_list[t].producer
            if there_s is None:
                yield f"op {name!r} reads the output of op {producer!r}, which is not sent to its device."
            elif self.start_s[c] < there_s - self.slack_s:
                yield (
                    f"op {name!r} starts at {self.start_s[c]} s, before the output of op {producer!r} is on "
                    f"{self._name(self.device[c])} at {there_s} s."
                )

    def _reads(self) -> Iterator[tuple[int, int, float | None]]:
        """Each tensor and consumer, and when the tensor is on the consumer's device; None if never."""
        arrival_s = {(t.tensor, t.target): t.end_s for t in self.sent}
        for t, tensor in enumerate(self.tensor_list):
            producer = self.number[tensor.producer]
            for c in (self.number[name] for name in tensor.consumers):
                here = self.device[c] == self.device[producer]
                yield t, c, self.end_s[producer] if here else arrival_s.get((t, self.device[c]))

    def devices_and_links(self) -> Iterator[str]:
        work: dict[str, list[tuple[float, float, str]]] = {}
        for i, op in enumerate(self.op_list):
            where = f"device {self._name(self.device[i])}"
            work.setdefault(where, []).append((self.start_s[i], self.end_s[i], f"op {op.name!r}"))
        for transfer in self.sent:
            if transfer.source == transfer.target:
                continue  # reported by `transfers`
            for number in self.cluster.routes[transfer.source, transfer.target].links:
                link = self.cluster.links[number]
                if not link.exclusive:
                    continue
                what = f"the output of op {self.tensor_list[transfer.tensor].producer!r}"
                work.setdefault(f"link {link.src} -> {link.dst}", []).append((transfer.start_s, transfer.end_s, what))
        for where, items in work.items():
            items.sort()
            busy_until_s, last = 0.0, ""
            for start_s, end_s, what in items:
                # An op or transfer that takes no time overlaps with nothing.
                if start_s < busy_until_s - self.slack_s and end_s > start_s:
                    yield f"{where} has {what} at {start_s} s while {last} is on it until {busy_until_s} s."
                if end_s > busy_until_s:
                    busy_until_s, last = end_s, what

    def memory(self) -> Iterator[str]:
        kept, memory = [0] * len(self.cluster.devices), memory_numbers(self.cluster.devices)
        of_ops = kept_bytes(self.op_list, self.tensor_list, self.stack)
        for i, standing in enumerate(of_ops.standing):
            kept[memory[self.device[i]]] += standing
        times = self.start_s, self.end_s, self.sent
        intervals = memory_intervals(self.op_list, self.tensor_list, of_ops.coming, self.device, memory, *times)
        for device, peak in zip(self.cluster.devices, peak_memory(kept, intervals), strict=True):
            room = device.memory_bytes - device.reserved_bytes
            if peak > room:
                reserved = f" beside the {exact_bytes(device.reserved_bytes)} reserved" if device.reserved_bytes else ""
                yield (
                    f"device {device.name} holds up to {exact_bytes(peak)}, but its memory is "
                    f"{exact_bytes(room)}{reserved}."
                )

    def places(self, plan: Plan) -> Iterator[str]:
        """Every op runs where the plan has it."""
        for op, found, wanted in zip(self.op_list, self.device, plan.device.tolist(), strict=True):
            if found != wanted:
                yield f"op {op.name!r} runs on {self._name(found)}, but the plan has it on device {wanted}."

    def sequences(self, plan: Plan) -> Iterator[str]:
        """Devices and exclusive links keep to a fixed sequence, and nothing waits for longer than it must."""
        if plan.order is None or plan.transfer_order is None:
            return
        order = plan.order.tolist()
        place = {(t, d): k for k, (t, d) in enumerate(plan.transfer_order.tolist())}
        for tensor, target in sorted(place.keys() ^ {(s.tensor, s.target) for s in self.sent}):
            yield f"the transfer order and the schedule differ in tensor {tensor} to device {target}."
        turns = self._op_turns(order) + self._transfer_turns(place)
        last: dict[str, _Turn] = {}
        for turn in turns:
            needed_s = turn.needed_s
            for where in turn.places:
                before = last.get(where)
                if before is not None:
                    needed_s = max(needed_s, before.end_s)
                    if turn.start_s < before.end_s - self.slack_s:
                        yield f"{turn.what} is out of turn on {where}, where {before.what} goes first."
                last[where] = turn
            if turn.start_s > needed_s + self.slack_s:
                yield f"{turn.what} starts at {turn.start_s} s, though nothing keeps it from starting at {needed_s} s."

    def _op_turns(self, order: list[float]) -> list[_Turn]:
        needed_s = [0.0] * len(self.op_list)
        for _, c, there_s in self._reads():
            needed_s[c] = max(needed_s[c], there_s or 0.0)
        return [
            _Turn(
                f"op {self.op_list[i].name!r}",
                (f"device {self._name(self.device[i])}",),
                needed_s[i],
                self.start_s[i],
                self.end_s[i],
            )
            for i in sorted(range(len(self.op_list)), key=lambda i: (order[i], i))
        ]

    def _transfer_turns(self, place: Mapping[tuple[int, int], int]) -> list[_Turn]:
        # A transfer that is not in the sequence, or stays on its device, is reported elsewhere.
        known = [s for s in self.sent if (s.tensor, s.target) in place and s.source != s.target]
        return [
            _Turn(
                f"the output of op {self.tensor_list[s.tensor].producer!r} to {self._name(s.target)}",
                tuple(
                    f"link {link.src} -> {link.dst}"
                    for link in (self.cluster.links[k] for k in self.cluster.routes[s.source, s.target].links)
                    if link.exclusive
                ),
                self.end_s[self.number[self.tensor_list[s.tensor].producer]],
                s.start_s,
                s.end_s,
            )
            for s in sorted(known, key=lambda s: place[s.tensor, s.target])
        ]
