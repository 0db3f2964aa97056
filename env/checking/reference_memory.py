"""Memory over time in plain Python (docs/score.md, "Memory" and "Throughput").

A second opinion on `env.simulation.kernel`, `env.simulation.timeline` and `env.simulation.steady_memory`. It shares no
code with them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from env.cluster import Device
from graphs.opgraph import Op, Phase, Tensor

_ROUNDING = 1e-9  # relative, of a number of periods
_LANE, _HOST = "lane", "cpu"


@dataclass(frozen=True)
class Interval:
    """Bytes from ``start_s`` until just before ``end_s``: of an op on ``device``, or sent to it, in ``memory``.

    Gradients have no end; those of the step before are gone when they come.
    """

    device: int
    memory: int
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


def memory_numbers(devices: Sequence[Device]) -> list[int]:
    """For each device the number of the one in whose memory it works, which has the account."""
    names = [device.name for device in devices]
    return [names.index(device.memory_of) if device.memory_of else d for d, device in enumerate(devices)]


@dataclass(frozen=True)
class Kept:
    """Bytes kept by each op: from the beginning, and since the start of an op, by its number."""

    standing: list[int]
    coming: dict[int, int]


def kept_bytes(ops: Sequence[Op], tensors: Sequence[Tensor], stack: str | None) -> Kept:
    """Gradients of a colocation group come with the first op that makes them, all else is there from the beginning."""
    standing, coming = [op.kept_bytes for op in ops], dict[int, int]()
    makers = {} if stack == "fused" else _makers(ops, tensors)
    for i, op in enumerate(ops):
        if op.gradient_bytes and op.colocation in makers and _HOST not in op.pins:
            maker = makers[op.colocation]
            standing[i] -= op.gradient_bytes
            coming[maker] = coming.get(maker, 0) + op.gradient_bytes
    return Kept(standing, coming)


def _makers(ops: Sequence[Op], tensors: Sequence[Tensor]) -> dict[Hashable, int]:
    """The first op that writes a group's gradient into its place: of the group's backward pass, or of a lane.

    The group's updates alone read the last of what is written there. Groups of which a lane reads something in place
    are left out: what replicas exchange has buckets.
    """
    by_name = {op.name: i for i, op in enumerate(ops)}
    first: dict[Hashable, int] = {}
    ends, in_buckets = set[Hashable](), set[Hashable]()
    for tensor in tensors:
        producer = ops[by_name[tensor.producer]]
        readers = [ops[by_name[name]] for name in tensor.consumers]
        own = producer.colocation if producer.phase is Phase.BACKWARD else None
        if not tensor.in_place:
            continue
        if own is not None and any(_LANE in op.pins for op in readers):
            in_buckets.add(own)
        groups = {op.colocation for op in readers}
        group = groups.pop() if len(groups) == 1 else None
        is_last = all(op.phase is Phase.UPDATE for op in readers)
        if group is not None and (group == own or (is_last and _LANE in producer.pins)):
            first[group] = min(first.get(group, len(ops)), by_name[tensor.producer])
            if is_last:
                ends.add(group)
    return {group: first[group] for group in ends - in_buckets}


def memory_intervals(
    ops: Sequence[Op],
    tensors: Sequence[Tensor],
    coming: dict[int, int],
    device: Sequence[int],
    memory: Sequence[int],
    op_start_s: Sequence[float],
    op_end_s: Sequence[float],
    transfers: Sequence[Sending],
) -> list[Interval]:
    """Everything that takes memory for part of the step: workspaces and the copies of tensors.

    Args:
        ops, tensors: of the graph.
        coming: of `kept_bytes`.
        device: of each op.
        memory: of each device, see `memory_numbers`.
        op_start_s, op_end_s, transfers: what happened.
    """
    number = {op.name: i for i, op in enumerate(ops)}
    found = [
        Interval(device[i], memory[device[i]], op_start_s[i], op_end_s[i], op.workspace_bytes)
        for i, op in enumerate(ops)
        if op.workspace_bytes > 0
    ]
    found += [Interval(device[i], memory[device[i]], op_start_s[i], math.inf, size) for i, size in coming.items()]
    sent: dict[int, list[Sending]] = {}
    for transfer in transfers:
        sent.setdefault(transfer.tensor, []).append(transfer)
    for t, tensor in enumerate(tensors):
        producer = number[tensor.producer]
        readers = [number[name] for name in tensor.consumers]
        home = device[producer]
        last_use_s = [op_end_s[producer]]
        last_use_s += [op_end_s[c] for c in readers if memory[device[c]] == memory[home]]
        last_use_s += [transfer.end_s for transfer in sent.get(t, ())]
        if not tensor.in_place:
            found.append(Interval(home, memory[home], op_start_s[producer], max(last_use_s), tensor.bytes))
        for transfer in sent.get(t, ()):
            there = memory[transfer.target]
            if there != memory[home]:
                until_s = max([op_end_s[c] for c in readers if device[c] == transfer.target], default=transfer.end_s)
                found.append(Interval(transfer.target, there, transfer.start_s, until_s, tensor.bytes))
    return found


def peak_memory(kept_bytes: Sequence[int], intervals: Sequence[Interval]) -> tuple[int, ...]:
    """The largest sum of bytes at any instant, per memory; ``kept_bytes`` are there all the time."""
    changes: list[list[tuple[float, int]]] = [[] for _ in kept_bytes]
    for interval in intervals:
        if interval.start_s < interval.end_s:
            changes[interval.memory] += [
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


def steady_memory(
    kept_bytes: Sequence[int],
    intervals: Sequence[Interval],
    device: Sequence[int],
    memory: Sequence[int],
    op_start_s: Sequence[float],
    op_end_s: Sequence[float],
    period_s: float,
) -> tuple[int, ...]:
    """Bytes in each memory where such a step begins every ``period_s`` seconds; arguments as above."""
    turns: list[list[tuple[float, float]]] = [[] for _ in kept_bytes]  # in which a device never pauses
    for d, start_s, end_s in sorted(zip(device, op_start_s, op_end_s, strict=True)):
        if start_s < end_s:
            if turns[d] and start_s == turns[d][-1][1]:
                start_s = turns[d].pop()[0]
            turns[d].append((start_s, end_s))
    held = list(kept_bytes)
    of_turns = []
    for interval in intervals:
        until_s = min(interval.end_s, max(op_end_s))
        if until_s <= interval.start_s:
            continue
        if any(start_s <= interval.start_s and until_s <= end_s for start_s, end_s in turns[interval.device]):
            of_turns.append(interval)
        else:
            is_one = period_s <= 0 or math.isinf(interval.end_s)
            periods = 1.0 if is_one else (until_s - interval.start_s) / period_s
            held[interval.memory] += max(1, math.ceil(periods * (1 - _ROUNDING))) * interval.size_bytes
    # Devices on one memory may be at different steps: each has its own peak, and these add up.
    for d in range(len(memory)):
        held[memory[d]] += max(peak_memory([0] * len(memory), [one for one in of_turns if one.device == d]))
    return tuple(held)
